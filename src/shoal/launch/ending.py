"""How a job is asked to end, and how long it may take: what the launchers have in common."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

EXIT_INTERRUPTED = 130
"""Of a launcher that has heard a second Ctrl-C."""
PASSED_ON = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGHUP: signal.SIGTERM,
    signal.SIGINT: signal.SIGTERM,
}
"""What a signal to the launcher becomes for the workers."""


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """How long workers may go on; whoever is later is killed."""

    after_failure_s: float = 5.0
    """The others, after one has failed."""
    after_stop_s: float = 120.0
    """The others, after one has saved and left."""
    after_signal_s: float | None = None
    """All, after a request to stop; ``None``: as long as they need."""


@contextmanager
def requests_to(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have ``handle`` hear the signals of :data:`PASSED_ON` meanwhile. To be called in the main thread."""
    before = {number: signal.signal(number, handle) for number in PASSED_ON}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
