"""What a training is made of, built in the order in which it depends on each other."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.data.coco.augment import DetectionAugmentConfig
from shoal.data.coco.reader import DetectionReader
from shoal.data.coco.transform import DetectionTransform
from shoal.decide.bucketing import GroupedOrder, aspect_groups
from shoal.models.detection.mask_rcnn import MaskRCNN
from shoal.recipes.images import decode_threads, open_shards
from shoal.recipes.mask_rcnn.config import MaskRCNNTrainConfig, ValidationConfig
from shoal.recipes.mask_rcnn.data import categories_of
from shoal.recipes.mask_rcnn.images_job import ImageJob, trained_parts
from shoal.recipes.mask_rcnn.plan import Plan, make_plan
from shoal.recipes.mask_rcnn.weights import load_weights
from shoal.train.checkpoint import Checkpointer
from shoal.train.config import required
from shoal.train.exchange import together
from shoal.train.gradients import choose_precision
from shoal.train.world import World


@dataclass(frozen=True, kw_only=True)
class Job(ImageJob):
    """Everything that the steps share; built once, changed only by what it holds."""

    config: MaskRCNNTrainConfig
    plan: Plan
    train_reader: DetectionReader
    held_out_reader: DetectionReader
    model: MaskRCNN


def build(config: MaskRCNNTrainConfig, world: World) -> Job:
    """Open the images, make the model and what surrounds it."""
    train_reader, held_out_reader = open_data(config, world)
    precision = choose_precision(config.train.precision, world.device)
    model = make_model(config, len(train_reader.categories), world)
    return Job(
        config=config,
        world=world,
        plan=make_plan(config, num_examples=train_reader.num_examples, num_workers=world.num_workers),
        precision=precision,
        train_reader=train_reader,
        held_out_reader=held_out_reader,
        order=order_of(config, train_reader),
        model=model,
        trained=trained_parts(config, model, world, precision),
        checkpointer=Checkpointer(required(config.run.dir), keep=config.run.keep_checkpoints),
    )


def order_of(config: MaskRCNNTrainConfig, reader: DetectionReader) -> GroupedOrder:
    """Return the order in which each micro-batch is of one aspect, on any number of workers."""
    groups = aspect_groups(reader.shards.sizes)
    return GroupedOrder(groups, run_size=config.train.micro_batch_size, seed=config.train.seed)


def begin_with_weights(job: Job) -> str:
    """Fill the new model with the weights that the settings name, if any; return where they are from.

    Raises:
        UsageError: the file is not there, or of another network.
        ShoalError: it is damaged.
    """
    path = job.config.model.weights
    if path is None:
        return "random"
    return together(job.world.control, lambda: load_weights(job.model, path))[0]


def make_model(config: MaskRCNNTrainConfig, num_categories: int, world: World) -> MaskRCNN:
    """Return the model with the same random weights on every worker, in the form that is asked for."""
    torch.manual_seed(config.train.seed)
    model = MaskRCNN(config.model, num_categories)
    form = torch.channels_last if config.train.channels_last else torch.contiguous_format
    model.to(world.device).to(memory_format=form)
    if config.train.compile:
        model.backbone.compile()
    return model


def open_data(config: MaskRCNNTrainConfig, world: World) -> tuple[DetectionReader, DetectionReader]:
    """Return the readers of the training and the held-out images; the main worker verifies their bytes."""
    train, held_out = open_shards(config, world)
    categories, threads = categories_of(config), decode_threads(config.data, world)
    seed, transform = config.train.seed, DetectionTransform(config.augment)
    return (
        DetectionReader(train, transform, categories, seed=seed, threads=threads),
        DetectionReader(
            held_out, held_out_transform(config.validation), categories, seed=seed, threads=threads
        ),
    )


def held_out_transform(validation: ValidationConfig) -> DetectionTransform:
    """Return what makes an image ready to be scored."""
    return DetectionTransform(
        DetectionAugmentConfig(shorter=(validation.shorter,), longer=validation.longer, flip=0.0)
    )
