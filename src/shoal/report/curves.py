"""Prepares series for drawing: separates non-finite values, thins and smooths. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

MAX_POINTS = 600
"""Maximum points of a curve: more than the pixels of a figure, and 10 kB of SVG."""

NUM_MEANS = 40
"""Points of the trend of a curve that has more."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Series:
    """Finite points of one curve in the order of ``xs``, and the x values of those that are not finite."""

    xs: list[float]
    ys: list[float]
    not_finite_xs: list[float]


def finite(points: Points) -> Series:
    """Separate values that are not finite."""
    good = [(x, y) for x, y in points if math.isfinite(y)]
    return Series(
        xs=[x for x, _ in good],
        ys=[y for _, y in good],
        not_finite_xs=[x for x, y in points if not math.isfinite(y)],
    )


def thin(series: Series, limit: int = MAX_POINTS) -> Series:
    """Keep at most ``limit`` points: the smallest and the largest of each group, so that no peak is lost."""
    num = len(series.xs)
    if num <= limit:
        return series
    num_groups = max(1, limit // 2)
    keep: list[int] = []
    for group in range(num_groups):
        inside = range(group * num // num_groups, (group + 1) * num // num_groups)
        keep += sorted({pick(inside, key=series.ys.__getitem__) for pick in (min, max)})
    return Series(
        xs=[series.xs[i] for i in keep],
        ys=[series.ys[i] for i in keep],
        not_finite_xs=series.not_finite_xs,
    )


def trend(series: Series) -> Series:
    """Return the means of :data:`NUM_MEANS` groups of neighbours."""
    xs, (ys,) = group_means(series.xs, [series.ys], NUM_MEANS)
    return Series(xs=xs, ys=ys, not_finite_xs=[])


def group_means(
    xs: Sequence[float], columns: Sequence[Sequence[float]], limit: int
) -> tuple[list[float], list[list[float]]]:
    """Average columns over at most ``limit`` groups of neighbours, the same for all, so that they stack."""
    num = len(xs)
    num_groups = min(limit, num)
    bounds = [(g * num // num_groups, (g + 1) * num // num_groups) for g in range(num_groups)]
    thinned = [[sum(column[a:b]) / (b - a) for a, b in bounds] for column in columns]
    return [xs[b - 1] for _, b in bounds], thinned


def spread_over_decades(values: Sequence[float]) -> bool:
    """Return whether values need a logarithmic axis: positive, the middle 96 % over a factor of 30."""
    if not values or min(values) <= 0:
        return False
    ordered = sorted(values)
    margin = len(ordered) // 50
    return ordered[-1 - margin] / ordered[margin] > 30


def upper_limit(values: Sequence[float]) -> float | None:
    """Return an upper end of the axis if a few peaks would flatten the rest of the curve, or ``None``.

    The maximum of group medians is the usual range: a single peak does not move it, a high start does.
    """
    if len(values) < 20:
        return None
    width = max(5, len(values) // 40)
    groups = [values[i : i + width] for i in range(0, len(values) - width + 1, width)]
    usual, low = max(map(median, groups)), min(values)
    if usual <= low or max(values) - low <= 6 * (usual - low):
        return None
    return low + 1.5 * (usual - low)
