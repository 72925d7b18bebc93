"""Describes a prepared directory of images: ``manifest.json``.

It holds the class names in the order of their labels, and the count, sizes and checksums of every shard, so
that a shard that was truncated, replaced or copied from another preparation is reported by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from shoal.data.manifest import TFRECORD, PreparedManifest, ShardFile, ShardFiles

TAR = "tar"
INDEX = "index"


@dataclass(frozen=True, kw_only=True)
class ImageShardInfo(ShardFiles):
    """Image count and files of one shard."""

    KIND = "images"
    SUFFIXES = (INDEX,)
    OPTIONAL = (TAR, TFRECORD)
    num_images: int

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            ValueError: as for other shards; or its images are not in exactly one file.
        """
        super().__post_init__()
        if len(self.files) != len(self.SUFFIXES) + 1:
            raise ValueError(f"the shard {self.name!r} must have one of the files {', '.join(self.OPTIONAL)}")

    @property
    def images(self) -> ShardFile:
        """The file with the images."""
        return self.file(TAR if TAR in self.files else TFRECORD)

    def file_list(self) -> list[ShardFile]:
        """Return the file of which hosts keep copies."""
        return [self.images]


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
