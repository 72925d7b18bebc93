"""Scores residual networks on held-out images, for ``resnet50.py`` and ``shoal evaluate imagenet``."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shoal.atomic_io import write_json
from shoal.data.images.shards import ImageShards
from shoal.env.worker import WorkerEnv
from shoal.errors import EXIT_OK, UsageError
from shoal.recipes import images
from shoal.recipes.start import Launch, start

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.data.images.reader import ImageReader
    from shoal.data.loader import Batch
    from shoal.train.gradients import Precision
    from shoal.train.run import Run
    from shoal.train.world import World

# ------------------------------------------------------------------------------------------------- scores

LOSS, TOP1, TOP5 = "loss", "top1_accuracy", "top5_accuracy"


def evaluate(
    model: nn.Module,
    reader: ImageReader,
    world: World,
    precision: Precision,
    *,
    batch_size: int,
    mirror: bool,
) -> tuple[dict[str, float], int]:
    """Return mean loss and the accuracies of the likeliest class and the five likeliest; number of images.

    Each image counts once, and the figures are the same bits on any number of workers.

    Args:
        batch_size: images that a worker computes at once.
        mirror: average the logits of an image and its mirror image.
    """
    import torch
    import torch.nn.functional as F

    from shoal.train.world import all_gather_json, infer

    def scored(batch: Batch) -> tuple[Tensor, Tensor, int]:
        labels = batch["labels"].to(world.device, non_blocking=True)
        logits = image_logits(model, batch["images"], precision, mirror=mirror)
        likeliest = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
        right = torch.stack([likeliest[:, 0].sum(), likeliest.sum()])
        return F.cross_entropy(logits, labels, reduction="sum"), right, len(labels)

    was_training = model.training
    model.eval()
    num_right = torch.zeros(2, dtype=torch.int64, device=world.device)
    losses: list[torch.Tensor] = []
    num_images = 0
    for loss, right, count in infer(scored, images.shared_batches(reader, world, batch_size), world.device):
        losses.append(loss)
        num_right += right
        num_images += count
    model.train(was_training)
    own = {"counts": [num_images, *num_right.tolist()], "losses": [float(loss) for loss in losses]}
    parts = all_gather_json(world.control, own)
    total, top1, top5 = (sum(column) for column in zip(*(part["counts"] for part in parts), strict=True))
    sum_of_losses = math.fsum(loss for part in parts for loss in part["losses"])  # in any order the same
    return {LOSS: sum_of_losses / total, TOP1: top1 / total, TOP5: top5 / total}, total


def image_logits(model: nn.Module, inputs: Tensor, precision: Precision, *, mirror: bool) -> Tensor:
    """Return the logits ``[B, num_classes]`` of images ``[B, 3, H, W]``, in fp32.

    Args:
        mirror: average those of each image and its mirror image.
    """
    inputs = images.like_weights(inputs, model)
    with precision.autocast():  # forward is not compiled: the last batch is smaller
        logits: Tensor = model.forward(inputs).float()
        if mirror:
            logits = (logits + model.forward(inputs.flip(3)).float()) / 2
    return logits


def estimate_norms(
    model: nn.Module, reader: ImageReader, run: Run, batch_size: int, *, num_images: int
) -> None:
    """Set the statistics of the norms to those of ``num_images`` images, always the same."""
    from shoal.train.weight_averaging import reestimate_norms

    def forward(batch: Batch) -> None:
        with run.precision.autocast():
            model.forward(images.like_weights(batch["images"], model))

    batches = images.shared_batches(reader, run.world, batch_size, limit=num_images)
    reestimate_norms(model, batches, forward, run.world.control)


# ------------------------------------------------------------------------------------------------- command


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """The images to score, and how."""

    data: str
    """Directory that `shoal prepare images` wrote, or s3://BUCKET/PREFIX of one."""
    split: Literal["validation", "train"] = "validation"
    """The split to score."""
    batch_size: int = 256
    """Images per worker and forward pass."""
    mirror: bool | None = None
    """Average the logits of each image and its mirror image; default: as in training."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Autocast type; auto: fp32 on CPUs; on GPUs bf16, or fp16 where there is none. It is in the output."""
    json: Path | None = None
    """File for the figures."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UsageError(f"--batch-size {self.batch_size} must be at least 1")


def run(source: Path, what: Scoring, how: Launch, *, command: list[str]) -> int:
    """Join the workers if this process is one, else start them; return the exit code.

    Args:
        source: exported network, run, or checkpoint of a run.
        what: the images.
        how: options of starting workers.
        command: what a worker is started with.

    Raises:
        UsageError: the images or the network are not there, or do not go together.
        ShoalError: a worker failed.
    """

    def describe(num_workers: int) -> list[str]:
        images.find_network(source)
        shards = ImageShards(what.data, what.split)
        return [f"{len(shards):,} images of {what.data} over {num_workers} workers"]

    with tempfile.TemporaryDirectory(prefix="shoal-evaluate-") as folder:
        return start(
            how,
            command=command,
            run_dir=Path(folder),
            describe=describe,
            work=lambda place: score(source, what, place),
        )


def score(source: Path, what: Scoring, joined: WorkerEnv) -> int:
    """Score with all workers; the main one prints the counts and writes the file."""
    import torch

    from shoal.data.images.reader import ImageReader, default_decode_threads
    from shoal.data.images.transform import CentreTransform
    from shoal.recipes.resnet50_export import read_network
    from shoal.train.config import DistributedConfig
    from shoal.train.gradients import agree_on_precision
    from shoal.train.world import join_world

    with join_world(joined, DistributedConfig()) as world:
        network = read_network(source)
        shards = ImageShards(what.data, what.split)
        check_classes(source, network.classes, what.data, shards.manifest.classes)
        centre = CentreTransform(network.size, network.resize, mean=network.mean, std=network.std)
        threads = default_decode_threads(world.place.num_local_workers)
        precision = agree_on_precision(what.precision, world)
        metrics, num_images = evaluate(
            network.model.to(world.device).to(memory_format=torch.channels_last),
            ImageReader(shards, centre, seed=0, threads=threads, channels_last=True),
            world,
            precision,
            batch_size=what.batch_size,
            mirror=network.mirror if what.mirror is None else what.mirror,
        )
        if world.is_main:
            right = [round(metrics[name] * num_images) for name in (TOP1, TOP5)]
            print(
                f"top-1 {100 * metrics[TOP1]:.3f} % ({right[0]:,} of {num_images:,} images), "
                f"top-5 {100 * metrics[TOP5]:.3f} % ({right[1]:,}), loss {metrics[LOSS]:.4f}, in "
                f"{precision.name}"
            )
            if what.json is not None:
                tree = {"num_images": num_images, "top1": right[0], "top5": right[1], **metrics}
                write_json(what.json, {**tree, "precision": precision.name})
        return EXIT_OK


def check_classes(source: Path, ours: tuple[str, ...], data: str, theirs: tuple[str, ...]) -> None:
    """Check that labels mean the same in the network and in the images.

    Raises:
        UsageError: they do not.
    """
    for label, (our, their) in enumerate(zip_longest(ours, theirs)):
        if our != their:
            raise UsageError(
                f"label {label} is {our!r} in the network {source} and {their!r} in the images "
                f"{data}: evaluate on images that were prepared with the classes of its training"
            )
