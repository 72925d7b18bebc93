"""Lays out process groups and their events along one time axis. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from shoal import formatting
from shoal.record import Checkpoint, End, Members, Resume, Stop
from shoal.report.runs import RecordedRun

MAX_CHECKPOINT_MARKS = 150
"""Maximum number of checkpoint marks; more are thinned evenly, and the page says so."""


class TimelineMark(NamedTuple):
    """An event at ``left`` percent of the axis."""

    left: float
    kind: str
    title: str


class Lifetime(NamedTuple):
    """The lifetime of a process group, in percent of the axis."""

    left: float
    width: float
    title: str


class RunLane(NamedTuple):
    """One run."""

    name: str
    spans: Sequence[Lifetime]
    marks: Sequence[TimelineMark]
    note: str


class RunTimeline(NamedTuple):
    """All runs, each from its own first start; ``ticks`` are (percent of the axis, label)."""

    lanes: Sequence[RunLane]
    ticks: Sequence[tuple[float, str]]
    unit: str


def time_unit(longest_s: float) -> tuple[float, str]:
    """Return a suitable unit for an axis of this length: its seconds and its name."""
    if longest_s < 180:
        return 1.0, "seconds"
    return (60.0, "minutes") if longest_s < 3 * 3600 else (3600.0, "hours")


def timeline(runs: Sequence[RecordedRun]) -> RunTimeline:
    """Lay out process groups and events of all runs over the time since each run's first start."""
    longest = max(max(row.time_s for row in run.rows) - run.groups[0].start.time_s for run in runs)
    longest = max(longest, 1.0)
    divisor, unit = time_unit(longest)
    scale = 100 / longest
    step = tick_step(longest / divisor)
    num_ticks = math.floor(longest / divisor / step + 1e-9) + 1
    ticks = [(i * step * divisor * scale, formatting.number(i * step)) for i in range(num_ticks)]
    return RunTimeline([_lane(run, scale) for run in runs], ticks, unit)


def _lane(run: RecordedRun, scale: float) -> RunLane:
    origin = run.groups[0].start.time_s
    spans = [
        Lifetime(
            scale * (group.start.time_s - origin),
            scale * group.seconds,
            f"{formatting.moment(group.start.time_s)} UTC, {formatting.duration(group.seconds)}",
        )
        for group in run.groups
    ]
    every = math.ceil(len(run.checkpoints) / MAX_CHECKPOINT_MARKS) or 1
    rows: list[Checkpoint | Resume | Members | Stop | End] = [*run.checkpoints[::every]]
    rows += [row for row in run.rows if isinstance(row, Resume | Members | Stop | End)]
    marks = [
        TimelineMark(scale * (row.time_s - origin), kind, f"{kind} at step {row.step:,}")
        for row, kind in zip(rows, map(_kind, rows), strict=True)
    ]
    note = f"{run.name}: one mark for every {every} checkpoints." if every > 1 else ""
    return RunLane(run.name, spans, marks, note)


def _kind(row: Checkpoint | Resume | Members | Stop | End) -> str:
    """Return the kind of a mark: workers that come have another one than workers that are lost."""
    if not isinstance(row, Members):
        return row.kind
    return "lost" if row.num_workers < row.num_before else "joined"


def tick_step(length: float) -> float:
    """Return 1, 2 or 5 times a power of ten that gives 3 to 8 ticks on an axis of this length."""
    power = 10 ** math.floor(math.log10(length / 3))
    return next(float(m * power) for m in (5, 2, 1) if length / (m * power) >= 3)
