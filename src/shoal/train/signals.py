"""Signals that ask a run to stop: they only leave a note, and the loop decides when to look at it."""

from __future__ import annotations

import atexit
import signal
from types import FrameType

_ASK_TO_STOP = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Whether somebody has asked this process to stop, from the moment that it is made.

    SIGTERM (schedulers, the launcher) and SIGUSR1 (Slurm's ``--signal=USR1@60``) are taken note of; repeated
    ones change nothing. From the interpreter's exit on they are ignored: Python gives signals their default
    action back while it shuts down, and a second SIGTERM would turn the exit code of a saved run into death
    by signal. To be made in the main thread.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        """The name of the first signal that came, such as ``"SIGTERM"``."""
        for number in _ASK_TO_STOP:
            signal.signal(number, self._note)
        atexit.register(_ignore)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = self.requested or signal.Signals(number).name


def _ignore() -> None:
    for number in _ASK_TO_STOP:
        signal.signal(number, signal.SIG_IGN)
