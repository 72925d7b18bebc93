"""Which images the settings name, and the images that a run makes for itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from shoal.data.images.shards import ImageShards
from shoal.data.manifest import MANIFEST
from shoal.errors import UsageError
from shoal.recipes.resnet.config import ResNetTrainConfig
from shoal.train.config import required

MADE = "images"
"""Folder of the run directory with the images that it made."""
NUM_CLASSES_MADE = 10


def location_of(config: ResNetTrainConfig) -> Path | str:
    """Return where the prepared images are: a directory, or s3://BUCKET/PREFIX."""
    return config.data.path or required(config.run.dir) / MADE


def check_named(config: ResNetTrainConfig) -> None:
    """Check that images are named, or to be made.

    Raises:
        UsageError: neither.
    """
    if config.data.path is None and not config.data.made_images:
        raise UsageError(
            "data.path is not set: name the directory that `shoal prepare images` wrote, "
            "e.g. --data.path runs/images"
        )


def make_images_if_due(config: ResNetTrainConfig) -> None:
    """Make the run's own images, where none are named and they are not there yet."""
    check_named(config)
    directory = required(config.run.dir) / MADE
    if config.data.path is not None or (directory / MANIFEST).is_file():
        return
    from shoal.data.images.made import make_images

    make_images(
        directory,
        num_classes=NUM_CLASSES_MADE,
        num_train=config.data.made_images,
        num_validation=num_made_held_out(config),
        size=config.data.made_size,
        seed=config.train.seed,
    )


def num_made_held_out(config: ResNetTrainConfig) -> int:
    """Return how many images to validate on the run makes."""
    return max(config.data.made_images // 5, 1)


def num_classes(config: ResNetTrainConfig, found: int) -> int:
    """Return how many classes the model tells apart, ``found`` being those of the images.

    Raises:
        UsageError: the settings name fewer, or the images have no labels.
    """
    wanted = config.model.num_classes or found
    if not found:
        raise UsageError(f"{location_of(config)} holds images without labels: prepare class folders")
    if wanted < found:
        raise UsageError(
            f"model.num_classes {wanted} is too small for the {found:,} classes of {location_of(config)}"
        )
    return wanted


def with_classes(config: ResNetTrainConfig) -> ResNetTrainConfig:
    """Return the settings with the number of classes, which is that of the images unless more are asked for.

    Raises:
        UsageError: the images are not there, have no labels, or more classes than the settings name.
    """
    found = len(ImageShards(location_of(config), "train").manifest.classes)
    return replace(config, model=replace(config.model, num_classes=num_classes(config, found)))


def counts_of(config: ResNetTrainConfig) -> tuple[int, int, int]:
    """Return how many training images, held-out images and classes there are, or will be.

    Raises:
        UsageError: no images are named, or they are not there.
    """
    check_named(config)
    if config.data.path is None:
        return config.data.made_images, num_made_held_out(config), NUM_CLASSES_MADE
    train, held_out = (ImageShards(location_of(config), split) for split in ("train", "validation"))
    return len(train), len(held_out), len(train.manifest.classes)
