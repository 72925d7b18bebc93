"""Reports the progress of a preparation: a bar on a terminal, else a line every ten seconds."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from typing import Any

_LINE_EVERY_S = 10.0
_MIB = 1 << 20


class PreparationProgress(AbstractContextManager["PreparationProgress"]):
    """Reports one stage after the other on standard error; ``shown=False`` prints nothing.

    ``data`` names the data whose bytes are counted ("text", "images").
    """

    def __init__(self, *, shown: bool, data: str = "text") -> None:
        self._shown, self._data = shown, data
        self._bar: Any = None
        self._task: Any = None
        if shown and sys.stderr.isatty():
            # imported here: worker processes import this module and never show a bar
            from rich import progress as rich
            from rich.console import Console

            columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.DownloadColumn())
            self._bar = rich.Progress(*columns, rich.TimeRemainingColumn(), console=Console(stderr=True))
        self._name, self._total, self._begin_s, self._line_s = "", 0, 0.0, 0.0

    def say(self, text: str) -> None:
        """Print one line."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        elif self._shown:
            print(text, file=sys.stderr, flush=True)

    def start(self, name: str, total_bytes: int) -> None:
        """Begin a stage of ``total_bytes``; 0 if its length is unknown."""
        self._name, self._total = name, total_bytes
        self._begin_s = self._line_s = time.monotonic()
        if self._bar is not None:
            if self._task is not None:
                self._bar.stop_task(self._task)
            self._task = self._bar.add_task(name, total=total_bytes or None)
        else:
            size = f": {total_bytes / _MIB:.1f} MiB of {self._data}" if total_bytes else " …"
            self.say(name + size)

    def show(self, done_bytes: int) -> None:
        """Report how many bytes of the stage are done. Cheap enough to be called often."""
        done_bytes, now = min(done_bytes, self._total), time.monotonic()
        if self._bar is not None:
            if self._task is not None:
                self._bar.update(self._task, completed=done_bytes)
        elif now - self._line_s >= _LINE_EVERY_S and done_bytes > 0:
            self._line_s = now
            left_s = (now - self._begin_s) / done_bytes * (self._total - done_bytes)
            self.say(
                f"{self._name}: {done_bytes / _MIB:.1f} of {self._total / _MIB:.1f} MiB "
                f"({100 * done_bytes / self._total:.0f} %), about {left_s:.0f} s left"
            )

    def __enter__(self) -> PreparationProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()
