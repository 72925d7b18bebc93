"""Defines image sources, and lists the images of a source on disk.

A source yields where each image is stored (:class:`SourceImage`). Its listing, one JSON line per image, gives
worker processes any image by its number without holding all of them in memory.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from shoal.atomic_io import AtomicFile, write_atomically
from shoal.errors import ShoalError
from shoal.json_text import parse_json

TRAIN, VALIDATION = "train", "validation"


class SourceImage(NamedTuple):
    """One image: the bytes ``[offset, offset + size)`` of ``path``, a file of its own or a member of a tar.

    Attributes:
        key: its name in the shard, unique in its split, without a dot after the last slash.
        label: its class, or -1.
        member: its name in the tar, for messages; empty for a file of its own.
        annotations: JSON to store with the image as ``KEY.json``.
        annotated_size: width and height that the annotations are for, which decide whether the image is
            turned as EXIF says.
    """

    key: str
    path: Path
    offset: int
    size: int
    label: int = -1
    member: str = ""
    annotations: str | None = None
    annotated_size: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """The file, and the member of it, for messages."""
        return f"{self.path}: {self.member}" if self.member else str(self.path)


class ImageSource(Protocol):
    """Images in one or two splits, in an order that depends on the source only.

    The constructor checks what can be checked quickly; ``images`` may take long.
    """

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names in the order of their labels."""

    @property
    def description(self) -> str:
        """A description of the images for the manifest."""

    @property
    def splits(self) -> tuple[str, ...]:
        """``train``, and ``validation`` if there is one."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """Lines to print: files that are ignored, choices that were made."""

    def state(self) -> str:
        """Return a digest that changes when the source does (names, sizes, mtimes)."""

    def images(self, split: str) -> Iterator[SourceImage]:
        """Yield the images of a split, always in the same order.

        Raises:
            UsageError: the source cannot be used as it is.
            ShoalError: it cannot be read.
        """


@dataclass(frozen=True)
class PackedSource:
    """Images in compressed archives, which have to be unpacked before anything is known about them.

    Attributes:
        description: as that of an :class:`ImageSource`.
        files: the archives.
        options: what the result depends on besides.
        unpack: writes what it unpacks into a folder and returns the source.
    """

    remarks: ClassVar[tuple[str, ...]] = ()

    description: str
    files: tuple[Path, ...]
    options: str
    unpack: Callable[[Path], ImageSource]

    def state(self) -> str:
        """Return a digest that changes when an archive does, or another option is given."""
        digest = blake2b(self.options.encode(), digest_size=16)
        for path in self.files:
            facts = path.stat()
            digest.update(f"{path.name}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode())
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Counts of a split; ``class_counts`` are the images of each label, empty without labels."""

    num_images: int
    num_bytes: int
    class_counts: tuple[int, ...]


class Listing:
    """The listed images of a split by number."""

    def __init__(self, folder: Path, split: str) -> None:
        self._lines = np.memmap(folder / f"{split}.images", mode="r")
        self._offsets = np.memmap(folder / f"{split}.offsets", dtype="<i8", mode="r")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def image(self, number: int) -> SourceImage:
        """Return an image as the source yielded it."""
        begin, end = self._offsets[number : number + 2]
        image = SourceImage(*parse_json(self._lines[begin:end].tobytes(), str(self._lines.filename)))
        size = image.annotated_size
        return image._replace(path=Path(image.path), annotated_size=size and (size[0], size[1]))


def write_listing(images: Iterable[SourceImage], folder: Path, split: str, *, num_classes: int) -> Totals:
    """List ``images`` on disk and return their totals.

    Raises:
        ShoalError: two images have the same key; the disk is full.
    """
    offsets, digests = array("q", [0]), array("Q")
    counts = [0] * num_classes
    num_bytes = 0
    with AtomicFile(folder / f"{split}.images") as lines:
        for image in images:
            lines.write(json.dumps([image.key, str(image.path), *image[2:]]).encode() + b"\n")
            offsets.append(lines.num_bytes)
            digests.append(_digest(image.key))
            num_bytes += image.size
            if image.label >= 0:
                counts[image.label] += 1
        lines.close()
        lines.publish()
    write_atomically(folder / f"{split}.offsets", np.asarray(offsets, dtype="<i8").tobytes())
    _check_unique(digests, folder, split)
    return Totals(num_images=len(digests), num_bytes=num_bytes, class_counts=tuple(counts))


def _digest(key: str) -> int:
    return int.from_bytes(blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")


def _check_unique(digests: array[int], folder: Path, split: str) -> None:
    distinct, counts = np.unique(np.asarray(digests, dtype=np.uint64), return_counts=True)
    if len(distinct) == len(digests):
        return
    twice = int(distinct[counts > 1][0])
    listing = Listing(folder, split)
    names = [image.name for image in map(listing.image, range(len(listing))) if _digest(image.key) == twice]
    raise ShoalError(f"{names[0]} and {names[1]} would have the same name in the shards; rename one of them")
