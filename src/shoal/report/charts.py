"""Which figures a page has, what each shows and how its legend reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from shoal.record import PipelineStep, Resume, Step, Stop
from shoal.report import plots, words
from shoal.report.curves import (
    MAX_POINTS,
    finite,
    group_means,
    smoothing_window,
    spread_over_decades,
    thin,
    trend,
    upper_limit,
)
from shoal.report.pipeline_timeline import draw_pipeline_step
from shoal.report.plots import Axes, Line, Mark, Rule
from shoal.report.runs import Run, mean_parts_s, metric_names
from shoal.report.timeline import time_unit

_MARKERS = ("o", "s", "^", "D")
_SYMBOLS = {"o": "○", "s": "□", "^": "△", "D": "◇"}
MAX_AREAS = 80
"""Groups over which the time of a step is averaged: a stack of raw values is a comb, not a picture."""
MAX_TICKS = 60
"""Checkpoints up to which each gets a tick on the curves; more would be one thick line."""
_OPTIMIZER_STEP = "optimizer step"
_EPOCH = "epoch"


@dataclass(frozen=True, kw_only=True)
class Key:
    """One entry of a legend."""

    colour: str
    symbol: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One figure of the page."""

    title: str
    unit: str
    svg: str
    keys: Sequence[Key]
    notes: Sequence[str]


def by_epoch(runs: Sequence[Run]) -> bool:
    """Whether the x axis is the epoch: where all runs are defined in epochs, whatever their batches."""
    return all(run.start.epoch_samples > 0 for run in runs)


def _x(runs: Sequence[Run], run: Run, step: float) -> float:
    """Return where a step of a run lies on the x axis."""
    if not by_epoch(runs):
        return float(step)
    return step * run.start.global_batch_size / run.start.epoch_samples


