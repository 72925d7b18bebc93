"""Selects the figures of a page, their curves, legends and notes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal import formatting
from shoal.record import Resume, Step, Stop
from shoal.report import plots
from shoal.report.curves import (
    MAX_POINTS,
    NUM_MEANS,
    Points,
    finite,
    group_means,
    spread_over_decades,
    thin,
    trend,
    upper_limit,
)
from shoal.report.pipeline_timeline import draw_pipeline_step
from shoal.report.plots import Axes, Line, Mark
from shoal.report.runs import RecordedRun, mean_parts_s, metric_names
from shoal.report.timeline import time_unit

_MARKERS = {"o": "○", "s": "□", "^": "△", "D": "◇"}
MAX_AREAS = 80
"""Groups that a step's parts are averaged over; a stack of raw values would be unreadable."""
MAX_TICKS = 60
"""Maximum number of checkpoint ticks on a curve; with more, none are drawn."""


class Key(NamedTuple):
    """An entry of a legend."""

    colour: str
    symbol: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure of the page."""

    title: str
    unit: str
    svg: str
    keys: Sequence[Key] = ()
    notes: Sequence[str] = ()


class _Curves:
    """Collects the curves of one figure, with their legend and notes."""

    def __init__(self, runs: Sequence[RecordedRun]) -> None:
        self.runs = runs
        self.lines: list[Line] = []
        self.keys: list[Key] = []
        self.notes: list[str] = []

    def add(
        self, index: int, points: Points, label: str, *, smooth: bool = False, xs: Sequence[float] = ()
    ) -> None:
        """Add a curve of the run ``index`` through points (step, value), unless there are none.

        Notes name points that it does not show. The x axis is the step or epoch, unless ``xs`` are given.
        """
        if not points:
            return
        xs = xs or [_x(self.runs, self.runs[index], step) for step, _ in points]
        series = finite([(x, y) for x, (_, y) in zip(xs, points, strict=True)])
        colour, smooth = plots.run_colour(index), smooth and len(series.xs) > NUM_MEANS
        self.lines.append(Line(series=thin(series), colour=colour, faint=smooth))
        if smooth:
            self.lines.append(Line(series=trend(series), colour=colour))
        self._key(index, "━", label)
        owner = f"{self.runs[index].name}: " if len(self.runs) > 1 else ""
        if len(series.xs) > MAX_POINTS:
            self.notes.append(
                f"{owner}{len(series.xs):,} points thinned to {MAX_POINTS} that keep every peak."
            )
        if lost := [int(step) for step, y in points if not math.isfinite(y)]:
            num = formatting.plural(len(lost), "value")
            self.notes.append(f"{owner}▲ {num} not finite, at step {formatting.ranges(lost)}.")

    def add_dots(self, index: int, points: Points, label: str, marker: str) -> None:
        """Add single points of the run ``index``, unless there are none."""
        if points:
            placed = [(_x(self.runs, self.runs[index], step), y) for step, y in points]
            self.lines.append(Line(series=finite(placed), colour=plots.run_colour(index), dots=marker))
            self._key(index, _MARKERS[marker], label)

    def _key(self, index: int, symbol: str, label: str) -> None:
        name = self.runs[index].name
        text = name if not label else label if len(self.runs) == 1 else f"{name}, {label}"
        self.keys.append(Key(plots.css_colour(plots.run_colour(index)), symbol, text))

    def chart(self, title: str, unit: str, axes: Axes) -> Chart:
        keys = self.keys if len(self.runs) > 1 or axes.metric else []
        svg = plots.draw_curves(self.lines, axes)
        return Chart(title=title, unit=unit, svg=svg, keys=keys, notes=self.notes)


def by_epoch(runs: Sequence[RecordedRun]) -> bool:
    """Return whether the x axis is the epoch: if all runs are defined in epochs."""
    return all(run.start.epoch_samples > 0 for run in runs)


def _x(runs: Sequence[RecordedRun], run: RecordedRun, step: float) -> float:
    """Return the position of a run's step on the x axis."""
    if not by_epoch(runs):
        return float(step)
    return step * run.start.global_batch_size / run.start.epoch_samples


