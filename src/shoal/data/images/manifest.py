"""Describes a prepared directory of images: ``manifest.json``.

It holds the class names in the order of their labels, and the count, sizes and checksums of every shard, so
that a shard that was truncated, replaced or copied from another preparation is reported by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from shoal.data.manifest import PreparedManifest, ShardFiles

TAR = "tar"
INDEX = "index"


@dataclass(frozen=True, kw_only=True)
class ImageShardInfo(ShardFiles):
    """Image count and files of one shard."""

    KIND = "images"
    SUFFIXES = (TAR, INDEX)
    num_images: int


@dataclass(frozen=True, kw_only=True)
class ImageManifest(PreparedManifest[ImageShardInfo]):
    """The manifest of a directory of images.

    ``classes`` are the class names in the order of the labels; images of detection data have no label.
    ``skipped`` counts the images of the source that could not be read; ``skipped.txt`` lists them.
    """

    KIND = "images"
    SHARD = ImageShardInfo
    classes: tuple[str, ...]
    skipped: int = 0

    def num_images(self, split: str) -> int:
        """Return the number of images of a split."""
        return sum(shard.num_images for shard in self.shards(split))

    @classmethod
    def _from_json(cls, value: dict[str, Any]) -> Self:
        return cls(**{**value, "classes": tuple(value["classes"])})
