"""Which images the settings name, and the images that a run makes for itself."""

from __future__ import annotations

from shoal.data.coco.source import CATEGORIES, read_categories
from shoal.recipes.images import MADE, location_of, must_make_images, open_shards
from shoal.recipes.mask_rcnn.config import MaskRCNNTrainConfig
from shoal.train.config import required


def make_images_if_due(config: MaskRCNNTrainConfig) -> None:
    """Make the run's own images, where none are named and they are not there yet."""
    if not must_make_images(config, CATEGORIES):
        return
    from shoal.data.coco.synthetic import make_coco

    make_coco(
        required(config.run.dir) / MADE,
        num_train=config.data.made_images,
        num_validation=config.data.num_made_held_out,
        size=config.data.made_size,
        seed=config.train.seed,
    )


def categories_of(config: MaskRCNNTrainConfig) -> dict[int, str]:
    """Return the names of the categories by id, in the order of their labels.

    Raises:
        UsageError: the images were not prepared from COCO.
    """
    return read_categories(location_of(config))


def counts_of(config: MaskRCNNTrainConfig) -> tuple[int, int, int]:
    """Return how many training images, held-out images and categories there are, or will be.

    Raises:
        UsageError: no images are named, or they are not there.
    """
    if config.data.path is None and config.data.made_images:
        from shoal.data.coco.synthetic import NUM_CATEGORIES

        return config.data.made_images, config.data.num_made_held_out, NUM_CATEGORIES
    train, held_out = open_shards(config)
    return len(train), len(held_out), len(categories_of(config))
