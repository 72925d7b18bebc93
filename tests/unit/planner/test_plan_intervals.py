"""Intervals of plans: the fit against a search, coverage on fresh errors, causes of the width, refusal."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest

from shoal.planner.answer import interval_json, text_of
from shoal.planner.api import plan
from shoal.planner.intervals import (
    CAUSES,
    LEVEL,
    Interval,
    Intervals,
    Residual,
    doubts_of,
    interval_of,
    intraclass_correlation,
    shipped_intervals,
    weighted_quantile,
    weights_of,
)

NAMES = tuple(CAUSES)


def doubts(**values: float) -> tuple[float, ...]:
    return tuple(values.get(name.replace(" ", "_"), 0.0) for name in NAMES)


def drawn(
    sigma: Callable[[tuple[float, ...]], float], *, publishers: int, each: int, seed: int
) -> list[Residual]:
    """Draw errors of Student's t with three degrees of freedom."""
    random = np.random.default_rng(seed)
    found = []
    for publisher in range(publishers):
        for _ in range(each):
            x = doubts(
                repetition=1.0,
                several_hosts=float(random.integers(2)),
                more_hosts=float(random.integers(1, 6)),
                network=float(random.uniform(0, 0.5)),
            )
            error = float(random.standard_t(3)) * sigma(x)
            found.append(Residual(publisher=str(publisher), generation="made", log_ratio=error, doubts=x))
    return found


def spread(x: tuple[float, ...]) -> float:
    return math.hypot(0.01 * x[NAMES.index("more hosts")], 0.4 * x[NAMES.index("network")])


def test_one_cause_is_fitted_where_its_likelihood_is_greatest() -> None:
    errors = np.array([0.1, -0.02, 0.05, 0.3, -0.07, 0.01, 0.04, -0.2])
    found = Intervals(
        [
            Residual(
                publisher=f"{n % 4}", generation="made", log_ratio=float(e), doubts=doubts(repetition=1.0)
            )
            for n, e in enumerate(errors)
        ]
    )

    def log_likelihood(sigma: float) -> float:
        return float(np.sum(-math.log(sigma) - 2.5 * np.log1p((errors / sigma) ** 2 / 4)))

    best = max(np.exp(np.linspace(-5, 0, 20001)), key=log_likelihood)
    # The quantile over all residuals, each divided by the sigma that the other publishers give it.
    interval = found.interval(doubts(repetition=1.0))
    assert isinstance(interval, Interval)
    assert math.log(interval.factor) / found.quantile == pytest.approx(best, rel=2e-3)


def test_the_interval_covers_what_it_says_on_publishers_never_seen() -> None:
    intervals = Intervals(drawn(spread, publishers=60, each=20, seed=1))
    fresh = drawn(spread, publishers=100, each=40, seed=2)
    held = []
    for each in fresh:
        interval = intervals.interval(each.doubts)
        assert isinstance(interval, Interval)
        held.append(abs(each.log_ratio - math.log(interval.center)) <= math.log(interval.factor))
    assert np.mean(held) == pytest.approx(LEVEL, abs=0.04)


def test_the_width_follows_its_causes() -> None:
    intervals = Intervals(drawn(spread, publishers=20, each=20, seed=3))
    far = intervals.interval(doubts(repetition=1.0, more_hosts=1.0, network=0.5))
    near = intervals.interval(doubts(repetition=1.0, more_hosts=5.0))
    assert isinstance(far, Interval) and isinstance(near, Interval)
    assert sum(far.shares.values()) == pytest.approx(1) and sum(near.shares.values()) == pytest.approx(1)
    assert (
        far.factor > near.factor
        and far.shares["network"] > 0.9
        and near.shares["network"] == pytest.approx(0, abs=0.01)
    )
    assert far.bounds(100.0) == pytest.approx((100 * far.center / far.factor, 100 * far.center * far.factor))


def test_what_several_hosts_cost_moves_the_middle_and_widens_nothing() -> None:
    def intervals(cost: float) -> Intervals:
        made = drawn(spread, publishers=20, each=20, seed=5)
        several = [each.doubts[NAMES.index("several hosts")] for each in made]
        return Intervals(
            [replace(r, log_ratio=r.log_ratio + cost * x) for r, x in zip(made, several, strict=True)]
        )

    plain, slow = intervals(0.0), intervals(0.25)
    assert slow.cost_of_several == pytest.approx(plain.cost_of_several + 0.25)
    x = doubts(repetition=1.0, several_hosts=1.0, more_hosts=4.0)
    before, after = plain.interval(x), slow.interval(x)
    assert isinstance(before, Interval) and isinstance(after, Interval)
    assert after.factor == pytest.approx(before.factor)
    assert after.center == pytest.approx(before.center * math.exp(0.25))
    low, high = after.bounds(100.0)
    assert low * high == pytest.approx((100 * after.center) ** 2)
    assert slow.center(doubts(repetition=1.0, more_hosts=4.0)) == 1.0, "the rate is of several hosts, too"


