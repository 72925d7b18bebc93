"""What a training is made of, built in the order in which it depends on each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from shoal.data.images.gpu import EncodedReader, GpuTransform
from shoal.data.images.reader import ImageReader
from shoal.data.images.shards import ImageShards
from shoal.data.images.transform import CentreTransform, TrainTransform
from shoal.data.loader import Batch, held_out_batches
from shoal.decide.order import BlockShuffle, ShuffledOrder
from shoal.models.resnet import new_resnet
from shoal.models.resnet8 import ResNet8
from shoal.recipes.images.data import decode_threads, open_shards
from shoal.recipes.images.job import ImageJob, trained_parts
from shoal.recipes.resnet.config import DataConfig, ResNetTrainConfig
from shoal.recipes.resnet.plan import Plan, make_plan
from shoal.train.checkpoint import Checkpointer
from shoal.train.config import required
from shoal.train.ema import WeightAverage
from shoal.train.gradients import choose_precision
from shoal.train.world import World

_AT_ONCE = 256


@dataclass(frozen=True, kw_only=True)
class Job(ImageJob):
    """Everything that the steps share; built once, changed only by what it holds."""

    config: ResNetTrainConfig
    plan: Plan
    train_reader: ImageReader | EncodedReader
    held_out_reader: ImageReader
    images_of: Callable[[Batch], Tensor]
    """Makes the images of a training batch, float32 ``[B, 3, S, S]``, on any device."""
    average: WeightAverage | None

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint holds: the average of the weights, too, where the run keeps one."""
        average = {"average": self.average.model} if self.average else {}
        return {**super().state(step), **average}


def build(config: ResNetTrainConfig, world: World) -> Job:
    """Open the images, make the model and what surrounds it."""
    train, held_out = open_shards(config, world, evict=config.data.block_size > 0)
    train_reader, images_of = training_images(config, train, world)
    precision = choose_precision(config.train.precision, world.device)
    model = make_model(config, world)
    if isinstance(model, ResNet8) and config.train.whiten_images:
        model.whiten(first_images(config, train_reader, images_of))
    num_examples = train_reader.num_examples
    return Job(
        config=config,
        world=world,
        plan=make_plan(config, num_examples=num_examples, num_workers=world.num_workers),
        precision=precision,
        train_reader=train_reader,
        held_out_reader=held_out_images(config, held_out, world),
        images_of=images_of,
        order=ShuffledOrder(num_examples=num_examples, seed=config.train.seed, blocks=blocks_of(config.data)),
        model=model,
        trained=trained_parts(config, model, world, precision),
        average=WeightAverage(model, config.train.average_decay) if config.train.average_decay else None,
        checkpointer=Checkpointer(required(config.run.dir), keep=config.run.keep_checkpoints),
    )


def blocks_of(data: DataConfig) -> BlockShuffle | None:
    """Return the order for slow storage, where that is asked for."""
    if not data.block_size:
        return None
    return BlockShuffle(block_size=data.block_size, blocks_in_window=data.blocks_in_window)


def make_model(config: ResNetTrainConfig, world: World) -> nn.Module:
    """Return the model with the same weights on every worker, compiled where that is asked for.

    Evaluation calls ``model.forward``, which is never compiled: its last batch is smaller than the others.
    """
    torch.manual_seed(config.train.seed)
    model = new_resnet(config.model, required(config.model.num_classes))
    form = torch.channels_last if config.train.channels_last else torch.contiguous_format
    model.to(world.device).to(memory_format=form)
    if config.train.compile if config.train.compile is not None else world.device.type == "cuda":
        model.compile(dynamic=False)  # a new side of the images compiles anew
    return model


def first_images(
    config: ResNetTrainConfig, reader: ImageReader | EncodedReader, images_of: Callable[[Batch], Tensor]
) -> Iterator[Tensor]:
    """Yield the images ``[B, 3, S, S]`` that the first convolution is computed from, alike on all workers."""
    for batch in held_out_batches(reader, micro_batch_size=_AT_ONCE, limit=config.train.whiten_images):
        yield images_of(batch)


def training_images(
    config: ResNetTrainConfig, shards: ImageShards, world: World
) -> tuple[ImageReader | EncodedReader, Callable[[Batch], Tensor]]:
    """Return what reads batches of the training images, and what makes images of a batch.

    Raises:
        UsageError: they are to be made on the device, which does not vary them so.
    """
    augment, seed = config.augment, config.train.seed
    if config.data.decode == "device":
        return EncodedReader(shards, seed=seed), GpuTransform(augment, seed=seed, device=world.device)
    reader = ImageReader(
        shards,
        TrainTransform(augment),
        seed=seed,
        threads=decode_threads(config.data, world),
        channels_last=config.train.channels_last,
        on_bad=config.data.on_bad,
    )
    return reader, itemgetter("images")


def held_out_images(config: ResNetTrainConfig, shards: ImageShards, world: World) -> ImageReader:
    """Return what reads the held-out images: the middle of each."""
    validation, augment = config.validation, config.augment
    return ImageReader(
        shards,
        CentreTransform(validation.size, validation.resize, mean=augment.mean, std=augment.std),
        seed=config.train.seed,
        threads=decode_threads(config.data, world),
        channels_last=config.train.channels_last,
    )
