"""Implements the interface of ``engine.Engine`` for a group of one rank: no network, nothing to wait for."""

from __future__ import annotations

import ctypes
import queue
from collections import Counter

from shoal.comm.engine import Operation
from shoal.comm.tensors import ENGINE_DTYPES

ITEM_BYTES = {name: dtype.itemsize for dtype, name in ENGINE_DTYPES.items()}


class SingleProcessEngine:
    """Completes every operation on submission: the reduction of one rank's tensor is a copy."""

    def __init__(self) -> None:
        self._next = 0
        self._watched: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._counts: Counter[str] = Counter()
        self._error: str | None = None

    def submit(self, operation: Operation) -> int:
        num_bytes = operation.count * ITEM_BYTES[operation.dtype]
        moves = operation.kind not in ("barrier", "delegated") and operation.input != operation.output
        if num_bytes and moves:
            ctypes.memmove(operation.output, operation.input, num_bytes)
        self._counts[f"ops_{operation.name}"] += 1
        self._counts[f"bytes_{operation.name}"] += num_bytes
        self._next += 1
        return self._next

    def finish_delegated(self, handle: int) -> None:
        pass

    def wait(self, handle: int, timeout_s: float | None = None) -> bool:
        return True

    def is_done(self, handle: int) -> bool:
        return True

    def watch(self, handle: int) -> None:
        self._watched.put(handle)

    def next_watched(self, timeout_s: float) -> list[int]:
        try:
            return [self._watched.get(timeout=timeout_s)]
        except queue.Empty:
            return []

    def error(self) -> str | None:
        return self._error

    def abort(self, reason: str) -> None:
        self._error = reason

    def close(self) -> None:
        pass

    def counters(self) -> dict[str, int]:
        return {"bytes_sent": 0, "bytes_received": 0, **self._counts}

    def take_events(self) -> list[str]:
        return []
