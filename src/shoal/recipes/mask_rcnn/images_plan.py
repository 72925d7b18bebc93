"""The arithmetic of a run on images: batch, samples, learning rates. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.decide.batch import BatchPlan
from shoal.optim.lr_schedules import AnySchedule, learning_rate


@dataclass(frozen=True, kw_only=True)
class ImagePlan:
    """How many steps of which batch and rate."""

    batch: BatchPlan
    schedule: AnySchedule
    total_steps: int

    def samples(self, step: int) -> int:
        """Return how many images the run has seen after ``step``: the whole state of its data."""
        return step * self.batch.global_batch_size

    def learning_rate(self, step: int) -> float:
        """Return the rate of ``step``, counted from 1."""
        return learning_rate(self.schedule, step - 1)
