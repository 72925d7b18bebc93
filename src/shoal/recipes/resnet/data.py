"""Which images the settings name, and the images that a run makes for itself."""

from __future__ import annotations

from dataclasses import replace

from shoal.data.images.shards import ImageShards
from shoal.errors import UsageError
from shoal.recipes.images.data import MADE, both_splits, check_named, location_of, must_make_images
from shoal.recipes.resnet.config import ResNetTrainConfig
from shoal.train.config import required

NUM_CLASSES_MADE = 10


def make_images_if_due(config: ResNetTrainConfig) -> None:
    """Make the run's own images, where none are named and they are not there yet."""
    if not must_make_images(config):
        return
    from shoal.data.images.synthetic import make_images

    make_images(
        required(config.run.dir) / MADE,
        num_classes=NUM_CLASSES_MADE,
        num_train=config.data.made_images,
        num_validation=config.data.num_made_held_out,
        size=config.data.made_size,
        seed=config.train.seed,
    )


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
        return config.data.made_images, config.data.num_made_held_out, NUM_CLASSES_MADE
    train, held_out = both_splits(config)
    return len(train), len(held_out), len(train.manifest.classes)
