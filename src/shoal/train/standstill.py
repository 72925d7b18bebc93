"""Notices processes that stand still: each counts up a number in the job's store, which the others read."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

_MOST_BEAT_S = 3.0
_END_S = 5.0


class StandstillWatch:
    """A thread that shows in the store that this process runs, and watches others.

    A process that is stopped, or whose host is, counts no further. Without the store nobody is suspected.

    Args:
        store: of the job; the thread uses a connection of its own.
        own: name of this process.
        patience_s: how long a process may stand still.
        on_silence: called by the thread with the processes that have stood still for so long.
    """

    def __init__(
        self, store: Any, own: str, patience_s: float, on_silence: Callable[[frozenset[str]], None]
    ) -> None:
        self._store, self._own, self._patience_s = store.clone(), own, patience_s
        self._beat_s = min(patience_s / 10, _MOST_BEAT_S)
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[str, float]] = {}
        self._silent: frozenset[str] = frozenset()
        self._ended = threading.Event()
        self._on_silence = on_silence
        self._thread = threading.Thread(target=self._run, name="standstill-watch", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def follow(self, names: Sequence[str]) -> None:
        """Watch these processes from now on, instead of others."""
        now = time.monotonic()
        with self._lock:
            self._seen = {name: ("", now) for name in names if name != self._own}
            self._silent = frozenset()

    @property
    def silent(self) -> frozenset[str]:
        """The watched processes that stand still."""
        with self._lock:
            return self._silent

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join(_END_S)

    def _run(self) -> None:
        number, last = 0, time.monotonic()
        while not self._ended.wait(self._beat_s):
            number, now = number + 1, time.monotonic()
            if now - last > self._patience_s / 2:  # this process stood still itself, and knows nothing
                self.follow([*self._seen])
            last = now
            try:
                self._store.set(f"beat/{self._own}", str(number))
                self._look()
            except dist.DistError:  # nobody can be heard
                self.follow([*self._seen])

    def _look(self) -> None:
        """Read the others' numbers."""
        with self._lock:
            seen = dict(self._seen)
        for name, (value, _) in seen.items():
            key = f"beat/{name}"
            newest = self._store.get(key).decode() if self._store.check([key]) else ""
            if newest != value:
                seen[name] = newest, time.monotonic()
        now = time.monotonic()
        silent = frozenset(name for name, (_, since) in seen.items() if now - since > self._patience_s)
        with self._lock:
            if seen.keys() != self._seen.keys():
                return  # others are watched by now
            self._seen, news, self._silent = seen, silent - self._silent, silent
        if news:
            self._on_silence(news)
