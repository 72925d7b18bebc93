"""Decides how workers of unequal speed share a global batch: pure functions of the times of their steps.

The planner simulates with the same code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

LEAST_GAIN = 0.03
"""Shares change only if the slowest worker's part then takes this much less time, and clearly more than the
medians may err by."""
FIRST_WINDOW, LAST_WINDOW = 8, 64
"""Steps whose median decides. The window doubles after each change, so that noise seldom causes one."""
_NUM_ERRORS = 3.7
"""Two standard errors of a median in units of the median deviation, for normal noise: 2 · 1.25 · 1.48."""
SETTLING = 2
"""Steps after a change that are not counted: batches are read again, and times come a step late."""


class SharesBySpeed:
    """Computes shares with which all workers need the same time for their parts.

    Every worker observes the times of all workers, so all compute the same shares without another message.

    Example:
        >>> shares = SharesBySpeed([64, 64])
        >>> def seconds():
        ...     return [shares.current[0] / 1_000, shares.current[1] / 500]
        >>> changes = [step for step in range(1, 100) if shares.observe(step, seconds())]
        >>> changes, shares.current
        ([10], (86, 42))

    Args:
        current: samples of each worker at the beginning.
        unit: shares are multiples of it.
        settling: steps after a change, and at the beginning, that are not counted.
    """

    def __init__(self, current: Sequence[int], *, unit: int = 1, settling: int = SETTLING) -> None:
        self.current = tuple(current)
        self.seconds: list[float] = []
        self._unit = unit
        self._window = FIRST_WINDOW
        self._observed: list[Sequence[float]] = []
        self._settling = self._num_settling = settling
        self._last_step = -1

    def observe(self, step: int, seconds: Sequence[float]) -> bool:
        if step == self._last_step:  # it comes again
            return False
        self._last_step = step
        if self._num_settling > 0:
            self._num_settling -= 1
            return False
        self._observed.append(seconds)
        if len(self._observed) < self._window:
            return False
        observed, self._observed = self._observed, []
        times = [median(of_worker) for of_worker in zip(*observed, strict=True)]
        if min(times) <= 0:
            return False
        rates = [time / share for time, share in zip(times, self.current, strict=True)]
        shares = balanced_shares(rates, sum(self.current), unit=self._unit)
        slowest = max(rate * share for rate, share in zip(rates, shares, strict=True))
        error = _NUM_ERRORS * _spread(observed, times) / math.sqrt(self._window)
        if slowest > (1 - max(LEAST_GAIN, error)) * max(times):
            return False
        self.current, self.seconds = shares, times
        self._window, self._num_settling = min(2 * self._window, LAST_WINDOW), self._settling
        return True


def _spread(observed: Sequence[Sequence[float]], times: Sequence[float]) -> float:
    """Return the median relative deviation of a worker's step from its median time."""
    return median(
        abs(seconds / time - 1) for step in observed for seconds, time in zip(step, times, strict=True)
    )


def balanced_shares(rates: Sequence[float], total: int, *, unit: int = 1) -> tuple[int, ...]:
    """Return the shares of ``total`` samples whose slowest worker is done soonest; each has at least a unit.

    Args:
        rates: seconds per sample of each worker, above 0.
        total: samples: a multiple of ``unit``, and at least one unit per worker.
        unit: shares are multiples of it.

    Example:
        >>> balanced_shares([1.0, 1.0, 2.0], 20), balanced_shares([1.0, 1.0, 2.0], 24, unit=8)
        ((8, 8, 4), (8, 8, 8))
    """
    num_units = total // unit
    speeds = [1 / rate for rate in rates]
    units = [max(1, math.floor(num_units * speed / sum(speeds))) for speed in speeds]
    ranks = range(len(units))
    while sum(units) > num_units:  # some are so slow that a unit is more than their part
        units[
            max((rank for rank in ranks if units[rank] > 1), key=lambda rank: units[rank] * rates[rank])
        ] -= 1
    while sum(units) < num_units:
        units[min(ranks, key=lambda rank: (units[rank] + 1) * rates[rank])] += 1
    return tuple(count * unit for count in units)


class ReplayedShares:
    """The shares of a recorded run, changed at the same steps.

    Args:
        recorded: (first step, samples of each worker) of each change, in order.
        current: samples of each worker before the first change.
        step: steps done.
    """

    def __init__(
        self, recorded: Sequence[tuple[int, Sequence[int]]], current: Sequence[int], step: int
    ) -> None:
        self._of_step = {first: tuple(shares) for first, shares in recorded}
        self.current = next(
            (shares for first, shares in reversed(self._of_step.items()) if first <= step), tuple(current)
        )
        self.seconds: list[float] = []

    def observe(self, step: int, seconds: Sequence[float]) -> bool:
        shares = self._of_step.get(step, self.current)
        changes = shares != self.current
        self.current = shares
        return changes
