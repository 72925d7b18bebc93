"""Reads the files of a prepared directory from a folder or an object store, through one interface."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from shoal.data.manifest import MANIFEST, PreparedManifest, ShardFile, map_file
from shoal.data.objects import DEADLINE_S, Objects, scheme_of

_NUM_AT_ONCE = 8
"""Small files that are fetched concurrently."""
_PART_BYTES = 8 << 20

Bytes = bytes | memoryview
Described = TypeVar("Described", bound=PreparedManifest[Any])
"""The manifest of a kind of data."""


class LocalStorage:
    """Reads a folder; files of shards are mapped into memory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._maps: dict[str, mmap.mmap] = {}

    def manifest(self, kind: type[Described]) -> Described:
        return kind.load(self.directory)

    def whole(self, name: str) -> bytes:
        return (self.directory / name).read_bytes()

    def wholes(self, files: Iterable[ShardFile]) -> list[bytes]:
        """Return whole files of shards."""
        return [bytes(map_file(self.directory / file.name, file)) for file in files]

    def open(self, file: ShardFile) -> None:
        """Map a file for ``read``."""
        data = map_file(self.directory / file.name, file)
        if isinstance(data, mmap.mmap):  # else it is empty
            self._maps[file.name] = data

    def read(self, file: ShardFile, start: int, size: int) -> memoryview:
        return memoryview(self._maps[file.name])[start : start + size]

    def will_need(self, file: ShardFile, start: int, size: int) -> None:
        """Prefetch a range (``MADV_WILLNEED``)."""
        first = start - start % mmap.PAGESIZE
        self._maps[file.name].madvise(mmap.MADV_WILLNEED, first, start + size - first)

    def parts(self, file: ShardFile) -> Iterator[bytes]:
        with (self.directory / file.name).open("rb") as opened:
            while part := opened.read(_PART_BYTES):
                yield part

    def path(self, file: ShardFile) -> str:
        return str(self.directory / file.name)


class RemoteStorage:
    """Reads objects of a store, with retries until a deadline; each image is a request.

    Threads may share it, processes may not; errors are those of :class:`~shoal.data.objects.Objects`.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def manifest(self, kind: type[Described]) -> Described:
        return kind.parse(self.whole(MANIFEST), self._objects.uri(MANIFEST))

    def whole(self, name: str, num_bytes: int | None = None) -> bytes:
        """Return a whole file, which must have ``num_bytes`` if they are given, else be small."""
        return self._objects.get(name, num_bytes=num_bytes)

    def wholes(self, files: Iterable[ShardFile]) -> list[bytes]:
        """Return whole files of shards, fetched concurrently."""
        with ThreadPoolExecutor(_NUM_AT_ONCE) as pool:
            return list(pool.map(lambda file: self.whole(file.name, file.num_bytes), files))

    def read(self, file: ShardFile, start: int, size: int) -> bytes:
        return self._objects.get(file.name, start, size, num_bytes=file.num_bytes)

    def parts(self, file: ShardFile) -> Iterator[bytes]:
        return self._objects.parts(file.name, file.num_bytes)

    def path(self, file: ShardFile) -> str:
        return self._objects.uri(file.name)


Storage = LocalStorage | RemoteStorage
"""Reads the files of a prepared directory. Threads may share it; errors name the file."""


def open_storage(location: Path | str) -> Storage:
    """Return the storage for a folder or a prefix of an object store.

    Raises:
        UsageError: as :func:`open_objects`.
    """
    if scheme_of(location) is None:
        return LocalStorage(Path(location))
    return RemoteStorage(open_objects(location))


def open_objects(location: Path | str, *, deadline_s: float = DEADLINE_S) -> Objects:
    """Return the objects below ``s3://`` or ``gs://bucket/prefix``, or ``https://``; sends no request.

    Raises:
        UsageError: no bucket is named, or the library for it is not installed.
    """
    if scheme_of(location) == "s3":
        from shoal.data.objects_s3 import S3Objects

        return S3Objects(str(location), deadline_s)
    from shoal.data.objects_obstore import ObstoreObjects

    return ObstoreObjects(str(location), deadline_s)
