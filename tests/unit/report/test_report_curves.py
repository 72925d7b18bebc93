"""Thinning, smoothing and cutting of curves."""

from __future__ import annotations

import math
import random
import re

from shoal.report.curves import (
    MAX_POINTS,
    NUM_MEANS,
    Series,
    finite,
    group_means,
    spread_over_decades,
    thin,
    trend,
    upper_limit,
)
from shoal.report.plots import Axes, Line, draw_curves, run_colour


def series(ys: list[float]) -> Series:
    return finite([(float(x), y) for x, y in enumerate(ys)])


def test_values_that_are_not_finite_are_set_apart() -> None:
    made = series([1.0, math.nan, 2.0, math.inf, -math.inf])
    assert (made.xs, made.ys, made.not_finite_xs) == ([0.0, 2.0], [1.0, 2.0], [1.0, 3.0, 4.0])


def test_thinning_keeps_order_and_every_single_peak() -> None:
    noise = random.Random(3)
    ys = [noise.random() for _ in range(50_000)]
    ys[12_345], ys[40_001] = 99.0, -99.0
    thinned = thin(series(ys))
    assert len(thinned.xs) <= MAX_POINTS
    assert thinned.xs == sorted(thinned.xs)
    assert (max(thinned.ys), min(thinned.ys)) == (99.0, -99.0)
    assert thinned.xs[thinned.ys.index(99.0)] == 12_345
    assert all(ys[int(x)] == y for x, y in zip(thinned.xs, thinned.ys, strict=True))


def test_a_short_curve_is_left_alone() -> None:
    short = series([3.0, 1.0, 2.0])
    assert thin(short) is short


def test_trend_of_a_long_curve_survives_huge_values() -> None:
    ys = [1.0] * 6_000
    ys[10] = 1e300
    made = trend(series(ys))
    assert len(made.xs) == NUM_MEANS
    assert made.ys[-39:] == [1.0] * 39  # a running sum would have lost the ones


def test_group_means_keep_the_sum_of_a_stack() -> None:
    xs, (first, second) = group_means([1, 2, 3, 4, 5], [[1.0, 3.0, 5.0, 7.0, 9.0], [0.0] * 5], limit=2)
    assert (xs, first, second) == ([2, 5], [2.0, 7.0], [0.0, 0.0])
    assert group_means([4], [[2.0]], limit=80) == ([4], [[2.0]])


def test_logarithmic_axis_only_for_positive_values_over_decades() -> None:
    assert spread_over_decades([2.0**n for n in range(16)])
    assert not spread_over_decades([1.0 + n / 100 for n in range(100)])
    assert not spread_over_decades([0.0, 1.0, 1000.0])
    assert not spread_over_decades([1.0] * 200 + [1e6])  # one peak is not a spread
    assert not spread_over_decades([])


def test_axis_is_cut_for_a_peak_but_not_for_a_high_beginning() -> None:
    falling = [9.0 * math.exp(-n / 30) + 2 for n in range(1000)]
    assert upper_limit(falling) is None
    limit = upper_limit([*falling[:500], 1e6, *falling[501:]])
    assert limit is not None
    assert 11 < limit < 20
    assert upper_limit([1.0] * 100) is None
    assert upper_limit([1.0, 900.0]) is None


def test_a_point_at_the_top_of_a_cut_axis_is_whole() -> None:
    """Its marker is a circle of 5.5 points, which the edge of the figure must not cut."""
    values = Series(xs=[0.0, 1.0, 2.0], ys=[0.1, 0.3, 0.473], not_finite_xs=[])
    line = Line(series=values, colour=run_colour(0), dots="o")
    svg = draw_curves([line], Axes(description="Top-1", x_name="epoch", top=0.473))
    (clip,) = set(re.findall(r'<clipPath[^>]*>\s*<rect x="[\d.]+" y="([\d.]+)"', svg))
    highest = min(float(y) for y in re.findall(r'<use href="#[^"]*" x="[\d.]+" y="([\d.]+)"', svg))
    assert highest - float(clip) > 5.5 / 2