def curve_charts(runs: Sequence[RecordedRun]) -> list[Chart]:
    """Return the training loss and every metric with its held-out points, then the optimizer's values."""
    charts = [_metric_chart(runs, name) for name in metric_names(runs)]
    scaled = any(row.loss_scale != 1 for run in runs for row in run.steps)
    for name in ("learning_rate", "grad_norm", "weight_norm", *(["loss_scale"] if scaled else [])):
        curves = _Curves(runs)
        for index, run in enumerate(runs):
            curves.add(index, [(row.step, getattr(row, name)) for row in run.steps], "")
        unit = "before clipping" if name == "grad_norm" else ""
        charts.append(_step_chart(curves, formatting.metric_title(name), unit, "", {}))
    charts += [_contributions_chart(runs, of_staleness) for of_staleness in (True, False)]
    return [chart for chart in charts if chart is not None]


def _metric_chart(runs: Sequence[RecordedRun], name: str) -> Chart | None:
    curves = _Curves(runs)
    splits = list(dict.fromkeys(row.split for run in runs for row in run.evaluations))
    for index, run in enumerate(runs):
        values = [(row.step, {**row.metrics, "loss": row.loss}) for row in run.steps]
        points = [(step, metrics[name]) for step, metrics in values if name in metrics]
        curves.add(index, points, "training", smooth=True)
        for split, marker in zip(splits, [*_MARKERS] * len(splits), strict=False):
            scored = [row for row in run.evaluations if row.split == split and name in row.metrics]
            curves.add_dots(index, [(row.step, row.metrics[name]) for row in scored], split, marker)
    references = {run.start.references[name] for run in runs if name in run.start.references}
    unit = "nat" if name.endswith("loss") else ""
    return _step_chart(curves, formatting.metric_title(name), unit, name, _rules(name, references))


def _contributions_chart(runs: Sequence[RecordedRun], of_staleness: bool) -> Chart | None:
    """Return the mean staleness of the gradients that steps took, or the share that none has taken."""
    curves = _Curves(runs)
    for index, run in enumerate(runs):
        rows = [row for row in run.contributions if sum(row.used)]
        stale = [sum(s * n for s, n in enumerate(row.staleness)) / sum(row.used) for row in rows]
        lost = [100 * sum(row.dropped) / (sum(row.used) + sum(row.dropped)) for row in rows]
        steps = [row.step for row in rows]
        curves.add(index, list(zip(steps, stale if of_staleness else lost, strict=True)), "")
    title, unit = ("Staleness", "steps, mean") if of_staleness else ("Dropped gradients", "%")
    return _step_chart(curves, title, unit, "", {})


def _rules(name: str, references: set[float]) -> dict[float, str]:
    """Return the reference lines of runs; one label gives the range where they differ."""
    if not references:
        return {}
    least, most = (formatting.score(name, value) for value in (min(references), max(references)))
    label = f"{formatting.reference_title(name)} {least if least == most else f'{least} to {most}'}"
    return {value: label if value == max(references) else "" for value in sorted(references)}


def _step_chart(
    curves: _Curves, title: str, unit: str, metric: str, rules: Mapping[float, str]
) -> Chart | None:
    """Return the figure over steps or epochs, with a cut or logarithmic axis where a few values need it."""
    if not curves.lines:
        return None
    runs = curves.runs
    values = [y for line in curves.lines for y in line.series.ys]
    log = title in {"Gradient norm", "Loss scale"} and spread_over_decades(values)
    top = None if log else _common_limit([line.series.ys for line in curves.lines if line.series.ys])
    if top is not None:
        curves.notes.append(f"Axis cut at {formatting.number(top, 3)}; ▲ marks higher values.")
    axes = Axes(
        description=f"{title} over the {'epochs' if by_epoch(runs) else 'optimizer steps'}",
        x_name="epoch" if by_epoch(runs) else plots.OPTIMIZER_STEP,
        metric=metric,
        last_x=max(_x(runs, run, run.last_step) for run in runs),
        log=log,
        top=top,
        marks=[mark for index, run in enumerate(runs) for mark in _marks(runs, run, index)],
        rules=rules,
    )
    return curves.chart(title, ", ".join(filter(None, [unit, "log scale" if log else ""])), axes)


