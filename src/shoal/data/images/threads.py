"""Threads that make the images of a batch, side by side in one array."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from shoal.errors import UsageError

_PIECES_A_THREAD = 8
"""A batch is cut into so many pieces for each thread: few enough to hand out, enough to end together."""


def default_decode_threads(num_local_workers: int = 1, num_loader_processes: int = 0) -> int:
    """Return the processors of this host for each of its workers, or for each of their loader processes."""
    num_processes = num_local_workers * max(1, num_loader_processes)
    return max(1, len(os.sched_getaffinity(0)) // num_processes)


class DecodeThreads:
    """Started when they are first needed; several batches may be in the making at a time."""

    def __init__(self, count: int | None = None) -> None:
        """Use ``count`` threads; default: the processors that this process may use.

        Raises:
            UsageError: there are no threads.
        """
        if count is not None and count < 1:
            raise UsageError(f"decode_threads {count} must be at least 1")
        self.count = count or default_decode_threads()
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def run(self, make: Callable[[int], None], count: int) -> None:
        """Call ``make`` with each number below ``count``; the first error is raised, and ends the rest."""
        if self.count == 1:
            for number in range(count):
                make(number)
            return

        def make_piece(numbers: range) -> None:
            for number in numbers:
                make(number)

        size = max(1, count // (self.count * _PIECES_A_THREAD))
        pieces = [range(count)[first : first + size] for first in range(0, count, size)]
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.count, thread_name_prefix="shoal-decode")
        futures = [self._pool.submit(make_piece, piece) for piece in pieces]
        try:
            for done in futures:
                done.result()
        finally:
            for left in futures:
                left.cancel()
