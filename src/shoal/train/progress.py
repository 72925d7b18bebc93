"""A progress bar with the time left; without a terminal, a plain line now and then."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from shoal.record import Step

SECONDS_BETWEEN_LINES = 15.0


class Progress:
    """Shows how far a run is, on the standard error.

    Args:
        total_steps: steps of the whole run.
        first_step: the step that the run goes on from.
        unit: what samples are called.
    """

    def __init__(self, total_steps: int, first_step: int = 0, *, unit: str = "sequences") -> None:
        self._total = total_steps
        self._unit = unit
        self._bar: RichProgress | None = None
        self._last_line_s = -SECONDS_BETWEEN_LINES
        if sys.stderr.isatty():
            self._bar = RichProgress(
                BarColumn(bar_width=10),  # with the figures, a line of 80 characters
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("ETA"),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.fields[text]}"),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task("train", total=total_steps, completed=first_step, text="")
            self._bar.start()

    def advance(self, step: int) -> None:
        """Move the bar; cheap enough for every step."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def step(self, row: Step) -> None:
        """Show the figures of a line of the record."""
        accuracies = {name: value for name, value in row.metrics.items() if name.endswith("accuracy")}
        figures = f"loss {row.loss:.3f}" + "".join(
            f"  {name.removesuffix('_accuracy')} {100 * value:.1f} %" for name, value in accuracies.items()
        )
        figures += f"  {rate(row.samples_per_s)} {self._unit}/s"
        if self._bar is not None:
            short = figures.replace("  ", " ").replace(" %", "%").replace("sequences", "seq")
            self._bar.update(self._task, completed=row.step, text=short)
            return
        now = time.monotonic()
        if now - self._last_line_s >= SECONDS_BETWEEN_LINES or row.step == self._total:
            self._last_line_s = now
            left = duration((self._total - row.step) * row.step_s)
            self.say(f"step {row.step:,}/{self._total:,}  {figures}  ETA {left}")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def rate(per_s: float) -> str:
    """Return samples a second: whole numbers, below 10 with two digits."""
    return f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.2g}"


def duration(seconds: float) -> str:
    """Return ``h:mm:ss`` or ``m:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
