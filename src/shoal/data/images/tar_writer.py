"""Writes image shards: a tar in WebDataset's layout and its index, in bounded memory, whole or not at all.

An image is two members, ``KEY.jpg`` and ``KEY.cls`` (its label in ASCII), or ``KEY.json`` where annotations
ride along. Members have no owner, time or mode of their own, so the same images make the same bytes.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from shoal.data.files import GrowingFile
from shoal.data.images.index import RECORD
from shoal.data.images.manifest import INDEX, TAR, ImageShardInfo

_BLOCK = tarfile.BLOCKSIZE
_TAR_RECORD_BYTES = tarfile.RECORDSIZE
"""Two blocks of zeros end a tar, and tars are whole records of 20 blocks."""


class ImageShardWriter:
    """Writes one shard. Images are streamed to the file; only their records (40 bytes each) stay in memory.

    Use it as a context manager: leaving the block without ``finish`` (an exception) removes the
    temporaries, and nothing else.
    """

    def __init__(self, directory: Path, name: str) -> None:
        """Start the shard ``name`` in ``directory``.

        Raises:
            ShoalError: the file cannot be created.
        """
        self.num_images = 0
        self._directory = directory
        self._name = name
        self._records = bytearray()
        self._tar = GrowingFile(directory / f"{name}.{TAR}")

    def add(
        self,
        key: str,
        jpeg: bytes,
        *,
        label: int = -1,
        width: int,
        height: int,
        annotations: bytes | None = None,
    ) -> None:
        """Append an image.

        Args:
            key: its name in the tar; without a dot behind its last slash, where WebDataset's suffix begins.
            jpeg: the bytes of the file.
            label: its class, or -1 if it has none.
            width: of the image in pixels.
            height: of the image in pixels.
            annotations: JSON that rides along, or ``None``.

        Raises:
            ShoalError: the disk is full.
        """
        place = self._member(f"{key}.jpg", jpeg)
        extra, extra_size = 0, 0
        if label >= 0:
            text = str(label).encode()
            extra, extra_size = self._member(f"{key}.cls", text), len(text)
        if annotations is not None:
            extra, extra_size = self._member(f"{key}.json", annotations), len(annotations)
        record = (place, len(jpeg), label, width, height, extra, extra_size, 0)
        self._records += np.array([record], dtype=RECORD).tobytes()
        self.num_images += 1

    def finish(self) -> ImageShardInfo:
        """Write the index, force both files to the disk and give them their names.

        Raises:
            ShoalError: the disk is full; the temporaries are gone, finished shards untouched.
        """
        fill = -(self._tar.num_bytes + 2 * _BLOCK) % _TAR_RECORD_BYTES
        self._tar.write(bytes(2 * _BLOCK + fill))
        with self._tar, GrowingFile(self._directory / f"{self._name}.{INDEX}") as index:
            index.write(bytes(self._records))
            files = {TAR: self._tar.close(), INDEX: index.close()}
            # The index comes last: a shard with an index is complete.
            self._tar.publish()
            index.publish()
        return ImageShardInfo(name=self._name, num_images=self.num_images, files=files)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tar.discard()

    def _member(self, name: str, data: bytes) -> int:
        """Append a member and return where its bytes begin."""
        member = tarfile.TarInfo(name)
        member.size = len(data)
        header = member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        place = self._tar.num_bytes + len(header)
        self._tar.write(header + data + bytes(-len(data) % _BLOCK))
        return place
