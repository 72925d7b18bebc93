"""Keeps a job's key-value store in a folder, for processes of which any may be killed at any moment.

torch's ``FileStore`` appends a record by several writes under a lock. A process that is killed between them
leaves half a record, on which the others spin without end; one that is stopped there keeps the lock. Here a
value becomes visible by one system call, and there is no lock:

1. Each key has a folder with numbered files, of which the newest is the value.
2. A value is written to a file of another name, and then linked under the next number. The link fails if
   another process was first: :meth:`FolderStore.add` and :meth:`FolderStore.compare_set` look again.
3. :meth:`FolderStore.set` renames it over the newest one. A key that is set and added to at the same time has
   one of the two values.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch._C._distributed_c10d import Store

_POLL_S = 0.01
_made: list[FolderStore] = []
"""All of this process, since torch's ``PrefixStore`` does not hold the object whose methods it calls."""


class FolderStore(Store):
    """A store of ``torch.distributed`` in a folder that all processes see, on one host.

    It keeps no connection, so that a host whose network is cut still reaches it.

    Args:
        folder: created if missing, for this user alone.
        timeout: limit of :meth:`get`, and of :meth:`wait` by default.

    Raises:
        DistStoreError: of all methods: a key did not come in time, or the folder cannot be written.
    """

    def __init__(self, folder: Path, timeout: timedelta) -> None:
        super().__init__()
        _made.append(self)
        self._folder = folder
        self.set_timeout(timeout)
        folder.mkdir(mode=0o700, exist_ok=True)

    def clone(self) -> FolderStore:
        """Return this store, which any thread may use."""
        return self

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        number, _ = self._newest(key)
        with self._named_failures():
            self._written(key, _bytes(value)).replace(self._files(key) / str(max(number, 1)))

    def get(self, key: str) -> bytes:
        """Return the value of a key; wait for it where there is none."""
        self.wait([key])
        return self._newest(key)[1]

    def add(self, key: str, amount: int) -> int:
        """Add to the number under a key, 0 at first, and return the sum."""
        if amount == 0:
            return int(self._newest(key)[1] or 0)
        return int(self._change(key, lambda value: str(int(value or 0) + amount).encode()))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Write a value if the present one is the expected one (empty: there is none); return the value."""
        expected, desired = _bytes(expected_value), _bytes(desired_value)
        return self._change(key, lambda value: desired if value == expected else value)

    def check(self, keys: list[str]) -> bool:
        """Return whether the store has all of these keys."""
        return all(self._newest(key)[0] for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until the store has all of these keys."""
        limit: timedelta = timeout or cast("Any", self).timeout
        until = time.monotonic() + limit.total_seconds()
        while not self.check(keys):
            if time.monotonic() > until:
                raise dist.DistStoreError(
                    f"timeout waiting for key {', '.join(keys):.200} in {self._folder} after "
                    f"{limit.total_seconds():g} s"
                )
            time.sleep(_POLL_S)

    def _files(self, key: str) -> Path:
        return self._folder / hashlib.sha256(key.encode()).hexdigest()

    def _newest(self, key: str) -> tuple[int, bytes]:
        """Return number and content of the newest value; 0 if there is none."""
        files = self._files(key)
        try:
            number = max((int(file.name) for file in files.iterdir()), default=0)
        except FileNotFoundError:
            return 0, b""
        return number, (files / str(number)).read_bytes() if number else b""

    def _change(self, key: str, change: Callable[[bytes], bytes]) -> bytes:
        """Replace a value by what it is changed to, with no other process between; return the new value."""
        while True:
            number, value = self._newest(key)
            if (changed := change(value)) == value:
                return value
            with self._named_failures(), suppress(FileExistsError):
                temporary = self._written(key, changed)
                try:
                    os.link(temporary, self._files(key) / str(number + 1))
                finally:
                    temporary.unlink()
                return changed

    def _written(self, key: str, value: bytes) -> Path:
        """Return a new file with a value that belongs to a key."""
        self._files(key).mkdir(exist_ok=True)
        file = self._folder / f"new-{secrets.token_hex(8)}"
        file.write_bytes(value)
        return file

    @contextmanager
    def _named_failures(self) -> Iterator[None]:
        """Raise the errors of the file system as those of a store."""
        try:
            yield
        except OSError as problem:
            raise dist.DistStoreError(
                f"the job's store in {self._folder} cannot be written: {problem}"
            ) from problem


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
