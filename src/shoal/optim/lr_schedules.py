"""Computes learning rates as pure functions of the optimizer step.

One formula, :class:`LRSchedule`, covers most forms in use:

- constant: ``power=0``; linear: ``power=1``; polynomial: any other power; each with a linear warm-up;
- AWS's ALBERT: ``decay_from="warmup"``, linear from the end of the warm-up to ``end`` (the polynomial has
  the value ``base`` exactly where the warm-up ends);
- Google's BERT and ALBERT: ``decay_from="start"``, the decay is counted from step 0, so that the rate drops
  to ``base (1 - warmup_steps / total_steps)^power`` at the end of the warm-up; NVIDIA's BERT is the same
  with ``power=0.5``;
- LANS (arXiv 2006.13484): warm-up, ``constant_steps`` at ``base``, then linear to 0;
- AWS's ResNet-50 and MLPerf's LARS: a warm-up from a small rate (``warmup_from``), then ``power=2``.

For vision there are :class:`Cosine` (Loshchilov and Hutter, arXiv 1608.03983, without restarts) and
:class:`Steps` (Goyal et al., arXiv 1706.02677; Mask R-CNN).

T5's pre-training does not know the number of steps in advance: :class:`InverseSquareRoot` (Raffel et al.,
arXiv 1910.10683, section 3.1.2); its fine-tuning has a constant rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from shoal.errors import UsageError

if TYPE_CHECKING:
    from torch.optim import Optimizer

DecayFrom = Literal["warmup", "start"]


@dataclass(frozen=True, kw_only=True)
class _Checked:
    """A schedule whose fields are checked by name.

    Raises:
        UsageError: a value is out of its range.
    """

    base: float
    """The highest learning rate."""

    def __post_init__(self) -> None:
        _check(vars(self))


@dataclass(frozen=True, kw_only=True)
class _Warmed(_Checked):
    """A linear warm-up from ``warmup_from`` to ``base``; subclasses define the rest."""

    warmup_steps: int = 0
    warmup_from: float = 0.0
    """The rate of the first step, where there is a warm-up."""


@dataclass(frozen=True, kw_only=True)
class LRSchedule(_Warmed):
    """Warm-up to ``base``, ``constant_steps`` at ``base``, then a polynomial down to ``end``.

    Raises:
        UsageError: a value is out of its range, or the phases are longer than the whole.
    """

    total_steps: int
    """Optimizer steps of the whole run, warm-up included."""
    constant_steps: int = 0
    end: float = 0.0
    """The rate at ``total_steps`` and after."""
    power: float = 1.0
    decay_from: DecayFrom = "warmup"
    """First step of the decay: the end of warm-up and constant phase, or step 0 (then there is no constant
    phase)."""

    def __post_init__(self) -> None:
        super().__post_init__()
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
class Cosine(_Warmed):
    """Warm-up to ``base``, then half a cosine down to ``end``, often a fraction of ``base``.

    Raises:
        UsageError: a value is out of its range, or the warm-up is longer than the whole.
    """

    total_steps: int
    """Optimizer steps of the whole run, warm-up included."""
    end: float = 0.0
    """The rate at ``total_steps`` and after."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup_steps > self.total_steps:
            raise UsageError(f"warmup_steps={self.warmup_steps} must fit into total_steps={self.total_steps}")


@dataclass(frozen=True, kw_only=True)
class Steps(_Warmed):
    """Warm-up to ``base``, then times ``factor`` from each milestone on; constant without milestones.

    A milestone within the warm-up counts once that has ended.

    Raises:
        UsageError: a value is out of its range, or the milestones do not rise.
    """

    milestones: tuple[int, ...] = ()
    """Numbers of completed steps from which on the rate is smaller."""
    factor: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(step < 1 for step in self.milestones) or any(a >= b for a, b in pairwise(self.milestones)):
            raise UsageError(f"milestones={self.milestones} must be steps of at least 1, and rise")


@dataclass(frozen=True, kw_only=True)
class InverseSquareRoot(_Checked):
    """``base / sqrt(max(step, hold_steps))``: level for ``hold_steps`` (T5: at 0.01), then falling."""

    base: float = 1.0
    hold_steps: int = 10_000


AnySchedule = LRSchedule | Cosine | Steps | InverseSquareRoot


def learning_rate(schedule: AnySchedule, step: int) -> float:
    """Return the rate of the optimizer step that follows ``step`` completed ones.

    As in the references, the first step of a warm-up (``step=0``) has the rate ``warmup_from`` (default 0),
    step ``warmup_steps`` is the first one outside the warm-up, and ``total_steps`` and later have the rate
    ``end``.

    Raises:
        UsageError: ``step`` is negative.
    """
    if step < 0:
        raise UsageError(f"step={step} must be at least 0")
    if isinstance(schedule, InverseSquareRoot):
        return schedule.base / math.sqrt(max(step, schedule.hold_steps))
    if step < schedule.warmup_steps:
        rise = schedule.base - schedule.warmup_from
        return schedule.warmup_from + rise * step / schedule.warmup_steps
    if isinstance(schedule, Steps):
        return schedule.base * schedule.factor ** sum(step >= at for at in schedule.milestones)
    if isinstance(schedule, Cosine):
        left = _left(step, schedule.warmup_steps, schedule.total_steps)
        return schedule.end + (schedule.base - schedule.end) * 0.5 * (1.0 - math.cos(math.pi * left))
    return _polynomial(schedule, step)


def _polynomial(schedule: LRSchedule, step: int) -> float:
    held_steps = schedule.warmup_steps + schedule.constant_steps
    if step < held_steps:
        return schedule.base
    begin = held_steps if schedule.decay_from == "warmup" else 0
    left = _left(step, begin, schedule.total_steps)
    return float(schedule.end + (schedule.base - schedule.end) * left**schedule.power)


def _left(step: int, begin: int, end: int) -> float:
    """Return the remaining share of the steps from ``begin`` to ``end``."""
    return max(0, end - step) / (end - begin) if end > begin else 0.0


_RATES = frozenset({"base", "warmup_from", "end", "power", "factor"})
_LEAST = {"warmup_steps": 0, "constant_steps": 0, "total_steps": 1, "hold_steps": 1}


def _check(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if name in _RATES and not (math.isfinite(value) and value >= 0):
            raise UsageError(f"{name}={value} of the learning rate must be a number of at least 0")
        if name in _LEAST and value < _LEAST[name]:
            raise UsageError(f"{name}={value} must be at least {_LEAST[name]}")
        if name in ("warmup_from", "end") and value > values["base"]:
            raise UsageError(f"{name}={value} of the learning rate must not be above base={values['base']}")


RATE_KEY = "rate"
"""Key of a parameter group whose learning rate is a multiple of the schedule's."""


def set_learning_rate(optimizer: Optimizer, value: float) -> None:
    """Set the learning rate of every parameter group; a group of biases may have a multiple of it."""
    for group in optimizer.param_groups:
        group["lr"] = value * group.get(RATE_KEY, 1.0)
