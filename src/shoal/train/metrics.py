"""Times the parts of a step and averages figures between two lines of the record."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from shoal.record import PARTS


class StepTimer:
    """Adds up the time between laps, each under the name of the lap that ends it.

    On a GPU laps are CUDA events on the current stream; :meth:`end_step` reads them after the loop has waited
    for the device. Names are those of :data:`shoal.record.PARTS` or a recipe's own (``pipeline``: forward,
    backward and messages of all micro-batches). Time outside of any lap is ``other``.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._laps: list[tuple[str, float | torch.cuda.Event]] = []
        self._step_begin = time.perf_counter()
        self.reset()

    def reset(self) -> None:
        """Drop all steps and begin a new one."""
        self.num_steps = 0
        self.total_s = 0.0
        self._seconds: dict[str, float] = defaultdict(float)
        self.begin_step()

    def begin_step(self) -> None:
        """Begin a step; time since the last one is not counted."""
        self._step_begin = time.perf_counter()
        self._laps = [("", self._now())]

    def lap(self, part: str) -> None:
        """Count the time since the last lap as ``part``."""
        self._laps.append((part, self._now()))

    def end_step(self) -> None:
        """End the step and begin the next."""
        for (_, before), (part, after) in zip(self._laps, self._laps[1:], strict=False):
            self._seconds[part] += _seconds_between(before, after)
        self.total_s += time.perf_counter() - self._step_begin
        self.num_steps += 1
        self.begin_step()

    def parts_s(self) -> dict[str, float]:
        """Return the mean seconds per step of each part; they sum to the mean step."""
        steps = max(self.num_steps, 1)
        names = [*PARTS, *sorted(set(self._seconds) - set(PARTS))]
        parts = {part: self._seconds.get(part, 0.0) / steps for part in names if part != "other"}
        parts["other"] = max(self.step_s() - sum(parts.values()), 0.0)
        return parts

    def step_s(self) -> float:
        """Return the mean seconds per step."""
        return self.total_s / max(self.num_steps, 1)

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


class RunningMetrics:
    """Averages over the steps since the last line of the record.

    Sums stay on the device, float64, until :meth:`means` adds them up over all workers.

    Args:
        sum_over_workers: replaces a CPU tensor ``[n]`` by its sum over all workers and returns it.
    """

    def __init__(self, sum_over_workers: Callable[[Tensor], Tensor]) -> None:
        self._sum_over_workers = sum_over_workers
        self.reset()

    def reset(self) -> None:
        """Drop all steps."""
        self.grad_norms: list[float] = []
        self._loss = 0.0
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = defaultdict(int)

    def add_step(
        self, loss: float, sums: dict[str, Tensor], counts: dict[str, int], grad_norm: float
    ) -> None:
        """Add one step.

        Args:
            loss: this worker's part of the mean loss over the global batch.
            sums: this worker's part of each figure, float64 scalars.
            counts: over how many items of the global batch each figure is a mean.
            grad_norm: not finite if the step was skipped.
        """
        self._loss += loss
        self.grad_norms.append(grad_norm)
        for name, value in sums.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value
            self._counts[name] += counts[name]

    def means(self) -> tuple[float, dict[str, float]]:
        """Return the mean loss and the mean figures over all workers. All workers call it."""
        values = [torch.tensor(self._loss, dtype=torch.float64), *(s.cpu() for s in self._sums.values())]
        loss, *sums = self._sum_over_workers(torch.stack(values)).tolist()
        figures = {
            name: value / max(self._counts[name], 1) for name, value in zip(self._sums, sums, strict=True)
        }
        return loss / max(len(self.grad_norms), 1), figures

    def num_skipped(self) -> int:
        """Return how many steps were skipped because their gradient was not finite."""
        return sum(not math.isfinite(norm) for norm in self.grad_norms)

    def mean_grad_norm(self) -> float:
        """Return the mean over the steps that were not skipped."""
        finite = [norm for norm in self.grad_norms if math.isfinite(norm)]
        return sum(finite) / len(finite) if finite else math.nan


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory in use so far: on a GPU torch's, else the process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1_024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _seconds_between(before: float | torch.cuda.Event, after: float | torch.cuda.Event) -> float:
    if isinstance(before, float) and isinstance(after, float):
        return after - before
    assert isinstance(before, torch.cuda.Event) and isinstance(after, torch.cuda.Event)
    after.synchronize()
    return float(before.elapsed_time(after)) / 1_000
