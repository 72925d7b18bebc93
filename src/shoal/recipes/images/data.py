"""Where the images are, and in what way they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from shoal.data.images.cache import CacheConfig
from shoal.data.images.reader import default_decode_threads
from shoal.data.images.shards import ImageShards
from shoal.data.images.sources import TRAIN, VALIDATION
from shoal.data.manifest import MANIFEST
from shoal.errors import UsageError
from shoal.recipes.images.config import ImageDataConfig, ImageTrainConfig
from shoal.train.config import required
from shoal.train.parallel_config import parse_bytes
from shoal.train.world import World

MADE = "images"
"""Folder of the run directory with the images that it made."""


def location_of(config: ImageTrainConfig) -> Path | str:
    """Return where the prepared images are: a directory, or s3://BUCKET/PREFIX."""
    return config.data.path or required(config.run.dir) / MADE


def check_named(config: ImageTrainConfig) -> None:
    """Check that images are named, or to be made.

    Raises:
        UsageError: neither.
    """
    if config.data.path is None and not config.data.made_images:
        raise UsageError(
            f"data.path is not set: name the directory that `{config.prepare}` wrote, "
            "e.g. --data.path runs/images"
        )


def must_make_images(config: ImageTrainConfig, last_file: str = MANIFEST) -> bool:
    """Whether the run makes its own images and they are not there yet: not the file that is written last.

    Raises:
        UsageError: no images are named, nor to be made.
    """
    check_named(config)
    return config.data.path is None and not (required(config.run.dir) / MADE / last_file).is_file()


def both_splits(
    config: ImageTrainConfig,
    *,
    verify: Literal["sizes", "checksums"] = "sizes",
    cache: CacheConfig | None = None,
) -> tuple[ImageShards, ImageShards]:
    """Return the images to train and to validate on.

    Raises:
        UsageError: they are not there, or there are none to validate on.
    """
    location = location_of(config)
    train = ImageShards(location, TRAIN, verify=verify, cache=cache)
    if VALIDATION not in train.manifest.splits:
        raise UsageError(
            f"{location} has no images to validate on: prepare it again with some, see "
            f"`{config.prepare} --help`"
        )
    return train, ImageShards(location, VALIDATION, verify=verify, cache=cache)


def open_shards(
    config: ImageTrainConfig, world: World, *, evict: bool = False
) -> tuple[ImageShards, ImageShards]:
    """Return the images to train and to validate on; the main worker verifies their bytes if asked.

    Args:
        evict: whether shards that were not needed for longest make room in a full cache.
    """
    data = config.data
    cache = None
    if data.cache is not None:
        size = parse_bytes(data.cache_bytes, "data.cache_bytes")
        cache = CacheConfig(directory=data.cache, num_bytes=size, evict=evict)
    return both_splits(config, verify=data.verify if world.is_main else "sizes", cache=cache)


def decode_threads(data: ImageDataConfig, world: World) -> int:
    """Return how many threads of this worker decode images."""
    return data.decode_threads or default_decode_threads(world.place.num_local_workers, data.loader_processes)
