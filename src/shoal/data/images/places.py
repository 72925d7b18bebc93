"""Where the files of a prepared directory of images lie: a folder, or a prefix in S3. One form for both."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from shoal.data.images.manifest import INDEX, TAR, ImageManifest, ImageShardInfo
from shoal.data.images.remote import SCHEME, S3Files
from shoal.data.manifest import MANIFEST
from shoal.errors import ShoalError

Bytes = bytes | memoryview

_COPY_BYTES = 8 << 20


class Files(Protocol):
    """The files of a prepared directory. Threads may share it; errors name the file."""

    def manifest(self) -> ImageManifest:
        """Return what the directory says about itself."""

    def indexes(self, infos: Iterable[ImageShardInfo]) -> list[bytes]:
        """Return the indexes of shards, whole."""

    def open(self, info: ImageShardInfo) -> None:
        """Make a shard's tar ready for ``read``."""

    def read(self, info: ImageShardInfo, start: int, size: int) -> Bytes:
        """Return ``size`` bytes from ``start`` of a shard's tar."""

    def parts(self, info: ImageShardInfo) -> Iterator[Bytes]:
        """Yield a shard's tar in order."""

    def path(self, info: ImageShardInfo, suffix: str) -> str:
        """Return the name of a file, for messages."""


def files_at(location: Path | str) -> Files:
    """Return the files below a folder or ``s3://bucket/prefix``.

    Raises:
        UsageError: no bucket is named, or boto3 is not installed.
    """
    text = str(location)
    if text.startswith("s3:"):
        return RemoteFiles(SCHEME + text.removeprefix("s3:").lstrip("/"))  # a Path makes one slash of two
    return LocalFiles(Path(location))


class LocalFiles:
    """A folder; tars are mapped."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._maps: dict[str, mmap.mmap] = {}

    def manifest(self) -> ImageManifest:
        return ImageManifest.load(self.directory)

    def indexes(self, infos: Iterable[ImageShardInfo]) -> list[bytes]:
        return [bytes(self._map(info, INDEX)) for info in infos]

    def open(self, info: ImageShardInfo) -> None:
        data = self._map(info, TAR)
        if isinstance(data, mmap.mmap):  # else it is empty
            self._maps[info.name] = data

    def read(self, info: ImageShardInfo, start: int, size: int) -> memoryview:
        return memoryview(self._maps[info.name])[start : start + size]

    def will_need(self, info: ImageShardInfo, start: int, size: int) -> None:
        """Have the system begin to read this."""
        first = start - start % mmap.PAGESIZE
        self._maps[info.name].madvise(mmap.MADV_WILLNEED, first, start + size - first)

    def parts(self, info: ImageShardInfo) -> Iterator[bytes]:
        with Path(self.path(info, TAR)).open("rb") as file:
            while part := file.read(_COPY_BYTES):
                yield part

    def path(self, info: ImageShardInfo, suffix: str) -> str:
        return str(self.directory / f"{info.name}.{suffix}")

    def _map(self, info: ImageShardInfo, suffix: str) -> mmap.mmap | bytes:
        path, expected = self.path(info, suffix), int(info.files[suffix]["bytes"])
        try:
            with Path(path).open("rb") as file:
                actual = os.fstat(file.fileno()).st_size
                if actual != expected:
                    what = "was cut short" if actual < expected else "is too long"
                    raise ShoalError(
                        f"{path} {what}: it has {actual:,} bytes, the manifest says {expected:,}; "
                        "copy it again or prepare the images again"
                    )
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if actual else b""
        except FileNotFoundError:
            raise ShoalError(
                f"{path} is missing, though the manifest names it; copy it again or prepare the images again"
            ) from None
        except OSError as error:
            raise ShoalError(f"{path} cannot be read: {error.strerror}") from error


class RemoteFiles:
    """A prefix of a bucket; images are fetched one by one."""

    def __init__(self, location: str) -> None:
        self._s3 = S3Files(location)

    def manifest(self) -> ImageManifest:
        return ImageManifest.parse(self._s3.read(MANIFEST), self._s3.uri(MANIFEST))

    def indexes(self, infos: Iterable[ImageShardInfo]) -> list[bytes]:
        return self._s3.read_all((f"{i.name}.{INDEX}", int(i.files[INDEX]["bytes"])) for i in infos)

    def open(self, info: ImageShardInfo) -> None:
        """Sizes are compared at each request."""

    def read(self, info: ImageShardInfo, start: int, size: int) -> bytes:
        return self._s3.read_range(f"{info.name}.{TAR}", start, size, num_bytes=int(info.files[TAR]["bytes"]))

    def parts(self, info: ImageShardInfo) -> Iterator[bytes]:
        return self._s3.parts(f"{info.name}.{TAR}", int(info.files[TAR]["bytes"]))

    def path(self, info: ImageShardInfo, suffix: str) -> str:
        return self._s3.uri(f"{info.name}.{suffix}")
