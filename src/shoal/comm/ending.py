"""The end of a group: in order, or handed to a thread where the group is dropped without one.

Python collects garbage in any thread and under any lock, where waiting for a thread can hang. So what a group
has open ends in a thread that is there already, and the collecting thread only puts it into a queue. Engines
that are open when the interpreter exits are closed by :mod:`shoal.comm.engine`.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from shoal.comm.completer import Completer
from shoal.comm.device_side import DeviceSide
from shoal.comm.engine import Engine
from shoal.comm.inner import InnerGloo
from shoal.comm.lone import LoneEngine


class Ending:
    """All that a group has open. Knows nothing of the group, which can so be collected before it."""

    def __init__(self, engine: Engine | LoneEngine, completer: Completer, inner: InnerGloo) -> None:
        self._engine, self._completer, self._inner = engine, completer, inner
        self.sides: dict[torch.device, DeviceSide] = {}
        self.operands: dict[int, Sequence[Any]] = {}
        """Memory that the engine reads and writes, by operation; it must outlive the engine."""
        self._lock = threading.Lock()
        self._begun = False

    def run(self) -> None:
        """Leave the group and end its threads. May be repeated."""
        with self._lock:
            if self._begun:
                return
            self._begun = True
        for side in self.sides.values():
            side.stop()
        self._completer.stop()
        self._inner.stop()
        self._engine.close()
        self.operands.clear()


# put() may be called where garbage is collected, also while the same thread is in put()
_dropped: queue.SimpleQueue[Ending] = queue.SimpleQueue()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def end_when_dropped(group: object, ending: Ending) -> None:
    """Have ``ending`` run in a thread of its own once nothing refers to ``group`` any more."""
    global _thread
    with _lock:
        if _thread is None or not _thread.is_alive():  # a fork has no threads
            _thread = threading.Thread(target=_end_dropped, name="shoal-ending", daemon=True)
            _thread.start()
    weakref.finalize(group, _dropped.put, ending).atexit = False


def _end_dropped() -> None:
    while True:
        _dropped.get().run()
