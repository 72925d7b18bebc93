"""Learning rates as pure functions of the optimizer step.

One formula, :class:`Schedule`, holds most forms in use, each by its settings:

- constant: ``power=0``; linear: ``power=1``; polynomial: any other power; each with a linear warm-up;
- AWS's ALBERT: ``decay_from="warmup"``, linear from the end of the warm-up to ``end`` (the polynomial reaches
  ``base`` exactly where the warm-up does);
- Google's BERT and ALBERT: ``decay_from="start"``, the decay is counted from step 0, so that the rate jumps
  down to ``base (1 - warmup_steps / total_steps)^power`` at the end of the warm-up; NVIDIA's BERT is the same
  with ``power=0.5``;
- LANS (arXiv 2006.13484): warm-up, ``constant_steps`` at ``base``, then linear to 0.

T5 knows no number of steps in advance: :class:`InverseSquareRoot` for pre-training, :class:`Constant` for
fine-tuning (Raffel et al., arXiv 1910.10683, sections 3.1.2 and 3.1.3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from shoal.errors import UsageError

DecayFrom = Literal["warmup", "start"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Warm-up from 0 to ``base``, ``constant_steps`` at ``base``, then a polynomial down to ``end``.

    Raises:
        UsageError: a value is out of its range, or the phases are longer than the whole.
    """

    base: float
    """The highest learning rate."""
    total_steps: int
    """Optimizer steps of the whole run, warm-up included."""
    warmup_steps: int = 0
    constant_steps: int = 0
    end: float = 0.0
    """The rate at ``total_steps`` and after."""
    power: float = 1.0
    decay_from: DecayFrom = "warmup"
    """Where the decay counts from: the end of warm-up and constant phase, or step 0 (then there is no
    constant phase)."""

    def __post_init__(self) -> None:
        for name in ("base", "end", "power"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise UsageError(f"{name}={value} of the learning rate must be a number of at least 0")
        if self.end > self.base:
            raise UsageError(f"end={self.end} of the learning rate must not be above base={self.base}")
        if self.total_steps < 1:
            raise UsageError(f"total_steps={self.total_steps} must be at least 1")
        for name in ("warmup_steps", "constant_steps"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name}={getattr(self, name)} must be at least 0")
        if self.warmup_steps + self.constant_steps > self.total_steps:
            raise UsageError(
                f"warmup_steps={self.warmup_steps} and constant_steps={self.constant_steps} must fit into "
                f"total_steps={self.total_steps}"
            )
        if self.decay_from not in ("warmup", "start"):
            raise UsageError(f"decay_from={self.decay_from!r} must be 'warmup' or 'start'")
        if self.decay_from == "start" and self.constant_steps:
            raise UsageError("constant_steps need decay_from='warmup': the decay from step 0 would jump")


@dataclass(frozen=True, kw_only=True)
class InverseSquareRoot:
    """``base / sqrt(max(step, hold_steps))``: level for ``hold_steps``, T5's 0.01 by default, then falling.

    Raises:
        UsageError: a value is out of its range.
    """

    base: float = 1.0
    hold_steps: int = 10_000

    def __post_init__(self) -> None:
        _check_base(self.base)
        if self.hold_steps < 1:
            raise UsageError(f"hold_steps={self.hold_steps} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Constant:
    """``base`` at every step.

    Raises:
        UsageError: ``base`` is out of its range.
    """

    base: float

    def __post_init__(self) -> None:
        _check_base(self.base)


def learning_rate(schedule: Schedule | InverseSquareRoot | Constant, step: int) -> float:
    """Return the rate of the optimizer step that follows ``step`` completed ones.

    As in the references, the first step of a warm-up (``step=0``) has the rate 0, step ``warmup_steps`` is
    the first one outside the warm-up, and ``total_steps`` and later have the rate ``end``.

    Raises:
        UsageError: ``step`` is negative.
    """
    if step < 0:
        raise UsageError(f"step={step} must be at least 0")
    if isinstance(schedule, Constant):
        return schedule.base
    if isinstance(schedule, InverseSquareRoot):
        return schedule.base / math.sqrt(max(step, schedule.hold_steps))
    return _polynomial(schedule, step)


def _polynomial(schedule: Schedule, step: int) -> float:
    if step < schedule.warmup_steps:
        return schedule.base * step / schedule.warmup_steps
    held_steps = schedule.warmup_steps + schedule.constant_steps
    if step < held_steps:
        return schedule.base
    begin = held_steps if schedule.decay_from == "warmup" else 0
    left_steps = max(0, schedule.total_steps - step)
    left = left_steps / (schedule.total_steps - begin) if schedule.total_steps > begin else 0.0
    return float(schedule.end + (schedule.base - schedule.end) * left**schedule.power)


def _check_base(base: float) -> None:
    if not (math.isfinite(base) and base >= 0):
        raise UsageError(f"base={base} of the learning rate must be a number of at least 0")
