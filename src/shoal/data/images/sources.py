"""Where images come from: what every source says of itself, and of each image."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

TRAIN, VALIDATION = "train", "validation"


class SourceImage(NamedTuple):
    """One image: the bytes ``[offset, offset + size)`` of ``path``, a file of its own or a member of a tar.

    Attributes:
        key: its name in the shard: unique in its split, without a dot behind the last slash.
        label: its class, or -1 where it has none.
        member: how the tar calls it, for messages; empty for a file of its own.
        annotations: JSON that rides along as ``KEY.json``.
    """

    key: str
    path: Path
    offset: int
    size: int
    label: int = -1
    member: str = ""
    annotations: str | None = None

    @property
    def name(self) -> str:
        """The file, and the member of it, as messages call the image."""
        return f"{self.path}: {self.member}" if self.member else str(self.path)


class ImageSource(Protocol):
    """Images in one or two splits, in an order that depends on nothing but the source.

    Making a source looks at as much as finds what cannot be used; ``images`` may take its time.
    """

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes in the order of their labels."""
        ...

    @property
    def description(self) -> str:
        """What the images are, in words."""
        ...

    @property
    def splits(self) -> tuple[str, ...]:
        """``train``, and ``validation`` where there is one."""
        ...

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the user should know of it, a line each: files that are left alone, a choice that was made."""
        ...

    def state(self) -> str:
        """Return a digest that changes when the source does (names, sizes, times of change)."""
        ...

    def images(self, split: str) -> Iterator[SourceImage]:
        """Yield the images of a split, always in the same order.

        Raises:
            UsageError: the source cannot be used as it is.
            ShoalError: it cannot be read.
        """
        ...
