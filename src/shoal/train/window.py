"""What happened since the last line of the record."""

from __future__ import annotations

import math
import resource
import sys
from dataclasses import dataclass

import torch

from shoal.train.config import LoopConfig
from shoal.train.stopping import NonFiniteWatch


class StepWindow:
    """Sums over steps, this worker's own until they are added up over all.

    Args:
        num_sums: how many figures a step adds up.
    """

    def __init__(self, num_sums: int) -> None:
        self._num_sums = num_sums
        self.reset()

    def reset(self) -> None:
        """Forget all steps."""
        self.sums = torch.zeros(self._num_sums, dtype=torch.float64)
        self.count = 0
        self.grad_norms: list[float] = []

    def add(self, sums: torch.Tensor, count: int, grad_norm: float) -> None:
        """Add a step: its sums ``[num_sums]``, its targets over all workers, its gradient's norm."""
        self.sums += sums
        self.count += count
        self.grad_norms.append(grad_norm)

    def num_skipped(self) -> int:
        """Return how many steps were skipped because their gradient was not finite."""
        return sum(not math.isfinite(norm) for norm in self.grad_norms)

    def mean_grad_norm(self) -> float:
        """Return the mean over the steps that were not skipped."""
        finite = [norm for norm in self.grad_norms if math.isfinite(norm)]
        return sum(finite) / len(finite) if finite else math.nan


@dataclass(kw_only=True)
class Meter:
    """What was measured since the last line of the record, and whether losses stay finite."""

    watch: NonFiniteWatch
    window: StepWindow
    loss_was_finite: bool = True

    @classmethod
    def of(cls, config: LoopConfig, num_sums: int) -> Meter:
        return cls(watch=NonFiniteWatch(config.max_nonfinite_steps), window=StepWindow(num_sums))


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory in use so far: on a GPU torch's, else the process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1_024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
