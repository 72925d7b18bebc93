"""Gives predictions an 80 % interval, from how far predictions of published runs are off.

    ln(measured / predicted)  ~  c ± q σ,      σ² = Σ (a x)² over the causes of doubt

x says how much a prediction leans on a cause (:data:`CAUSES`): the share of the time that is communication
computed by the planner, the doublings of the hosts, and so on. One figure ``a`` a cause is fitted on the
residuals of published runs (``catalog/residuals.csv``, made by ``python -m benchmarks.plan_published``), by
maximum likelihood under Student's t with four degrees of freedom, which outliers do not move.

Runs of one publisher err alike: error / σ is an offset of the publisher, whose share of the variance is ρ,
plus an error of the run. So n residuals of one count as n / (1 + (n - 1) ρ) independent ones. ρ is estimated
by the analysis of variance (Fisher's intraclass correlation).

q makes it an interval of 80 % whatever the distribution is (split-conformal prediction): each publisher in
turn is left out of the fit, its residuals are divided by the σ that the others give them, and q is a quantile
of these ratios with these weights: that of 80 % (1 + 1 / m), where the residuals count as m independent ones.
So it holds for a publisher that is not among them, whose offset nobody knows.

c is what several hosts cost beyond the prediction from the rate of one, their median; the planner contains
its value for all residuals, so that it is next to 0 for the file of the catalog.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from shoal.planner.prediction import Plan

LEVEL = 0.80
"""Probability of the interval."""
CAUSES = {
    "rate assumed": "1 if the rate of one host is a share of the peak",
    "rate published": "1 if it is another's throughput of the same model on the same accelerator",
    "repetition": "1 if it is measured",
    "several hosts": "1 if they are, and the rate is of one",
    "more hosts": "doublings of the hosts since the rate",
    "network": "share of the time that is communication",
    "split samples": "doublings of the devices that share a sample, since the rate",
    "evaluation": "share of the time",
    "input": "share of the time",
    "start": "share of the time",
    "unstated facts": "standard deviation of the logarithm over what may be",
    "samples to target": "1 if the run ends at a score",
}
"""Name of a cause -> its x."""
STATED = {"input": math.log(1.5) / 1.28, "start": math.log(2) / 1.28, "unstated facts": 1.0}
"""Causes whose ``a`` is stated, not fitted: four of five starts take half the time to twice, and four of five
hosts wait for samples two thirds to one and a half times as long. Published runs rarely say either."""
_STATED = np.array([STATED.get(name, math.nan) for name in CAUSES])
_SEVERAL = list(CAUSES).index("several hosts")
_DEGREES = 4.0
_ITERATIONS = 60
_LEAST = 1e-6
"""Of σ², where no cause applies."""
_BEYOND = 1.25
"""A cause may lean this much further than in any residual; beyond, nothing supports an interval."""

_Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Residual:
    """The prediction of a published figure."""

    publisher: str
    generation: str
    """Of the accelerator."""
    log_ratio: float
    """Logarithm of the measured time over the predicted one, or of the predicted rate over the measured."""
    doubts: tuple[float, ...]
    """x of each of :data:`CAUSES`."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Bounds of a time or cost, as a factor, with the causes of the width."""

    factor: float
    """The interval is from its middle over this to its middle times this."""
    shares: Mapping[str, float]
    """Share of the width by cause; they add up to one."""
    center: float = 1.0
    """Middle of the interval over the prediction."""

    def bounds(self, predicted: float) -> tuple[float, float]:
        middle = predicted * self.center
        return middle / self.factor, middle * self.factor


def doubts_of(
    seconds_by_cause: Mapping[str, float],
    *,
    rate: str,
    times_the_hosts: float,
    several: bool,
    split: float = 1.0,
    unstated: float = 0.0,
    to_target: bool = False,
) -> tuple[float, ...]:
    """Return x of each of :data:`CAUSES` for a predicted run.

    Args:
        rate: source of the rate of one host, ``"assumed"``, ``"published"`` or ``"measured"``.
        times_the_hosts: hosts of the run over those of the rate.
        several: the run is on several hosts, and the rate of one.
        split: devices that share a sample, over those that did when the rate was measured.
        unstated: standard deviation of the logarithm of the prediction over facts that are not stated.
        to_target: the run ends at a score, not after a given number of samples.
    """
    total_s = sum(seconds_by_cause.values())
    share = {name: seconds / total_s for name, seconds in seconds_by_cause.items()}
    return (
        float(rate == "assumed"),
        float(rate == "published"),
        float(rate == "measured"),
        float(several),
        math.log2(times_the_hosts),
        share.get("network", 0.0),
        abs(math.log2(split)),
        share.get("evaluation", 0.0),
        share.get("input", 0.0),
        share.get("start", 0.0),
        unstated,
        float(to_target),
    )


def doubts_of_plan(plan: Plan) -> tuple[float, ...]:
    """Return x of each of :data:`CAUSES` for a plan, whose rates are those of one host."""
    first = plan.training.parts[0]
    return doubts_of(
        plan.seconds_by_cause,
        rate=first.basis.partition(":")[0],
        times_the_hosts=plan.workers.count,
        several=plan.workers.count > 1,
        to_target=first.convergence.depends_on_batch,
    )


def interval_of(plan: Plan) -> Interval | str:
    """Return the interval of a plan's time and cost, or why nothing supports one."""
    return shipped_intervals().interval(doubts_of_plan(plan))


