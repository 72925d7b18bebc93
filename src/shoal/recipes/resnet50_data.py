"""Opens the images of ``resnet50.py``: to train on, held out, and to estimate the norms' statistics from."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.data.images.gpu import EncodedReader, GpuTransform
from shoal.data.images.normalise import Normalisation
from shoal.data.images.reader import DTypeName, ImageReader, Transform
from shoal.data.images.shards import ImageShards
from shoal.data.images.synthetic import make_images
from shoal.data.images.transform import CentreTransform, TrainTransform
from shoal.data.loader import Batch
from shoal.data.manifest import MANIFEST
from shoal.data.sources import ReaderSource
from shoal.decide.order import BlockShuffle, ShuffledOrder
from shoal.recipes import images
from shoal.recipes.resnet50_config import NUM_CLASSES_MADE, ResNetTrainConfig
from shoal.recipes.resnet50_score import estimate_norms
from shoal.train.run import Run


def open_images(config: ResNetTrainConfig, run: Run) -> tuple[ImageShards, ImageShards]:
    """Return the images to train and to validate on, made if none are named; the run keeps what they are.

    Raises:
        UsageError: they are not there, or there are none to validate on.
    """
    images.make_images(config, run.world, partial(make_images, num_classes=NUM_CLASSES_MADE))
    shards = images.open_shards(config, run.world, evict=config.data.block_size > 0)
    images.keep_description(config, run, MANIFEST)
    return shards


def open_reader(
    config: ResNetTrainConfig, run: Run, shards: ImageShards, transform: Transform, **options: Any
) -> ImageReader:
    """Return a reader of decoded images, in the layout of the model's weights."""
    return ImageReader(
        shards,
        transform,
        seed=run.seed,
        threads=images.decode_threads(config.data, run.world),
        channels_last=config.train.channels_last,
        **options,
    )


def open_training(
    config: ResNetTrainConfig, run: Run, train: ImageShards
) -> tuple[ReaderSource, Callable[[Batch], Tensor]]:
    """Return the training images in their order, and how a batch becomes images on the device.

    These are ``[B, 3, S, S]``, float32 or bfloat16.
    """
    run.epoch_samples = len(train)
    data, augment = config.data, config.augment
    reader: ImageReader | EncodedReader
    images_of: Callable[[Batch], Tensor]
    if data.decode == "device":
        reader = EncodedReader(train, seed=run.seed)
        images_of = GpuTransform(augment, seed=run.seed, device=run.world.device)
    else:
        # The first convolution rounds its input to bf16: rounded here, half the bytes are copied.
        halves = run.precision.name == "bf16" and not (config.train.mixup or config.train.whiten_images)
        in_bytes = images.copies_bytes(run.world, augment)
        normalise = Normalisation(run.world.device, mean=augment.mean, std=augment.std)
        dtype: DTypeName = "uint8" if in_bytes else "uint16" if halves else "float32"
        reader = open_reader(config, run, train, TrainTransform(augment), on_bad=data.on_bad, dtype=dtype)

        def images_of(batch: Batch) -> Tensor:
            pixels: Tensor = run.to_device(batch["images"])
            if in_bytes:
                return normalise(pixels, dtype=torch.bfloat16 if halves else torch.float32)
            return pixels.view(torch.bfloat16) if halves else pixels

    blocks = None
    if data.block_size:
        blocks = BlockShuffle(block_size=data.block_size, blocks_in_window=data.blocks_in_window)
    order = ShuffledOrder(num_examples=len(train), seed=run.seed, blocks=blocks)
    return ReaderSource(reader=reader, order=order, processes=data.loader_processes), images_of


def open_held_out(config: ResNetTrainConfig, run: Run, held_out: ImageShards) -> ImageReader:
    """Return a reader of the middles of the held-out images."""
    validation, augment = config.validation, config.augment
    centre = CentreTransform(validation.size, validation.resize, mean=augment.mean, std=augment.std)
    return open_reader(config, run, held_out, centre)


def with_norms_of(model: nn.Module, config: ResNetTrainConfig, run: Run, train: ImageShards) -> nn.Module:
    """Return a copy of a model whose norms have the statistics of training images of full size."""
    scored = copy.deepcopy(model)
    full_size = TrainTransform(replace(config.augment, first_size=None))
    reader = open_reader(config, run, train, full_size, on_bad=config.data.on_bad)
    batch_size, num_images = config.validation.batch_size, config.train.norm_images
    estimate_norms(scored, reader, run, batch_size, num_images=num_images)
    return scored
