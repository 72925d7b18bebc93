"""Where a step's time goes."""

from __future__ import annotations

import time
from collections import defaultdict

import torch

from shoal.record import PARTS


class StepClock:
    """Adds up the time between marks, each under the name of the mark that ends it.

    On a GPU the marks are events on the current stream, read in :meth:`end_step`, after the loop's own wait
    for the device. Names are those of :data:`shoal.record.PARTS` or a recipe's own (``pipeline``: forward,
    backward and messages of all micro-batches); time that no mark claims is ``other``.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []
        self._step_begin = time.perf_counter()
        self.reset()

    def reset(self) -> None:
        """Forget all steps so far."""
        self.num_steps = 0
        self.total_s = 0.0
        self._seconds: dict[str, float] = defaultdict(float)
        self.begin_step()

    def begin_step(self) -> None:
        self._step_begin = time.perf_counter()
        self._marks = [("", self._now())]

    def mark(self, part: str) -> None:
        """Say that the time since the last mark went into ``part``."""
        self._marks.append((part, self._now()))

    def end_step(self) -> None:
        """Close the step and begin the next."""
        for (_, before), (part, after) in zip(self._marks, self._marks[1:], strict=False):
            self._seconds[part] += _seconds_between(before, after)
        self.total_s += time.perf_counter() - self._step_begin
        self.num_steps += 1
        self.begin_step()

    def parts_s(self) -> dict[str, float]:
        """Return the mean seconds a step of every part; they sum up to the mean step."""
        steps = max(self.num_steps, 1)
        names = [*PARTS, *sorted(set(self._seconds) - set(PARTS))]
        parts = {part: self._seconds.get(part, 0.0) / steps for part in names if part != "other"}
        parts["other"] = max(self.step_s() - sum(parts.values()), 0.0)
        return parts

    def step_s(self) -> float:
        return self.total_s / max(self.num_steps, 1)

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _seconds_between(before: float | torch.cuda.Event, after: float | torch.cuda.Event) -> float:
    if isinstance(before, float) and isinstance(after, float):
        return after - before
    assert isinstance(before, torch.cuda.Event) and isinstance(after, torch.cuda.Event)
    after.synchronize()
    return float(before.elapsed_time(after)) / 1_000