def test_beyond_all_published_runs_there_is_no_interval() -> None:
    intervals = Intervals(drawn(spread, publishers=4, each=10, seed=4))
    refused = intervals.interval(doubts(repetition=1.0, more_hosts=20.0))
    assert (
        refused == "more hosts (doublings of the hosts since the rate) is 20, and in published runs at most 5"
    )


def test_a_quantile_is_a_value_that_occurs() -> None:
    values = np.array([3.0, 1.0, 2.0])
    assert weighted_quantile(values, np.ones(3), 0.5) == 2.0
    assert weighted_quantile(values, np.array([1.0, 8.0, 1.0]), 0.8) == 1.0
    assert weighted_quantile(values, np.ones(3), 1.0) == 3.0


def test_the_correlation_of_a_publishers_errors_is_that_of_the_analysis_of_variance() -> None:
    values, groups = np.array([-3.0, 1.0, -1.0, 2.0, 1.0, 3.0]), ["a", "a", "a", "b", "b", "b"]
    between, within = 3 * (1.5**2 + 1.5**2), (8.0 + 2.0) / 4  # mean squares, by hand
    assert intraclass_correlation(values, groups) == pytest.approx(
        (between - within) / (between + 2 * within)
    )
    assert intraclass_correlation(np.array([1.0, -1.0, 1.0, -1.0]), ["a", "a", "b", "b"]) == 0.0
    assert intraclass_correlation(np.array([1.0, 1.0, 2.0, 2.0]), ["a", "a", "b", "b"]) == 1.0
    assert weights_of(["a", "b", "b", "b"], 0.25).tolist() == [1.0, 2 / 3, 2 / 3, 2 / 3]


def test_the_correlation_is_that_with_which_errors_were_drawn() -> None:
    random = np.random.default_rng(6)

    def fitted(offset: float) -> tuple[float, float]:
        errors = [
            float(own + math.sqrt(1 - offset**2) * random.standard_normal())
            for own in offset * random.standard_normal(60)
            for _ in range(20)
        ]
        found = Intervals(
            [
                Residual(
                    publisher=f"{n // 20}",
                    generation="made",
                    log_ratio=0.1 * error,
                    doubts=doubts(repetition=1.0),
                )
                for n, error in enumerate(errors)
            ]
        )
        interval = found.interval(doubts(repetition=1.0))
        assert isinstance(interval, Interval)
        return found.correlation, math.log(interval.factor)

    (none, narrow), (half, wide) = fitted(0.0), fitted(math.sqrt(0.5))
    assert none < 0.05 and half == pytest.approx(0.5, abs=0.15)
    assert narrow == pytest.approx(0.1 * 1.28, rel=0.1) and wide == pytest.approx(0.1 * 1.28, rel=0.2)


def test_doubts_of_a_run() -> None:
    seconds = {"compute": 60.0, "network": 20.0, "evaluation": 15.0, "start": 5.0}
    found = doubts_of(
        seconds, rate="measured", times_the_hosts=8.0, several=True, split=0.5, unstated=0.3, to_target=True
    )
    assert dict(zip(NAMES, found, strict=True)) == pytest.approx(
        {
            "rate assumed": 0, "rate published": 0, "repetition": 1, "several hosts": 1, "more hosts": 3,
            "network": 0.2, "split samples": 1, "evaluation": 0.15, "input": 0.0, "start": 0.05,
            "unstated facts": 0.3, "samples to target": 1,
        }
    )  # fmt: skip


def test_the_file_of_residuals_has_every_cause() -> None:
    file = resources.files("shoal.planner") / "catalog" / "residuals.csv"
    with file.open(encoding="utf-8") as opened:
        assert csv.DictReader(opened).fieldnames == ["publisher", "generation", "log_ratio", *CAUSES]
    assert shipped_intervals().num_publishers > 10


def test_plans_have_intervals_that_a_measurement_narrows() -> None:
    assumed = plan("albert-base", "8xp4d.24xlarge", global_batch=4096)[0]
    measured = plan("albert-base", "8xp4d.24xlarge", global_batch=4096, samples_per_s=2000.0)[0]
    wide, narrow = interval_of(assumed), interval_of(measured)
    assert isinstance(wide, Interval) and isinstance(narrow, Interval)
    assert wide.factor > 1.5 * narrow.factor and wide.shares["rate assumed"] > 0.5
    said = text_of([measured])
    assert "how sure" in said and f"times or over {narrow.factor:.3g}" in said
    low, high = interval_json(measured)["total_s"]
    assert low < measured.total_s < high
    far = replace(measured, workers=replace(measured.workers, count=1 << 30))
    assert "none: more hosts" in text_of([far]) and "refused" in interval_json(far)
