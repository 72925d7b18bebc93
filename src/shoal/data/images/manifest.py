"""Describes a prepared directory of images: ``manifest.json``.

It holds the class names in the order of their labels, and the count, sizes and checksums of every shard, so
that a shard that was truncated, replaced or copied from another preparation is reported by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.data.atomic_io import sha256_of
from shoal.data.manifest import (
    MANIFEST,
    check_shard,
    parse_manifest,
    read_manifest,
    shards_of,
    write_manifest,
)
from shoal.errors import ShoalError

FORMAT = "shoal-images"
VERSION = 1
TAR = "tar"
INDEX = "index"


@dataclass(frozen=True, kw_only=True)
class ImageShardInfo:
    """Image count of one shard, and the size and SHA-256 of each of its files.

    ``files`` maps the suffix ("tar", "index") to ``{"bytes": int, "sha256": str}``; the file of a suffix is
    ``NAME.SUFFIX``.
    """

    name: str
    num_images: int
    files: dict[str, dict[str, Any]]

    def __post_init__(self) -> None:
        check_shard(self.name, (self.num_images,), self.files, (TAR, INDEX))

    def check(self, directory: Path) -> None:
        """Check size and SHA-256 of the shard's files, reading every byte.

        Raises:
            ShoalError: a file is missing, cannot be read, or differs from the manifest.
        """
        for suffix, expected in self.files.items():
            path = directory / f"{self.name}.{suffix}"
            try:
                found_bytes, found = path.stat().st_size, sha256_of(path)
            except OSError as error:
                raise ShoalError(
                    f"{path}, which the manifest names, cannot be read: {error.strerror}"
                ) from error
            check_facts(path, found_bytes, found, expected)


def check_facts(path: Path | str, num_bytes: int, sha256: str, expected: Mapping[str, Any]) -> None:
    """Check the size and the SHA-256 of a file against its entry in the manifest.

    Raises:
        ShoalError: they differ.
    """
    if (num_bytes, sha256) != (expected["bytes"], expected["sha256"]):
        raise ShoalError(
            f"{path} has the wrong checksum: {num_bytes:,} bytes, SHA-256 {sha256[:16]}…, the manifest says "
            f"{expected['bytes']:,} bytes, {expected['sha256'][:16]}…; it was changed, damaged or comes from "
            "another preparation: copy it again or prepare the images again"
        )


@dataclass(frozen=True, kw_only=True)
class ImageManifest:
    """The contents of ``manifest.json``.

    ``classes`` are the class names in the order of the labels; images of detection data have no label.
    ``source`` describes where the images come from. ``splits`` maps "train" and "validation" to their shards,
    in the order in which images are numbered. ``skipped`` counts the images of the source that could not be
    read; ``skipped.txt`` lists them.
    """

    classes: tuple[str, ...]
    source: str
    splits: dict[str, tuple[ImageShardInfo, ...]]
    skipped: int = 0

    def shards(self, split: str) -> tuple[ImageShardInfo, ...]:
        """Return the shards of a split.

        Raises:
            UsageError: there is no such split.
        """
        return shards_of(self.splits, split)

    def num_images(self, split: str) -> int:
        """Return the number of images of a split."""
        return sum(shard.num_images for shard in self.shards(split))

    def save(self, directory: Path) -> None:
        """Write ``manifest.json``, atomically and last of all files.

        Raises:
            ShoalError: the disk is full or the folder cannot be written.
        """
        write_manifest(directory, dataclasses.asdict(self), format=FORMAT, version=VERSION)

    @classmethod
    def load(cls, directory: Path) -> ImageManifest:
        """Read ``manifest.json``.

        Raises:
            UsageError: the directory has none.
            ShoalError: it is damaged, of other data, or of another format version.
        """
        value = read_manifest(directory, format=FORMAT, version=VERSION)
        return cls._from_json(value, str(directory / MANIFEST))

    @classmethod
    def parse(cls, data: bytes, where: str) -> ImageManifest:
        """Return the manifest in the bytes that were read from ``where``.

        Raises:
            ShoalError: as for ``load``.
        """
        return cls._from_json(parse_manifest(data, where, format=FORMAT, version=VERSION), where)

    @classmethod
    def _from_json(cls, value: dict[str, Any], where: str) -> ImageManifest:
        try:
            splits = {
                split: tuple(ImageShardInfo(**shard) for shard in shards)
                for split, shards in value["splits"].items()
            }
            return cls(**{**value, "classes": tuple(value["classes"]), "splits": splits})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ShoalError(
                f"{where}: a field is missing or wrong ({error}); prepare the images again"
            ) from None
