"""How far a preparation is: a bar with the time left on a terminal, a plain line now and then without one."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

_LINE_EVERY_S = 10.0
_MIB = 1 << 20


class Progress:
    """Shows one stage after the other on standard error; with ``shown=False`` it shows nothing.

    ``what`` says of what the bytes are ("text", "images").
    """

    def __init__(self, *, shown: bool, what: str = "text") -> None:
        self._shown = shown
        self._what = what
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        if shown and sys.stderr.isatty():
            # here, since worker processes import this module too and never show a bar
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as RichProgress

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
            self._bar = RichProgress(*columns, console=Console(stderr=True))
        self._name, self._total, self._begin_s, self._line_s = "", 0, 0.0, 0.0

    def say(self, text: str) -> None:
        """Print one line."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        elif self._shown:
            print(text, file=sys.stderr, flush=True)

    def start(self, name: str, total_bytes: int) -> None:
        """Begin a stage of ``total_bytes``; 0 stands for one whose length is not known."""
        self._name, self._total = name, total_bytes
        self._begin_s = self._line_s = time.monotonic()
        if self._bar is not None:
            if self._task is not None:
                self._bar.stop_task(self._task)
            self._task = self._bar.add_task(name, total=total_bytes or None)
        else:
            self.say(
                f"{name} …" if not total_bytes else f"{name}: {total_bytes / _MIB:.1f} MiB of {self._what}"
            )

    def show(self, done_bytes: int) -> None:
        """Say how much of the stage is done; cheap enough to be called often."""
        done_bytes = min(done_bytes, self._total)
        if self._bar is not None:
            if self._task is not None:
                self._bar.update(self._task, completed=done_bytes)
            return
        now = time.monotonic()
        if now - self._line_s < _LINE_EVERY_S or done_bytes <= 0:
            return
        self._line_s = now
        left_s = (now - self._begin_s) / done_bytes * (self._total - done_bytes)
        self.say(
            f"{self._name}: {done_bytes / _MIB:.1f} of {self._total / _MIB:.1f} MiB "
            f"({100 * done_bytes / self._total:.0f} %), about {left_s:.0f} s left"
        )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
