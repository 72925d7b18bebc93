"""Gives gradients precedence over shards from peers: reads wait while the workers of a host exchange them.

The processes of a host share a file in memory with a slot for each worker, which writes there that it began
(:class:`ExchangeMark`). What reads shards, also in processes of the loader, looks at it between two pieces
(:class:`Precedence`).

A host whose data are late takes no part in the exchange yet, so it reads at full rate, while those that wait
for it do not compete. Nothing that an exchange waits for waits here: the servers of shards send, and read
their storage, at any time, and one worker that does not exchange lets all of its host read. An exchange that
takes over twice its usual time waits for another host, and reads go on.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
from collections import deque
from pathlib import Path

_SLOT = struct.Struct("=qq")
"""When the worker's exchange began, or 0, and for how long reads wait for it, both in ns."""
_NUM_REMEMBERED = 16
_TIMES_USUAL = 2
_LOOK_S = 0.02
_MOST_WAIT_S = 10.0
"""Of one piece: a server gives up a client that takes nothing for 30 s."""


class ExchangeMark:
    """Says to the processes of this host when this worker exchanges gradients."""

    def __init__(self) -> None:
        self._slots: list[tuple[mmap.mmap, int]] = []
        self._began_ns = 0
        self._took_ns: deque[int] = deque(maxlen=_NUM_REMEMBERED)

    def open(self, path: Path, slot: int) -> None:
        """Write to a slot of a file from now on, besides those of earlier calls."""
        with path.open("r+b") as file:
            slots = mmap.mmap(file.fileno(), 0)
        if (slot + 1) * _SLOT.size <= len(slots):  # a process that came later has none
            self._slots.append((slots, slot * _SLOT.size))

    def begin(self) -> None:
        """Mark an exchange, unless one has begun."""
        if not self._began_ns:
            self._began_ns = time.monotonic_ns()
            self._write(self._began_ns, _TIMES_USUAL * min(self._took_ns, default=0))

    def end(self) -> None:
        """Mark that the exchange has ended, if one has begun."""
        if self._began_ns:
            self._took_ns.append(time.monotonic_ns() - self._began_ns)
            self._began_ns = 0
            self._write(0, 0)

    def _write(self, began_ns: int, limit_ns: int) -> None:
        for slots, offset in self._slots:
            _SLOT.pack_into(slots, offset, began_ns, limit_ns)


OWN = ExchangeMark()
"""That of this process."""


def make_slots(num_workers: int) -> Path:
    """Return a new file with a slot for each worker of a host."""
    file, path = tempfile.mkstemp(prefix="shoal-exchange-")
    os.ftruncate(file, num_workers * _SLOT.size)
    os.close(file)
    return Path(path)


class Precedence:
    """Lets reads wait while all workers of the host exchange gradients.

    Args:
        path: of their slots. Without one, or if the worker that made it has ended, nothing waits.
    """

    def __init__(self, path: Path | None) -> None:
        self._slots: mmap.mmap | None = None
        if path is not None and path.exists():
            with path.open("rb") as file:
                self._slots = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def wait(self) -> float:
        """Wait before the next piece; return the seconds."""
        began = time.monotonic()
        while self._holds() and time.monotonic() - began < _MOST_WAIT_S:
            time.sleep(_LOOK_S)
        return time.monotonic() - began

    def _holds(self) -> bool:
        slots = list(_SLOT.iter_unpack(self._slots)) if self._slots is not None else []
        until_ns = max((began + limit for began, limit in slots), default=0)
        return all(began for began, _ in slots) and time.monotonic_ns() < until_ns
