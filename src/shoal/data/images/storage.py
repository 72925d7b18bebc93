"""Reads the files of a prepared directory of images from a folder or from S3, through one interface."""

from __future__ import annotations

import mmap
import random
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

from shoal.data.atomic_io import MAX_WHOLE_BYTES
from shoal.data.images.manifest import INDEX, TAR, ImageManifest, ImageShardInfo
from shoal.data.manifest import MANIFEST, map_file
from shoal.errors import ShoalError, UsageError

SCHEME = "s3://"
_DEADLINE_S = 120.0
_CONNECT_S, _READ_S = 10.0, 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_NUM_CONNECTIONS = 64
_NUM_AT_ONCE = 8
"""Concurrent requests of one download: one connection to S3 gives some 50 to 100 MB/s."""
_PART_BYTES = 8 << 20

_TRANSIENT_CODES = frozenset(
    {"InternalError", "RequestTimeout", "ServiceUnavailable", "SlowDown", "Throttling", "ThrottlingException"}
)


class S3Files:
    """Reads the files below one prefix, with retries until a deadline. Threads may share it, processes may
    not."""

    def __init__(self, location: str, *, deadline_s: float = _DEADLINE_S) -> None:
        """Parse ``s3://bucket/prefix``; sends no request.

        Raises:
            UsageError: no bucket is named, or boto3 is not installed.
        """
        bucket, _, prefix = location.removeprefix(SCHEME).partition("/")
        if not location.startswith(SCHEME) or not bucket:
            raise UsageError(f"{location!r} names no bucket; write s3://bucket/prefix")
        self.bucket = bucket
        self.prefix = prefix.strip("/")
        self.deadline_s = deadline_s
        self.num_requests = 0
        """Requests sent so far, retries included."""
        self._client = _client()
        self._lock = threading.Lock()

    def uri(self, name: str) -> str:
        """Return the full name of a file, for messages."""
        return f"{SCHEME}{self.bucket}/{self._key(name)}"

    def read(self, name: str, *, num_bytes: int | None = None) -> bytes:
        """Return a whole file, which must have ``num_bytes`` if they are given, else be small.

        Raises:
            UsageError: credentials are missing or do not suffice, or there is no such bucket.
            ShoalError: there is no such file, it has another size, or the deadline has passed.
        """
        return self._retried(name, {}, num_bytes, num_bytes)

    def read_range(self, name: str, start: int, size: int, *, num_bytes: int) -> bytes:
        """Return ``size`` bytes from ``start`` of a file, which must have ``num_bytes`` in all.

        Raises:
            UsageError: and
            ShoalError: as for ``read``.
        """
        if not size:
            return b""
        where = {"Range": f"bytes={start}-{start + size - 1}"}
        return self._retried(name, where, size, num_bytes)

    def read_all(self, files: Iterable[tuple[str, int]]) -> list[bytes]:
        """Return whole files, (name, bytes) each, several at a time. Raises what ``read`` raises."""
        with ThreadPoolExecutor(_NUM_AT_ONCE) as pool:
            return list(pool.map(lambda file: self.read(file[0], num_bytes=file[1]), files))

    def parts(self, name: str, num_bytes: int) -> Iterator[bytes]:
        """Yield a file in parts, in order; 64 MB are in memory at a time. Raises what ``read`` raises."""
        starts = range(0, num_bytes, _PART_BYTES)

        def part(start: int) -> bytes:
            return self.read_range(name, start, min(_PART_BYTES, num_bytes - start), num_bytes=num_bytes)

        with ThreadPoolExecutor(_NUM_AT_ONCE) as pool:
            for first in range(0, len(starts), _NUM_AT_ONCE):
                yield from pool.map(part, starts[first : first + _NUM_AT_ONCE])

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def _retried(self, name: str, where: dict[str, str], size: int | None, total: int | None) -> bytes:
        begin = time.monotonic()
        pause = _FIRST_PAUSE_S
        while True:
            with self._lock:
                self.num_requests += 1
            try:
                return self._once(name, where, size, total)
            except _Transient as error:
                left = self.deadline_s - (time.monotonic() - begin)
                if left <= 0:
                    raise ShoalError(
                        f"{self.uri(name)} could not be read within {self.deadline_s:g} s (at last: "
                        f"{error}); check the network and the endpoint (AWS_ENDPOINT_URL, the region), then "
                        "start the same command again"
                    ) from None
            # jitter: workers that failed together do not retry together
            time.sleep(min(left, pause * random.uniform(0.5, 1.0)))
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _once(self, name: str, where: dict[str, str], size: int | None, total: int | None) -> bytes:
        from botocore import exceptions

        try:
            answer = self._client.get_object(Bucket=self.bucket, Key=self._key(name), **where)
            with closing(answer["Body"]) as body:
                found = int(answer.get("ContentRange", "").rpartition("/")[2] or answer["ContentLength"])
                if total is not None and found != total:
                    raise self._wrong_size(name, found, total)
                if size is None and found > MAX_WHOLE_BYTES:
                    raise ShoalError(
                        f"{self.uri(name)} has {found:,} bytes, more than the {MAX_WHOLE_BYTES:,} of such a "
                        "file; check the prefix"
                    )
                # a server without support for ranges sends the whole file
                data: bytes = body.read(None if size is None else size + 1)
        except exceptions.ClientError as error:
            raise self._refused(name, error.response, total) from None
        except (exceptions.NoCredentialsError, exceptions.PartialCredentialsError) as error:
            raise UsageError(
                f"{self.uri(name)}: {str(error).rstrip('.')}; name a profile (AWS_PROFILE), set "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role"
            ) from None
        except (
            exceptions.ConnectionError,
            exceptions.HTTPClientError,
            exceptions.IncompleteReadError,
        ) as error:
            raise _Transient(" ".join(str(error).split())) from None
        except exceptions.BotoCoreError as error:
            raise UsageError(f"{self.uri(name)}: {error}") from None
        if size is not None and len(data) != size:
            raise _Transient(f"{len(data):,} of {size:,} bytes came")
        return data

    def _refused(self, name: str, response: dict[str, Any], total: int | None) -> Exception:
        """Return the error to raise for an error response."""
        code = str(response.get("Error", {}).get("Code", ""))
        status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if status >= 500 or status == 429 or code in _TRANSIENT_CODES:
            return _Transient(f"{status} {code}")
        if code == "NoSuchBucket":
            return UsageError(f"{self.uri(name)}: there is no bucket {self.bucket!r}; check its name")
        if status == 404:
            return ShoalError(
                f"{self.uri(name)} does not exist; check the prefix, or upload the folder again"
            )
        if code == "InvalidRange":
            return ShoalError(
                f"{self.uri(name)} was cut short: it has less than the {total:,} bytes of the manifest; "
                "upload it again"
            )
        message = str(response.get("Error", {}).get("Message", "")).rstrip(".")
        return UsageError(
            f"{self.uri(name)}: refused with {status} {code} ({message}); the credentials in use need "
            "s3:GetObject for it"
        )

    def _wrong_size(self, name: str, found: int, total: int) -> ShoalError:
        return ShoalError(
            f"{self.uri(name)} has {found:,} bytes, the manifest says {total:,}; it was cut short or comes "
            "from another preparation: upload it again"
        )


