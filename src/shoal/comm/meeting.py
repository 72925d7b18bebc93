"""Waiting for what others put into torch's store, no longer than it can matter."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

_POLL_S = 0.01
_LIMIT = timedelta(minutes=30)


def met(store: Store, keys: list[str], must_end: Callable[[], bool], limit: timedelta) -> bool:
    """Wait until the store has all keys; ``False`` if ``must_end()`` or the end of ``limit`` came first."""
    end = time.monotonic() + limit.total_seconds()
    while not store.check(keys):
        if must_end() or time.monotonic() >= end:
            return False
        time.sleep(_POLL_S)
    return True


class MeetingStore(Store):
    """The store as gloo sees it. Its threads wait here for ranks that may never come, but no longer than the
    group lives: a group whose threads wait cannot be ended."""

    def __init__(self, store: Store, must_end: Callable[[], bool]) -> None:
        super().__init__()
        self._store = store
        self._must_end = must_end

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = _LIMIT) -> None:
        if not met(self._store, keys, self._must_end, timeout):
            raise RuntimeError(f"nobody came to meet at {', '.join(keys)}")
