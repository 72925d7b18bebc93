"""Scores on held-out images: each is counted once, whatever the number of workers."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal import record
from shoal.data.images.reader import ImageReader
from shoal.data.images.transform import TrainTransform
from shoal.data.loader import Batch, held_out_batches
from shoal.recipes.resnet.job import Job
from shoal.train.gradients import Precision
from shoal.train.norm_statistics import reestimate_norms
from shoal.train.world import World

LOSS, TOP1, TOP5 = "loss", "top1_accuracy", "top5_accuracy"
_AHEAD = 2


def evaluate(
    model: nn.Module,
    reader: ImageReader,
    world: World,
    precision: Precision,
    *,
    batch_size: int,
    mirror: bool,
    step: int,
) -> record.Evaluation:
    """Return the mean loss and the parts of the images whose class is the likeliest, or among five.

    The images are cut into the same batches however many workers share them, so the counts are the same. With
    ``mirror`` the logits of an image are the mean of its and its mirror image's.
    """
    began = time.monotonic()
    num_right = torch.zeros(2, dtype=torch.int64, device=world.device)
    loss = torch.zeros(1, dtype=torch.float64, device=world.device)
    num_images = 0
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        for batch in _batches(reader, world, batch_size):
            labels = batch["labels"].to(world.device, non_blocking=True)
            with precision.autocast():
                images = in_form_of(model, batch["images"], world.device)
                logits = model.forward(images).float()
                if mirror:
                    logits = (logits + model.forward(images.flip(3)).float()) / 2
            loss += F.cross_entropy(logits, labels, reduction="sum").double()
            num_right += num_correct(logits, labels)
            num_images += len(labels)
    model.train(was_training)
    num_images, top1, top5 = world.sum_counts(num_images, *num_right.tolist())
    total = float(world.sum_values(loss.cpu()))
    return record.Evaluation(
        step=step,
        split="validation",
        num_samples=num_images,
        metrics={LOSS: total / num_images, TOP1: top1 / num_images, TOP5: top5 / num_images},
        seconds=time.monotonic() - began,
    )


def scored_model(job: Job) -> nn.Module:
    """Return the model to evaluate and to export: the weights or their average, with statistics that fit.

    The statistics of an average, or of weights that learnt on smaller images, are others than the running
    ones; the images for them are always the same, at the final size.
    """
    config = job.config
    model = job.average.model if job.average else job.model
    if not config.train.norm_images:
        return model
    model = copy.deepcopy(model)
    reader = ImageReader(
        job.train_reader.shards,
        TrainTransform(replace(config.augment, first_size=None)),
        seed=config.train.seed,
        threads=job.held_out_reader.num_threads,
        channels_last=config.train.channels_last,
        on_bad=config.data.on_bad,
    )

    def forward(batch: Batch) -> None:
        with job.precision.autocast():
            model.forward(in_form_of(model, batch["images"], job.world.device))

    batches = _batches(reader, job.world, config.validation.batch_size, limit=config.train.norm_images)
    reestimate_norms(model, batches, forward, job.world.control)
    return model


def num_correct(logits: Tensor, labels: Tensor) -> Tensor:
    """Return how many ``labels`` ``[B]`` are the likeliest class and among the five likeliest, ``[2]``."""
    likeliest = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
    return torch.stack([likeliest[:, 0].sum(), likeliest.sum()])


def in_form_of(model: nn.Module, images: Tensor, device: torch.device) -> Tensor:
    """Return ``images`` ``[B, 3, H, W]`` on ``device``, laid out in memory as the model's weights are."""
    weight = next(parameter for parameter in model.parameters() if parameter.ndim == 4)
    last = weight.is_contiguous(memory_format=torch.channels_last)
    form = torch.channels_last if last else torch.contiguous_format
    return images.to(device, non_blocking=True, memory_format=form)


def _batches(reader: ImageReader, world: World, batch_size: int, limit: int | None = None) -> Iterator[Batch]:
    return held_out_batches(
        reader,
        limit=limit,
        micro_batch_size=batch_size,
        rank=world.place.rank,
        num_workers=world.num_workers,
        dealt=True,
        num_ahead=_AHEAD,
        pin_memory=world.device.type == "cuda",
    )
