"""Measure how well a publication predicts the equal run of another: the least error to expect of a plan.

Two rows are equal if model, accelerator, hosts, devices and global batch are, and the devices of the smallest
scale of their families, which the planner is given. The speed-up of one is then a prediction of the other's,
by somebody who measured it on the same hardware.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.plan_intervals import Judged
from benchmarks.plan_rows import Row


@dataclass(frozen=True, kw_only=True)
class Equal:
    """A scored row that others have measured, too."""

    judged: Judged
    by_others: float
    """Error of the median speed-up of the other publications."""


def equals_of(judged: Sequence[Judged], rows: Sequence[Row]) -> list[Equal]:
    """Return the rows of which another publication has an equal one."""
    known = {row.number: row for row in rows}
    groups: dict[tuple[object, ...], list[Judged]] = defaultdict(list)
    for each in judged:
        p, row = each.prediction, known[each.prediction.line]
        key = (row.model, row.metric, row.accelerator, row.nodes, row.gpus, row.global_batch)
        groups[(*key, p.times_the_gpus)].append(each)
    return [
        Equal(judged=each, by_others=abs(statistics.median(others) / _speed_up(each) - 1))
        for group in groups.values()
        for each in group
        if (others := [_speed_up(other) for other in group if _publication(other) != _publication(each)])
    ]


def _speed_up(judged: Judged) -> float:
    """Return a row's value over that of linear scaling."""
    return judged.prediction.published / judged.prediction.linear


def _publication(judged: Judged) -> str:
    return judged.prediction.family[-1]
