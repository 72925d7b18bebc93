"""Reads, writes, lists and deletes objects below a prefix of an object store, with retries until a deadline.

:class:`Objects` is the interface: it repeats what may succeed the next time, and names the object in errors.
One class per library implements the single requests: :mod:`shoal.data.objects_s3` with boto3, and
:mod:`shoal.data.objects_obstore`.
"""

from __future__ import annotations

import random
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import ClassVar, TypeVar

from shoal.atomic_io import MAX_WHOLE_BYTES
from shoal.errors import ShoalError, UsageError

DEADLINE_S = 120.0
CONNECT_S, READ_S = 10.0, 30.0
NUM_CONNECTIONS = 64
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_LOCATION = re.compile(r"(s3|gs|https?):/*(.*)")
_NUM_AT_ONCE = 8
"""Concurrent requests of one download: one connection to S3 gives some 50 to 100 MB/s."""
_PART_BYTES = 8 << 20

T = TypeVar("T")


_SETTLED_S = 60.0
"""Age from which a time of modification is a strong validator: no other change came within its second."""


@dataclass(frozen=True)
class Version:
    """The validators of an object (RFC 9110, section 8.8), as far as its store gives them."""

    etag: str = ""
    modified_s: float = 0.0
    """Last-Modified in seconds since 1970; 0: not given."""

    def is_same(self, other: Version) -> bool:
        """Return whether ranges of both are of the same bytes.

        Equal strong ETags say that they are. Different ones do not say that they are not: replicas of a
        server may compute them from what only they have, such as an inode. So there, and for weak ETags,
        Last-Modified decides: a different one says that the object was replaced; an equal one of at least a
        minute ago that it was not (section 8.8.2.2). A younger one cannot, and the ETags have to be equal.
        Without any validators nothing is known, and the size has to do.
        """
        if self.etag and self.etag == other.etag and not self.etag.startswith("W/"):
            return True
        if self.modified_s and other.modified_s:
            if self.modified_s != other.modified_s:
                return False
            if time.time() - self.modified_s >= _SETTLED_S:
                return True
        both = self.etag.removeprefix("W/"), other.etag.removeprefix("W/")
        return "" in both or both[0] == both[1]

    def __str__(self) -> str:
        modified = formatdate(self.modified_s, usegmt=True) if self.modified_s else "not given"
        return f"ETag {self.etag or 'not given'}, Last-Modified {modified}"


Check = Callable[[int, Version], None]
"""Is given the size and the version of an object before its bytes are taken."""


class Transient(Exception):
    """Raised by a request that may succeed if it is repeated."""