def _common_limit(columns: Sequence[Sequence[float]]) -> float | None:
    """Return an upper end of the axis that keeps the usual values of every curve; ``None`` to keep all."""
    limits = [upper_limit(ys) for ys in columns]
    if all(limit is None for limit in limits):
        return None
    return max(max(ys) if limit is None else limit for limit, ys in zip(limits, columns, strict=True))


def _marks(runs: Sequence[RecordedRun], run: RecordedRun, index: int) -> list[Mark]:
    rows = [*run.checkpoints] if len(run.checkpoints) <= MAX_TICKS else []
    events = [row for row in run.rows if isinstance(row, Resume | Stop)]
    return [Mark(_x(runs, run, row.step), row.kind, plots.run_colour(index)) for row in (*rows, *events)]


def throughput_chart(runs: Sequence[RecordedRun]) -> Chart | None:
    """Return samples per second over the training time, without pauses between process groups."""
    divisor, unit = time_unit(max((run.seconds for run in runs), default=0.0))
    curves = _Curves(runs)
    for index, run in enumerate(runs):
        before, times = 0.0, []
        for group in run.groups:
            begin_s = group.start.time_s - before
            times += [(row.time_s - begin_s) / divisor for row in group.rows if isinstance(row, Step)]
            before += group.seconds
        rates = [(row.step, row.samples_per_s) for row in run.steps]
        curves.add(index, rates, "", smooth=True, xs=times)
    if not curves.lines:
        return None
    pauses = any(len(run.groups) > 1 for run in runs)
    axes = Axes(
        description="Samples per second over the training time",
        x_name=f"{unit} of training" + (", without pauses" if pauses else ""),
        from_zero=True,
    )
    units = dict.fromkeys(formatting.per_second_unit(run.start.unit) for run in runs)
    return curves.chart("Throughput", ", ".join(units), axes)


def parts_charts(runs: Sequence[RecordedRun]) -> list[Chart]:
    """Return for each run the parts of a step's time over the steps."""
    charts: list[Chart] = []
    for run in runs:
        if not run.steps:
            continue
        names = list(mean_parts_s(run))
        seconds = [[row.parts_s.get(name, 0.0) for row in run.steps] for name in names]
        columns = [[1000 * s if math.isfinite(s) else 0.0 for s in column] for column in seconds]
        xs, layers = group_means([row.step for row in run.steps], columns, limit=MAX_AREAS)
        notes = []
        if len(xs) < len(run.steps):
            notes.append(f"{len(run.steps):,} lines averaged in {len(xs):,} groups.")
        colours = [plots.css_colour(plots.part_colour(index)) for index in range(len(names))]
        charts.append(
            Chart(
                title="Time of a step" if len(runs) == 1 else run.name,
                unit="ms",
                svg=plots.draw_stack(xs, layers, f"Time of a step of {run.name} by part, stacked"),
                keys=[Key(c, "■", n.replace("_", " ")) for c, n in zip(colours, names, strict=True)],
                notes=notes,
            )
        )
    return charts


def pipeline_charts(runs: Sequence[RecordedRun]) -> list[Chart]:
    """Return for each run with a pipeline the timeline of its last recorded step."""
    return [
        Chart(
            title="Pipeline" if len(runs) == 1 else f"Pipeline of {run.name}",
            unit=f"step {run.pipeline_steps[-1].step:,}, schedule {run.pipeline_steps[-1].schedule}",
            svg=draw_pipeline_step(run.pipeline_steps[-1]),
            notes=["The number in a box is its micro-batch."],
        )
        for run in runs
        if run.pipeline_steps
    ]