class _Transient(Exception):
    """Raised by a request that may succeed if it is repeated."""


def _client() -> Any:
    try:
        import boto3
        from botocore.config import Config
    except ImportError as error:
        raise UsageError(
            f"shards in S3 are read with boto3, which cannot be imported ({error}); pip install 'shoal[aws]'"
        ) from None
    return boto3.session.Session().client(
        "s3",
        config=Config(
            retries={"total_max_attempts": 1},  # the retries here know the deadline
            connect_timeout=_CONNECT_S,
            read_timeout=_READ_S,
            max_pool_connections=_NUM_CONNECTIONS,
        ),
    )


Bytes = bytes | memoryview

_COPY_BYTES = 8 << 20


class Storage(Protocol):
    """Reads the files of a prepared directory. Threads may share it; errors name the file."""

    def manifest(self) -> ImageManifest:
        """Return the manifest of the directory."""

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


def open_storage(location: Path | str) -> Storage:
    """Return the storage for a folder or ``s3://bucket/prefix``.

    Raises:
        UsageError: no bucket is named, or boto3 is not installed.
    """
    text = str(location)
    if text.startswith("s3:"):
        return S3Storage(SCHEME + text.removeprefix("s3:").lstrip("/"))  # Path collapses the two slashes
    return LocalStorage(Path(location))


class LocalStorage:
    """Reads a folder; tars are mapped into memory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._maps: dict[str, mmap.mmap] = {}

    def manifest(self) -> ImageManifest:
        return ImageManifest.load(self.directory)

    def indexes(self, infos: Iterable[ImageShardInfo]) -> list[bytes]:
        return [bytes(map_file(Path(self.path(i, INDEX)), i.files[INDEX], "images")) for i in infos]

    def open(self, info: ImageShardInfo) -> None:
        data = map_file(Path(self.path(info, TAR)), info.files[TAR], "images")
        if isinstance(data, mmap.mmap):  # else it is empty
            self._maps[info.name] = data

    def read(self, info: ImageShardInfo, start: int, size: int) -> memoryview:
        return memoryview(self._maps[info.name])[start : start + size]

    def will_need(self, info: ImageShardInfo, start: int, size: int) -> None:
        """Prefetch a range (``MADV_WILLNEED``)."""
        first = start - start % mmap.PAGESIZE
        self._maps[info.name].madvise(mmap.MADV_WILLNEED, first, start + size - first)

    def parts(self, info: ImageShardInfo) -> Iterator[bytes]:
        with Path(self.path(info, TAR)).open("rb") as file:
            while part := file.read(_COPY_BYTES):
                yield part

    def path(self, info: ImageShardInfo, suffix: str) -> str:
        return str(self.directory / f"{info.name}.{suffix}")


class S3Storage:
    """Reads a prefix of a bucket; each image is a request."""

    def __init__(self, location: str) -> None:
        self._s3 = S3Files(location)

    def manifest(self) -> ImageManifest:
        return ImageManifest.parse(self._s3.read(MANIFEST), self._s3.uri(MANIFEST))

    def indexes(self, infos: Iterable[ImageShardInfo]) -> list[bytes]:
        return self._s3.read_all((f"{i.name}.{INDEX}", int(i.files[INDEX]["bytes"])) for i in infos)

    def open(self, info: ImageShardInfo) -> None:
        """Does nothing: sizes are checked at each request."""

    def read(self, info: ImageShardInfo, start: int, size: int) -> bytes:
        return self._s3.read_range(f"{info.name}.{TAR}", start, size, num_bytes=int(info.files[TAR]["bytes"]))

    def parts(self, info: ImageShardInfo) -> Iterator[bytes]:
        return self._s3.parts(f"{info.name}.{TAR}", int(info.files[TAR]["bytes"]))

    def path(self, info: ImageShardInfo, suffix: str) -> str:
        return self._s3.uri(f"{info.name}.{suffix}")
