"""Reads the files of a prepared directory from a folder or from S3, through one interface."""

from __future__ import annotations

import mmap
import random
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from shoal.atomic_io import MAX_WHOLE_BYTES
from shoal.data.manifest import MANIFEST, PreparedManifest, ShardFile, map_file
from shoal.errors import ShoalError, UsageError, import_extra

_SCHEME = "s3://"
_DEADLINE_S = 120.0
_CONNECT_S, _READ_S = 10.0, 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_NUM_CONNECTIONS = 64
_NUM_AT_ONCE = 8
"""Concurrent requests of one download: one connection to S3 gives some 50 to 100 MB/s."""
_PART_BYTES = 8 << 20
_TRANSIENT_CODES = ("RequestTimeout", "Throttling", "ThrottlingException")
"""Those that do not come with a status of the server's errors."""

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


class S3Storage:
    """Reads a prefix of a bucket, with retries until a deadline; each image is a request.

    Threads may share it, processes may not. What sends a request raises

    - ``UsageError`` if credentials are missing or do not suffice, or there is no such bucket;
    - ``ShoalError`` if there is no such file, it has another size, or the deadline has passed.
    """

    def __init__(self, location: str, *, deadline_s: float = _DEADLINE_S) -> None:
        """Parse ``s3://bucket/prefix``; sends no request.

        Raises:
            UsageError: no bucket is named.
            ShoalError: boto3 is not installed.
        """
        # Path collapses the two slashes
        self._bucket, _, prefix = location.removeprefix("s3:").lstrip("/").partition("/")
        if not self._bucket:
            raise UsageError(f"{location!r} names no bucket; write s3://bucket/prefix")
        self._prefix = f"{prefix.strip('/')}/".lstrip("/")
        self._deadline_s = deadline_s
        self._client = _client()

    def manifest(self, kind: type[Described]) -> Described:
        return kind.parse(self.whole(MANIFEST), self._uri(MANIFEST))

    def whole(self, name: str, num_bytes: int | None = None) -> bytes:
        """Return a whole file, which must have ``num_bytes`` if they are given, else be small."""
        return self._retried(name, {}, num_bytes, num_bytes)

    def wholes(self, files: Iterable[ShardFile]) -> list[bytes]:
        """Return whole files of shards, fetched concurrently."""
        with ThreadPoolExecutor(_NUM_AT_ONCE) as pool:
            return list(pool.map(lambda file: self.whole(file.name, file.num_bytes), files))

    def read(self, file: ShardFile, start: int, size: int) -> bytes:
        if not size:
            return b""
        byte_range = {"Range": f"bytes={start}-{start + size - 1}"}
        return self._retried(file.name, byte_range, size, file.num_bytes)

    def parts(self, file: ShardFile) -> Iterator[bytes]:
        """Yield a file in order; 64 MB are in memory at a time."""
        num_bytes = file.num_bytes
        starts = range(0, num_bytes, _PART_BYTES)

        def part(start: int) -> bytes:
            return self.read(file, start, min(_PART_BYTES, num_bytes - start))

        with ThreadPoolExecutor(_NUM_AT_ONCE) as pool:
            for first in range(0, len(starts), _NUM_AT_ONCE):
                yield from pool.map(part, starts[first : first + _NUM_AT_ONCE])

    def path(self, file: ShardFile) -> str:
        return self._uri(file.name)

    def _uri(self, name: str) -> str:
        return f"{_SCHEME}{self._bucket}/{self._prefix}{name}"

    def _retried(self, name: str, byte_range: dict[str, str], size: int | None, total: int | None) -> bytes:
        end = time.monotonic() + self._deadline_s
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return self._once(name, byte_range, size, total)
            except _Transient as error:
                left = end - time.monotonic()
                if left <= 0:
                    raise ShoalError(
                        f"{self._uri(name)} could not be read within {self._deadline_s:g} s (at last: "
                        f"{error}); check the network and the endpoint (AWS_ENDPOINT_URL, the region), then "
                        "start the same command again"
                    ) from None
            # jitter: workers that failed together do not retry together
            time.sleep(min(left, pause * random.uniform(0.5, 1.0)))
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _once(self, name: str, byte_range: dict[str, str], size: int | None, total: int | None) -> bytes:
        from botocore import exceptions

        uri = self._uri(name)
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name, **byte_range)
            with closing(answer["Body"]) as body:
                length = int(answer.get("ContentRange", "").rpartition("/")[2] or answer["ContentLength"])
                if total is not None and length != total:
                    raise ShoalError(
                        f"{uri} has {length:,} bytes, the manifest says {total:,}; it was cut short or comes "
                        "from another preparation: upload it again"
                    )
                if size is None and length > MAX_WHOLE_BYTES:
                    raise ShoalError(
                        f"{uri} has {length:,} bytes, more than the {MAX_WHOLE_BYTES:,} of such a file; "
                        "check the prefix"
                    )
                # a server without support for ranges sends the whole file
                data: bytes = body.read(None if size is None else size + 1)
        except exceptions.ClientError as error:
            raise self._refused(uri, error.response, total) from None
        except (exceptions.NoCredentialsError, exceptions.PartialCredentialsError) as error:
            raise UsageError(
                f"{uri}: {str(error).rstrip('.')}; name a profile (AWS_PROFILE), set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, or give the machine a role"
            ) from None
        except (
            exceptions.ConnectionError,
            exceptions.HTTPClientError,
            exceptions.IncompleteReadError,
        ) as error:
            raise _Transient(" ".join(str(error).split())) from None
        except exceptions.BotoCoreError as error:
            raise UsageError(f"{uri}: {error}") from None
        if size is not None and len(data) != size:
            raise _Transient(f"{len(data):,} of {size:,} bytes came")
        return data

    def _refused(self, uri: str, response: dict[str, Any], total: int | None) -> Exception:
        """Return the error to raise for an error response."""
        problem = response.get("Error", {})
        code, message = str(problem.get("Code", "")), str(problem.get("Message", "")).rstrip(".")
        status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if status >= 500 or status == 429 or code in _TRANSIENT_CODES:
            return _Transient(f"{status} {code}")
        if code == "NoSuchBucket":
            return UsageError(f"{uri}: there is no bucket {self._bucket!r}; check its name")
        if status == 404:
            return ShoalError(f"{uri} does not exist; check the prefix, or upload the folder again")
        if code == "InvalidRange":
            return ShoalError(
                f"{uri} was cut short: it has less than the {total:,} bytes of the manifest; upload it again"
            )
        return UsageError(
            f"{uri}: refused with {status} {code} ({message}); the credentials need s3:GetObject for it"
        )


class _Transient(Exception):
    """Raised by a request that may succeed if it is repeated."""


def _client() -> Any:
    boto3 = import_extra("boto3", "aws", "shards in S3 are read with boto3")
    from botocore.config import Config

    return boto3.session.Session().client(
        "s3",
        config=Config(
            retries={"total_max_attempts": 1},  # the retries here know the deadline
            connect_timeout=_CONNECT_S,
            read_timeout=_READ_S,
            max_pool_connections=_NUM_CONNECTIONS,
        ),
    )


Storage = LocalStorage | S3Storage
"""Reads the files of a prepared directory. Threads may share it; errors name the file."""


def open_storage(location: Path | str) -> Storage:
    """Return the storage for a folder or ``s3://bucket/prefix``.

    Raises:
        UsageError: no bucket is named.
        ShoalError: boto3 is not installed.
    """
    text = str(location)
    return S3Storage(text) if text.startswith("s3:") else LocalStorage(Path(location))