def _placed(
    runs: Sequence[Run], run: Run, points: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    return [(_x(runs, run, step), value) for step, value in points]


def curve_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return the training loss and every metric with its held-out points, then the optimizer's figures."""
    splits = list(dict.fromkeys(row.split for run in runs for row in run.evaluations))
    charts = [_metric_chart(runs, name, splits) for name in metric_names(runs)]
    wanted: list[tuple[str, str, Callable[[Step], float]]] = [
        ("Learning rate", "", lambda row: row.learning_rate),
        ("Gradient norm", "before clipping", lambda row: row.grad_norm),
        ("Weight norm", "", lambda row: row.weight_norm),
        ("Loss scale", "", lambda row: row.loss_scale),
    ]
    for title, unit, value in wanted:
        if title == "Loss scale" and all(row.loss_scale == 1 for run in runs for row in run.steps):
            continue  # nothing was scaled
        charts.append(_step_chart(runs, title, unit, value))
    return [chart for chart in charts if chart is not None]


def _metric_chart(runs: Sequence[Run], name: str, splits: Sequence[str]) -> Chart | None:
    lines: list[Line] = []
    keys: list[Key] = []
    notes: list[str] = []
    for index, run in enumerate(runs):
        colour = plots.run_colour(index)
        points = [
            (float(row.step), row.loss if name == "loss" else row.metrics[name])
            for row in run.steps
            if name == "loss" or name in row.metrics
        ]
        if points:
            lines += _training_lines(_placed(runs, run, points), colour)
            keys.append(_key(colour, "━", _owner(runs, run, "training")))
            notes += _notes(runs, run, points)
        for place, split in enumerate(splits):
            scores = [
                (float(row.step), row.metrics[name])
                for row in run.evaluations
                if row.split == split and name in row.metrics
            ]
            if scores:
                marker = _MARKERS[place % len(_MARKERS)]
                lines.append(Line(series=finite(_placed(runs, run, scores)), colour=colour, dots=marker))
                keys.append(_key(colour, _SYMBOLS[marker], _owner(runs, run, split)))
    if not lines:
        return None
    rules = _rules(name, {run.start.references[name] for run in runs if name in run.start.references})
    title = words.metric_title(name)
    return _chart(runs, title, "nat" if name.endswith("loss") else "", lines, keys, notes, name, rules)


def _rules(name: str, references: set[float]) -> list[Rule]:
    """Return the lines of what runs compare with; where they differ, one label says how much."""
    if not references:
        return []
    least, most = (words.score(name, value) for value in (min(references), max(references)))
    label = f"{words.reference_title(name)} {least if least == most else f'{least} to {most}'}"
    highest = max(references)
    return [Rule(y=value, label=label if value == highest else "") for value in sorted(references)]


def _step_chart(runs: Sequence[Run], title: str, unit: str, value: Callable[[Step], float]) -> Chart | None:
    lines: list[Line] = []
    keys: list[Key] = []
    notes: list[str] = []
    for index, run in enumerate(runs):
        points = [(float(row.step), value(row)) for row in run.steps]
        if points:
            colour = plots.run_colour(index)
            lines.append(Line(series=thin(finite(_placed(runs, run, points))), colour=colour))
            keys.append(_key(colour, "━", run.name))
            notes += _notes(runs, run, points)
    if not lines:
        return None
    return _chart(runs, title, unit, lines, keys if len(runs) > 1 else [], notes, title, [])


def _chart(
    runs: Sequence[Run],
    title: str,
    unit: str,
    lines: Sequence[Line],
    keys: Sequence[Key],
    notes: list[str],
    metric: str,
    rules: Sequence[Rule],
) -> Chart:
    values = [y for line in lines for y in line.series.ys]
    log = title in {"Gradient norm", "Loss scale"} and spread_over_decades(values)
    top = None if log else _common_limit(lines)
    if top is not None:
        notes = [*notes, f"Axis cut at {words.number(top, 3)}; ▲ marks higher values."]
    axes = Axes(
        description=f"{title} over the {'epochs' if by_epoch(runs) else 'optimizer steps'}",
        x_name=_EPOCH if by_epoch(runs) else _OPTIMIZER_STEP,
        metric=metric,
        last_x=max(_x(runs, run, run.last_step) for run in runs),
        log=log,
        top=top,
        marks=[mark for index, run in enumerate(runs) for mark in _step_marks(runs, run, index)],
        rules=rules,
    )
    unit = ", ".join(filter(None, [unit, "log scale" if log else ""]))
    return Chart(title=title, unit=unit, svg=plots.draw_curves(lines, axes), keys=keys, notes=notes)


def throughput_chart(runs: Sequence[Run]) -> Chart | None:
    """Return samples a second over the time under way: pauses between process groups are left out."""
    divisor, unit = time_unit(max((run.seconds for run in runs), default=0.0))
    lines: list[Line] = []
    keys: list[Key] = []
    notes: list[str] = []
    for index, run in enumerate(runs):
        colour = plots.run_colour(index)
        before = 0.0
        for group in run.groups:
            begin, end = group.start.time_s, group.last_time_s
            points = [
                ((before + row.time_s - begin) / divisor, row.samples_per_s)
                for row in run.steps
                if begin <= row.time_s <= end
            ]
            before += group.seconds
            if points:
                lines += _training_lines(points, colour)
        if run.steps:
            keys.append(_key(colour, "━", run.name))
            notes += _notes(runs, run, [(row.step, row.samples_per_s) for row in run.steps])
    if not lines:
        return None
    pauses = any(len(run.groups) > 1 for run in runs)
    axes = Axes(
        description="Samples a second over the time under way",
        x_name=f"{unit} under way" + (", pauses left out" if pauses else ""),
        from_zero=True,
    )
    return Chart(
        title="Throughput",
        unit=", ".join(dict.fromkeys(words.per_second_unit(run.start.unit) for run in runs)),
        svg=plots.draw_curves(lines, axes),
        keys=keys if len(runs) > 1 else [],
        notes=notes,
    )


def parts_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return for each run where the time of a step went, over its steps."""
    charts: list[Chart] = []
    for run in runs:
        if not run.steps:
            continue
        names = list(mean_parts_s(run))
        columns = [[_finite_ms(row.parts_s.get(name, 0.0)) for row in run.steps] for name in names]
        xs, layers = group_means([row.step for row in run.steps], columns, limit=MAX_AREAS)
        notes = []
        if len(xs) < len(run.steps):
            notes.append(f"{len(run.steps):,} lines averaged in {len(xs):,} groups.")
        charts.append(
            Chart(
                title="Time of a step" if len(runs) == 1 else run.name,
                unit="ms",
                svg=plots.draw_stack(xs, layers, f"Time of a step of {run.name} by part, stacked"),
                keys=[_key(plots.part_colour(i), "■", words.part_title(n)) for i, n in enumerate(names)],
                notes=notes,
            )
        )
    return charts


def pipeline_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return for each run with a pipeline the timeline of the last step of which it was recorded."""
    charts: list[Chart] = []
    for run in runs:
        rows = [row for row in run.rows if isinstance(row, PipelineStep) and (row.predicted or row.traced)]
        if rows:
            charts.append(
                Chart(
                    title="Pipeline" if len(runs) == 1 else f"Pipeline of {run.name}",
                    unit=f"step {rows[-1].step:,}, schedule {rows[-1].schedule}",
                    svg=draw_pipeline_step(rows[-1]),
                    keys=[],
                    notes=["The number in a box is its micro-batch."],
                )
            )
    return charts


def _common_limit(lines: Sequence[Line]) -> float | None:
    """Return where to cut the axis so that every curve keeps what is usual for it."""
    limits = [upper_limit(line.series.ys) for line in lines if line.series.ys]
    if all(limit is None for limit in limits):
        return None
    return max(
        limit if limit is not None else max(line.series.ys)
        for limit, line in zip(limits, [line for line in lines if line.series.ys], strict=True)
    )


def _finite_ms(seconds: float) -> float:
    return 1000 * seconds if math.isfinite(seconds) else 0.0


def _training_lines(points: Sequence[tuple[float, float]], colour: str) -> list[Line]:
    series = finite(points)
    if smoothing_window(len(series.xs)) == 1:
        return [Line(series=series, colour=colour)]
    return [
        Line(series=thin(series), colour=colour, faint=True),
        Line(series=trend(replace(series, not_finite_xs=[])), colour=colour),
    ]


def _notes(runs: Sequence[Run], run: Run, points: Sequence[tuple[float, float]]) -> list[str]:
    series = finite(points)
    owner = f"{run.name}: " if len(runs) > 1 else ""
    notes = []
    if len(series.xs) > MAX_POINTS:
        notes.append(f"{owner}{len(series.xs):,} points thinned to {MAX_POINTS} that keep every peak.")
    if series.not_finite_xs:
        what = words.plural(len(series.not_finite_xs), "value")
        steps = words.ranges([int(x) for x in series.not_finite_xs])
        notes.append(f"{owner}▲ {what} not finite, at step {steps}.")
    return notes


def _history(run: Run) -> Iterable[Resume | Stop]:
    return [row for row in run.rows if isinstance(row, Resume | Stop)]


def _step_marks(runs: Sequence[Run], run: Run, index: int) -> list[Mark]:
    ticks = run.checkpoints if len(run.checkpoints) <= MAX_TICKS else []
    rows = [*ticks, *_history(run)]
    colour = plots.run_colour(index)
    return [Mark(x=_x(runs, run, row.step), what=row.kind, colour=colour) for row in rows]


def _owner(runs: Sequence[Run], run: Run, what: str) -> str:
    return what if len(runs) == 1 else f"{run.name}, {what}"


def _key(colour: str, symbol: str, text: str) -> Key:
    return Key(colour=plots.css_colour(colour), symbol=symbol, text=text)