class Objects(ABC):
    """Objects below a prefix of a store.

    Threads may share it, processes may not. What sends a request raises

    - ``UsageError`` if credentials are missing or do not suffice, or there is no such bucket;
    - ``ShoalError`` if there is no such object, it has another size or was replaced between two reads, or
      the deadline has passed.

    Args:
        location: ``scheme://bucket/prefix`` or ``https://host/prefix``; ``Path`` may have collapsed its two
            slashes.
        deadline_s: time for a request and its repetitions.

    Attributes:
        location: without a slash at the end.
    """

    CHECKS: ClassVar[str]
    """Settings to check if a store does not answer."""

    def __init__(self, location: str, deadline_s: float = DEADLINE_S) -> None:
        scheme, _, path = location.partition(":")
        bucket, _, prefix = path.lstrip("/").partition("/")
        if not bucket:
            raise UsageError(f"{location!r} names no bucket; write {scheme}://bucket/prefix")
        self.bucket = bucket
        self.prefix = f"{prefix.strip('/')}/".lstrip("/")
        self.location = f"{scheme}://{bucket}/{self.prefix}".rstrip("/")
        self._deadline_s = deadline_s
        self._versions: dict[str, Version] = {}

    def uri(self, name: str) -> str:
        """Return the location of an object, for messages."""
        return f"{self.location}/{name}"

    def get(
        self, name: str, start: int = 0, size: int | None = None, *, num_bytes: int | None = None
    ) -> bytes:
        """Return an object, or ``size`` bytes of it from ``start`` on.

        Args:
            num_bytes: bytes that the object must have; without them and ``size`` it must be small. With them
                it must stay the same in all calls.
        """
        return self._get_of(self._versions, name, start, size, num_bytes)

    def _get_of(
        self, versions: dict[str, Version], name: str, start: int, size: int | None, num_bytes: int | None
    ) -> bytes:
        """Return a range, as :meth:`get`; ``versions`` has those of objects that were read before."""

        def check(actual: int, version: Version) -> None:
            if num_bytes is not None and actual != num_bytes:
                raise ShoalError(
                    f"{self.uri(name)} has {actual:,} bytes, the manifest says {num_bytes:,}; it was cut "
                    "short or comes from another preparation: upload it again"
                )
            if size is None and num_bytes is None and actual > MAX_WHOLE_BYTES:
                raise ShoalError(
                    f"{self.uri(name)} has {actual:,} bytes, more than the {MAX_WHOLE_BYTES:,} of such a "
                    "file; check the prefix"
                )
            if num_bytes is not None and not versions.setdefault(name, version).is_same(version):
                raise ShoalError(
                    f"{self.uri(name)} was replaced while it was read (before: {versions[name]}; now: "
                    f"{version}); leave prepared data as it is, write other data under a prefix of its own, "
                    "and start the same command again. If the server has several replicas, give the files on "
                    "all of them the same time of modification (rsync --times)"
                )

        expected = num_bytes if size is None else size

        def once() -> bytes:
            data = self._get(name, start, size, check)
            if expected is not None and len(data) != expected:
                raise Transient(f"{len(data):,} of {expected:,} bytes came")
            return data

        if expected == 0 and size is not None:
            return b""
        return self.repeated(name, "read", once)

    def parts(self, name: str, num_bytes: int) -> Iterator[bytes]:
        """Yield an object of ``num_bytes`` in order; 64 MB are in memory at a time."""
        starts = range(0, num_bytes, _PART_BYTES)
        versions: dict[str, Version] = {}

        def part(start: int) -> bytes:
            return self._get_of(versions, name, start, min(_PART_BYTES, num_bytes - start), num_bytes)

        with ThreadPoolExecutor(_NUM_AT_ONCE) as pool:
            for first in range(0, len(starts), _NUM_AT_ONCE):
                yield from pool.map(part, starts[first : first + _NUM_AT_ONCE])

    def put(self, name: str, data: bytes) -> None:
        """Write an object; it appears with all of its bytes, or not at all."""
        self.repeated(name, "written", lambda: self._put(name, data))

    @abstractmethod
    def put_file(self, name: str, path: Path) -> None:
        """Write an object from a file, as :meth:`put`, in parts that are sent concurrently."""

    def names(self, below: str = "") -> list[str]:
        """Return the names of all objects that begin with ``below``, sorted."""
        return sorted(self.repeated(below, "listed", lambda: self._names(below)))

    def remove(self, names: Iterable[str]) -> None:
        """Delete objects; there may be no such ones any more."""
        for name in names:
            self.repeated(name, "deleted", lambda name=name: self._remove(name))  # type: ignore[misc]

    def abandon_parts(self, below: str) -> None:  # noqa: B027  # most stores have a rule for it
        """Free the parts of objects that killed processes have not completed."""

    @abstractmethod
    def _get(self, name: str, start: int, size: int | None, check: Check) -> bytes:
        """Request an object; call ``check`` before its bytes are taken.

        At most one byte more than ``size`` may be taken from a store that ignores ranges.
        """

    @abstractmethod
    def _put(self, name: str, data: bytes) -> None: ...

    @abstractmethod
    def _names(self, below: str) -> list[str]: ...

    @abstractmethod
    def _remove(self, name: str) -> None: ...

    def repeated(self, name: str, done: str, once: Callable[[], T]) -> T:
        """Send a request, again after each :class:`Transient`, until the deadline.

        Args:
            name: of the object.
            done: the request, for messages: "read", "written".
        """
        end = time.monotonic() + self._deadline_s
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return once()
            except Transient as error:
                left = end - time.monotonic()
                if left <= 0:
                    raise ShoalError(
                        f"{self.uri(name)} could not be {done} within {self._deadline_s:g} s (at last: "
                        f"{error}); check the network and {self.CHECKS}, then start the same command again"
                    ) from None
            # jitter: workers that failed together do not retry together
            time.sleep(min(left, pause * random.uniform(0.5, 1.0)))
            pause = min(2 * pause, _LONGEST_PAUSE_S)


def scheme_of(location: object) -> str | None:
    """Return the scheme of a store's location, such as ``s3``; ``None`` for a folder."""
    match = _LOCATION.fullmatch(str(location))
    return match[1] if match else None
