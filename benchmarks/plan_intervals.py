"""Scores the planner's 80 % intervals on published rows: each publisher, then each generation left out.

A fold fits all that intervals need without the rows that are left out, and then gives these an interval.
Beside it stands linear scaling with an interval as wide as its own errors on the other rows.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.harness import Benchmark
from benchmarks.plan_families import Given, Prediction
from benchmarks.plan_predict import counted
from benchmarks.plan_rows import KINDS, TIME, generation_of
from shoal.planner.intervals import (
    CAUSES,
    LEVEL,
    STATED,
    Interval,
    Intervals,
    Residual,
    doubts_of,
    weighted_quantile,
    weights_of,
)
from shoal.planner.prediction import achieved

COVERAGE = (0.75, 0.88)
MOST_HALF_WIDTH = 0.15
NUM_WIDTHS = len(CAUSES) - len(STATED)
"""Figures that each fold fits for the width."""
FEWEST_ROWS, LEAST_COVERAGE = 5, 0.5
"""A publisher with as many rows has at least this coverage."""
MOST_REFUSED = 0.05


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A scored row with its interval."""

    prediction: Prediction
    log_center: float
    """Of the interval's middle, which is the fold's prediction, over the planner's with all rows."""
    log_factor: float | None
    """Of the interval's bounds to its middle; None: nothing supports an interval."""
    linear_log_factor: float
    """The same of linear scaling."""
    amdahl_error: float
    """Of Amdahl's law, with the serial fraction of the other rows of the kind."""

    @property
    def log_ratio(self) -> float:
        """Logarithm of the published time over the fold's prediction."""
        return self.prediction.log_ratio - self.log_center

    @property
    def error(self) -> float:
        """Relative error of the fold's prediction of the metric."""
        return abs(math.exp(-self.log_ratio if self.prediction.kind == TIME else self.log_ratio) - 1)

    @property
    def holds(self) -> bool:
        return self.log_factor is not None and abs(self.log_ratio) <= self.log_factor


def residuals_of(scored: Sequence[Prediction], given: Sequence[Given]) -> list[Residual]:
    """Return the errors of predictions from one host's rate, then those of rates that nobody measured."""
    scaling = [
        Residual(publisher=p.publisher, generation=p.generation, log_ratio=p.log_ratio, doubts=p.doubts)
        for p in scored
    ]
    return scaling + [residual for each in given if each.row.kind != TIME for residual in _rates(each)]


def _rates(given: Given) -> list[Residual]:
    """Return how far the planner's rate is off: a share of the peak, and another's publication if any."""
    row = given.row
    found = []
    for published in (False, True):
        flops, basis = achieved(
            counted(row), row.recipe, given.machines.instance,
            precision="fp32" if row.precision == "fp32" else "bf16", published=published,
        )  # fmt: skip
        rate, _, source = basis.partition(":")
        if published != (rate == "published") or row.publisher.lower() in source.lower():
            continue
        doubts = doubts_of({"compute": 1.0}, rate=rate, times_the_hosts=1.0, several=False)
        found.append(
            Residual(
                publisher=row.publisher,
                generation=generation_of(given.machines),
                log_ratio=math.log(flops / given.achieved),
                doubts=doubts,
            )
        )
    return found


def judged(scored: Sequence[Prediction], residuals: Sequence[Residual], left_out: str) -> list[Judged]:
    """Return each row with the interval that rests on all others.

    Args:
        left_out: ``"publisher"`` or ``"generation"``: what no residual of a fold shares with its rows.
    """
    found = []
    for name in sorted({getattr(p, left_out) for p in scored}):
        others = [p for p in scored if getattr(p, left_out) != name]
        intervals = Intervals([each for each in residuals if getattr(each, left_out) != name])
        mine = [p for p in scored if getattr(p, left_out) == name]
        serial = {kind: best_serial_fraction([p for p in others if p.kind == kind]) for kind in KINDS}
        for p in mine:
            interval = intervals.interval(p.doubts)
            found.append(
                Judged(
                    prediction=p,
                    log_center=math.log(intervals.center(p.doubts)),
                    log_factor=math.log(interval.factor) if isinstance(interval, Interval) else None,
                    linear_log_factor=_linear_log_factor(others, p.kind, intervals.correlation),
                    amdahl_error=p.amdahl_error(serial[p.kind]),
                )
            )
    return found