class Intervals:
    """Intervals that rest on residuals."""

    def __init__(self, residuals: Sequence[Residual]) -> None:
        self.num_residuals = len(residuals)
        self._x = np.array([each.doubts for each in residuals]) ** 2
        self._error = np.array([each.log_ratio for each in residuals])
        names = [each.publisher for each in residuals]
        publisher, every = np.array(names), np.ones(len(residuals), dtype=bool)
        self.num_publishers = len(set(names))
        ratios = self._ratios(every, *self._fit(every, np.ones(len(residuals))))
        self.correlation = intraclass_correlation(_limited(ratios), names)
        """Share of a publisher's offset in the variance."""
        weight = weights_of(names, self.correlation)
        for name in set(names):
            mine = publisher == name
            ratios[mine] = self._ratios(mine, *self._fit(~mine, weight))
        self.cost_of_several, self._fitted = self._fit(every, weight)
        self.quantile = weighted_quantile(np.abs(ratios), weight, LEVEL * (1 + 1 / weight.sum()))

    def _fit(self, rows: NDArray[np.bool_], weight: _Array) -> tuple[float, _Array]:
        """Return c and a² of each cause, fitted on some of the residuals."""
        several = rows & (self._x[:, _SEVERAL] > 0)
        cost = weighted_quantile(self._error[several], weight[several], 0.5) if several.any() else 0.0
        return cost, _fit(self._x[rows], self._beyond(cost)[rows], weight[rows])

    def _ratios(self, rows: NDArray[np.bool_], cost: float, fitted: _Array) -> _Array:
        """Return the errors of some of the residuals over their σ."""
        ratios: _Array = self._beyond(cost)[rows] / np.sqrt(self._x[rows] @ fitted + _LEAST)
        return ratios

    def _beyond(self, cost: float) -> _Array:
        """Return the errors that are left with a cost of several hosts."""
        return self._error - cost * self._x[:, _SEVERAL]

    def center(self, doubts: Sequence[float]) -> float:
        """Return the middle of an interval over the prediction."""
        return math.exp(self.cost_of_several * doubts[_SEVERAL])

    def interval(self, doubts: Sequence[float]) -> Interval | str:
        """Return the interval of a prediction, or why nothing supports one."""
        x = np.array(doubts) ** 2
        most_of = np.where(np.isnan(_STATED), np.sqrt(self._x.max(axis=0)), math.inf)
        for name, value, most in zip(CAUSES, doubts, most_of, strict=True):
            if value > _BEYOND * most:
                return f"{name} ({CAUSES[name]}) is {value:.3g}, and in published runs at most {most:.3g}"
        variances = self._fitted * x + _LEAST / len(x)
        width = self.quantile * math.sqrt(variances.sum())
        shares = dict(zip(CAUSES, (variances / variances.sum()).tolist(), strict=True))
        return Interval(factor=math.exp(width), shares=shares, center=self.center(doubts))


@cache
def shipped_intervals() -> Intervals:
    """Return the intervals that rest on the residuals of the catalog."""
    file = resources.files("shoal.planner") / "catalog" / "residuals.csv"
    with file.open(encoding="utf-8") as opened:
        return Intervals(
            [
                Residual(
                    publisher=line["publisher"],
                    generation=line["generation"],
                    log_ratio=float(line["log_ratio"]),
                    doubts=tuple(float(line[name] or 0) for name in CAUSES),
                )
                for line in csv.DictReader(opened)
            ]
        )


def weights_of(publishers: Sequence[str], correlation: float) -> _Array:
    """Return the weight of each residual, of which those of a publisher are correlated."""
    counts = Counter(publishers)
    return np.array([1 / (1 + (counts[name] - 1) * correlation) for name in publishers])


def intraclass_correlation(values: _Array, groups: Sequence[str]) -> float:
    """Return the share of the groups' offsets in the variance of the values (Fisher 1925), from 0 to 1."""
    counts = Counter(groups)
    num, num_groups = len(values), len(counts)
    if num_groups in (1, num):
        return 0.0  # every weight is the same
    means = {name: values[np.array(groups) == name].mean() for name in counts}
    own = np.array([means[name] for name in groups])
    between = float(((own - values.mean()) ** 2).sum()) / (num_groups - 1)
    within = float(((values - own) ** 2).sum()) / (num - num_groups)
    usual = (num - sum(n * n for n in counts.values()) / num) / (num_groups - 1)
    total = between + (usual - 1) * within
    return min(max((between - within) / total, 0.0), 1.0) if total > 0 else 0.0


def _limited(ratios: _Array) -> _Array:
    """Return ratios with the weight that Student's t gives them, so that outliers count less."""
    limited: _Array = ratios * np.sqrt((_DEGREES + 1) / (_DEGREES + ratios**2))
    return limited


def _fit(x: _Array, error: _Array, weight: _Array) -> _Array:
    """Return a² of each cause: the weighted likelihood's maximum, by its multiplicative ascent."""
    is_free = np.isnan(_STATED)
    fitted = np.where(is_free, float((error**2).mean()) / x.shape[1], _STATED**2)
    for _ in range(_ITERATIONS):
        variance = x @ fitted + _LEAST
        square = error**2 * (_DEGREES + 1) / (_DEGREES + error**2 / variance)
        above = (weight * square / variance**2) @ x
        below = (weight / variance) @ x
        fitted = np.where(is_free, fitted * np.sqrt(above / np.where(below > 0, below, 1.0)), fitted)
    return fitted


def weighted_quantile(values: _Array, weight: _Array, level: float) -> float:
    """Return the least of the values below or at which ``level`` of the weight lies."""
    order = np.argsort(values)
    upto = np.cumsum(weight[order])
    return float(values[order][min(int(np.searchsorted(upto, level * upto[-1])), len(values) - 1)])