def best_serial_fraction(predictions: Sequence[Prediction]) -> float:
    """Return Amdahl's serial fraction with the least median error on these rows."""
    grid = [0.0] + [math.exp(-12 + 0.05 * step) for step in range(230)]
    return min(grid, key=lambda s: statistics.median([p.amdahl_error(s) for p in predictions] or [0.0]))


def _linear_log_factor(others: Sequence[Prediction], kind: str, correlation: float) -> float:
    """Return the half-width of linear scaling: the quantile of its own errors on other rows of the kind."""
    of_kind = [p for p in others if p.kind == kind]
    errors = np.abs([p.linear_log_ratio for p in of_kind])
    return weighted_quantile(errors, weights_of([p.publisher for p in of_kind], correlation), LEVEL)


def interval_score(log_ratio: float, log_factor: float) -> float:
    """Return Winkler's score of an interval: its width, and a penalty for a value outside (Gneiting 2007)."""
    return 2 * log_factor + 2 / (1 - LEVEL) * max(0.0, abs(log_ratio) - log_factor)


def score(bench: Benchmark, folds: Mapping[str, Sequence[Judged]]) -> None:
    """Add the figures of both kinds of folds to the benchmark; print those of each publisher."""
    for left_out, rows in folds.items():
        answered = [each for each in rows if each.log_factor is not None]
        name = f"80 % interval, {left_out} left out ({len(rows)} rows)"
        coverage = statistics.fmean(each.holds for each in answered)
        half = statistics.median(math.sinh(each.log_factor or 0.0) for each in answered)
        ours = [interval_score(each.log_ratio, each.log_factor or 0.0) for each in answered]
        linear = [interval_score(e.prediction.linear_log_ratio, e.linear_log_factor) for e in answered]
        bench.limit(f"{name}: too few covered", 1 - coverage, 1 - COVERAGE[0], unit="", formula="25 %")
        bench.limit(f"{name}: too many covered", coverage, COVERAGE[1], unit="", formula="88 %")
        bench.limit(f"{name}: median half-width", half, MOST_HALF_WIDTH, unit="", formula="15 %")
        refused = 1 - len(answered) / len(rows)
        bench.limit(f"{name}: refused", refused, MOST_REFUSED, unit="", formula="5 %")
        bench.add(f"{name}: interval score", ours=[statistics.fmean(ours)], peer=[statistics.fmean(linear)],
                  peer_name="linear scaling", unit="", target=1.0)  # fmt: skip
        groups = {p: [each for each in answered if getattr(each.prediction, left_out) == p]
                  for p in sorted({getattr(each.prediction, left_out) for each in answered})}  # fmt: skip
        least = min(_coverage(group) for group in groups.values() if len(group) >= FEWEST_ROWS)
        bench.limit(f"{name}: not covered, of the worst {left_out}", 1 - least, 1 - LEAST_COVERAGE, unit="",
                    formula="50 %")  # fmt: skip
        print(f"\n{left_out:<24} {'rows':>5} {'covered':>8} {'half-width':>11}")
        for group_name, group in sorted(groups.items(), key=lambda item: -len(item[1])):
            width = statistics.median(math.sinh(each.log_factor or 0.0) for each in group)
            print(f"{group_name:<24} {len(group):>5} {100 * _coverage(group):>6.0f} % {100 * width:>9.1f} %")
        kinds = Counter(each.prediction.kind for each in answered)
        for kind, count in kinds.items():
            of_kind = [each for each in answered if each.prediction.kind == kind]
            width = statistics.median(math.sinh(each.log_factor or 0.0) for each in of_kind)
            print(f"{kind:<24} {count:>5} {100 * _coverage(of_kind):>6.0f} % {100 * width:>9.1f} %")


def _coverage(rows: Sequence[Judged]) -> float:
    return statistics.fmean(each.holds for each in rows)


def write(path: Path, residuals: Sequence[Residual]) -> None:
    """Write the file of the catalog, ``residuals.csv``."""
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["publisher", "generation", "log_ratio", *CAUSES])
        for each in residuals:
            doubts = [f"{value:.4g}" if value else "" for value in each.doubts]
            table.writerow([each.publisher, each.generation, f"{each.log_ratio:.4f}", *doubts])
