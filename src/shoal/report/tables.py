"""Which tables a page has: plain rows of text, ready for the template."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.record import Checkpoint, End, Evaluation, Phase, PipelineStep, Resume, Row, Start, Step, Stop
from shoal.report import plots, words
from shoal.report.runs import (
    Run,
    Score,
    final_scores,
    flat_config,
    mean_parts_s,
    mean_rate,
    mean_step_s,
)

MAX_EVENTS = 400
"""Rows of the event table; of a longer one the checkpoints in the middle are left out."""

_MISSING = "–"
_SETTINGS = {"recipe", "global batch", "world", "backend", "device, precision", "parameters"}
_STATES = {"finished": "finished", "stopped": "stopped", "open": "running or killed"}


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One large figure at the head of the page; ``tone`` is good, warn or plain."""

    label: str
    value: str
    notes: Sequence[str] = ()
    tone: str = "plain"
    fraction: float | None = None
    """How much of a bar to fill, 0 to 1; ``None`` for no bar."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One row: a name and a cell a column; ``differs`` when the runs do not agree."""

    name: str
    cells: Sequence[str]
    differs: bool = False


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One part of a run's average step, with the width of its bar as a share of the slowest run's."""

    colour: str
    title: str
    time: str
    share: str
    width: float


@dataclass(frozen=True, kw_only=True)
class Event:
    """One row of the event table."""

    when: str
    what: str
    tone: str
    step: str
    detail: str
    size: str = ""
    blocked: str = ""
    written: str = ""


def tiles(run: Run) -> list[Tile]:
    """Return the figures that one looks for first."""
    total = run.start.total_steps
    done = run.last_step
    rate = mean_rate(run)
    made = [
        Tile(
            label="Steps",
            value=f"{done:,}",
            notes=[f"of {total:,}", *([f"{run.num_skipped:,} skipped"] if run.num_skipped else [])],
            fraction=min(1.0, done / total) if total else None,
        ),
        Tile(label="Time under way", value=words.duration(run.seconds), notes=[_time_note(run)]),
        Tile(
            label="Throughput",
            value=words.rate(rate, run.start.unit) if rate else _MISSING,
            notes=[f"{words.milliseconds(mean_step_s(run))} a step" if run.steps else "no step recorded yet"],
        ),
    ]
    return made + [_score_tile(score) for score in final_scores(run)]


def _time_note(run: Run) -> str:
    if run.state == "finished" or not run.steps:
        return words.plural(len(run.groups), "process group")
    left = max(0, run.start.total_steps - run.last_step) * mean_step_s(run)
    return f"{words.duration(left)} to go at this pace"


def _score_tile(score: Score) -> Tile:
    notes, tone = [f"{score.split}, step {score.step:,}"], "plain"
    if score.reference is not None and math.isfinite(score.value):
        gain = score.value - score.reference
        if not words.is_fraction(score.metric):
            gain = -gain
        away = abs(gain)
        amount = f"{100 * away:.1f} points" if words.is_fraction(score.metric) else f"{away:.2f}"
        side = "below" if score.value < score.reference else "above"
        notes.append(f"{amount} {side} {words.reference_title(score.metric)}")
        tone = "good" if gain > 0 else "warn"
    elif not math.isfinite(score.value):
        tone = "warn"
    return Tile(
        label=words.metric_title(score.metric),
        value=words.score(score.metric, score.value),
        notes=notes,
        tone=tone,
    )


def state_text(run: Run) -> str:
    """Return what became of the run, with the reason where there is one."""
    text = _STATES[run.state]
    stop = run.groups[-1].stop
    if run.state == "stopped" and stop:
        return f"{text}: {stop.reason}"
    return text


def facts(runs: Sequence[Run]) -> list[Line]:
    """Return the summary table, a column a run; only settings are marked where they differ."""
    rows: list[tuple[str, Callable[[Run], str]]] = [
        ("state", state_text),
        ("recipe", lambda run: run.start.recipe),
        ("started (UTC)", lambda run: words.moment(run.groups[0].start.time_s)),
        ("last row (UTC)", lambda run: words.moment(run.rows[-1].time_s)),
        ("time under way", lambda run: words.duration(run.seconds)),
        ("steps", lambda run: f"{run.last_step:,} of {run.start.total_steps:,}"),
        ("samples", lambda run: f"{run.steps[-1].samples:,}" if run.steps else _MISSING),
        ("throughput", lambda run: words.rate(mean_rate(run), run.start.unit) if run.steps else _MISSING),
        ("step time", lambda run: words.milliseconds(mean_step_s(run)) if run.steps else _MISSING),
        *([("scaling efficiency", lambda run: efficiency(runs, run))] if _num_worlds(runs) > 1 else []),
        ("global batch", global_batches),
        ("world", lambda run: world(run.start)),
        ("backend", lambda run: run.start.backend),
        ("device, precision", lambda run: f"{run.start.device}, {run.start.precision}"),
        ("parameters", lambda run: words.count(run.start.num_parameters)),
        ("peak memory", lambda run: words.size(run.peak_memory_bytes) if run.peak_memory_bytes else _MISSING),
        ("skipped steps", skipped),
        ("checkpoints, resumes", lambda run: f"{len(run.checkpoints):,}, {_num_resumes(run):,}"),
    ]
    lines = [_line(name, [cell(run) for run in runs]) for name, cell in rows]
    outcomes = [replace(line, differs=line.differs and line.name in _SETTINGS) for line in lines]
    return [*outcomes, *_score_lines(runs)]


def _score_lines(runs: Sequence[Run]) -> list[Line]:
    scores = [{(s.metric, s.split): s for s in final_scores(run)} for run in runs]
    keys = list(dict.fromkeys(key for found in scores for key in found))
    lines: list[Line] = []
    for metric, split in keys:
        cells = [
            words.score(metric, f[metric, split].value) if (metric, split) in f else _MISSING for f in scores
        ]
        lines.append(Line(name=f"{words.metric_title(metric)} ({split})", cells=cells))
    return lines


def global_batches(run: Run) -> str:
    """Return the arithmetic of the global batch, of each phase where a run has several."""
    if len(run.phases) < 2:
        return batch_arithmetic(run.start)
    return "; ".join(f"{phase.name}: {phase_text(phase, run.start.num_workers)}" for phase in run.phases)


def phase_text(phase: Phase, num_workers: int) -> str:
    """``steps 1 to 900, 128 tokens a sequence, 256 = 32 × 2 workers × 4 accumulation``."""
    return (
        f"steps {phase.step:,} to {phase.last_step:,}, {phase.sequence_length:,} tokens a sequence, "
        f"{_arithmetic(phase, num_workers)}"
    )


def batch_arithmetic(start: Start) -> str:
    """``256 = 32 × 2 workers × 4 accumulation``; a batch that does not divide gets ≤ instead of =."""
    return _arithmetic(start, start.num_workers)


def _arithmetic(row: Start | Phase, num_workers: int) -> str:
    product = row.micro_batch_size * num_workers * row.accumulation_steps
    sign = "=" if product == row.global_batch_size else "≤"
    return (
        f"{row.global_batch_size:,} {sign} {row.micro_batch_size:,} × "
        f"{words.plural(num_workers, 'worker')} × {row.accumulation_steps:,} accumulation"
    )


def world(start: Start) -> str:
    return f"{words.plural(start.num_workers, 'worker')} on {words.plural(start.num_hosts, 'host')}"


def skipped(run: Run) -> str:
    """Return how many steps an overflow skipped, and about when."""
    steps = [step.step for step in run.steps if step.num_skipped]
    if not steps:
        return "none"
    return f"{run.num_skipped:,} (reported at step {words.ranges(steps)})"


def _num_worlds(runs: Sequence[Run]) -> int:
    return len({run.start.num_workers for run in runs})


def efficiency(runs: Sequence[Run], run: Run) -> str:
    """Return a run's rate a worker, relative to the run of the same recipe with the fewest workers."""
    alike = [other for other in runs if other.start.recipe == run.start.recipe and other.steps]
    base = min(alike, key=lambda other: other.start.num_workers, default=run)
    if not run.steps or base.start.num_workers == run.start.num_workers:
        return _MISSING
    share = (mean_rate(run) / run.start.num_workers) / (mean_rate(base) / base.start.num_workers)
    return f"{words.percent(share)} (from {words.plural(base.start.num_workers, 'worker')})"


def _num_resumes(run: Run) -> int:
    return sum(group.resume is not None for group in run.groups)


def step_shares(runs: Sequence[Run]) -> list[list[Segment]]:
    """Return where the average step's time went, a list a run; bars of all runs share one scale."""
    parts = [mean_parts_s(run) for run in runs]
    longest = max((sum(seconds.values()) for seconds in parts), default=0.0)
    return [_segments(seconds, longest) for seconds in parts]


def part_names(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return title and colour of every part that any of the runs has."""
    names = [part for run in runs for part in mean_parts_s(run)]
    return [
        (words.part_title(name), plots.css_colour(plots.part_colour(index)))
        for index, name in enumerate(dict.fromkeys(names))
    ]


def step_totals(runs: Sequence[Run]) -> list[str]:
    return [words.milliseconds(sum(mean_parts_s(run).values())) if run.steps else _MISSING for run in runs]


def _segments(seconds: Mapping[str, float], longest: float) -> list[Segment]:
    total = sum(seconds.values())
    return [
        Segment(
            colour=plots.css_colour(plots.part_colour(index)),
            title=words.part_title(name),
            time=words.milliseconds(value) if total else _MISSING,
            share=words.percent(value / total) if total else _MISSING,
            width=100 * value / longest if longest else 0.0,
        )
        for index, (name, value) in enumerate(seconds.items())
    ]


def events(run: Run) -> list[Event]:
    """Return what happened, oldest first: starts, checkpoints, resumes, stops, the end."""
    listed = [_event(row) for row in run.rows if not isinstance(row, Step | Evaluation | PipelineStep)]
    if len(listed) <= MAX_EVENTS:
        return listed
    half = MAX_EVENTS // 2
    left_out = Event(
        when="", what="…", tone="plain", step="", detail=f"{len(listed) - 2 * half:,} rows left out"
    )
    return [*listed[:half], left_out, *listed[-half:]]


def _event(row: Row) -> Event:
    when = words.moment(row.time_s)
    if isinstance(row, Start):
        detail = f"{world(row)}, {row.device}, {row.precision}, {row.backend} · "
        detail += batch_arithmetic(row)
        return Event(when=when, what=row.kind, tone="plain", step="", detail=detail)
    event = Event(when=when, what=row.kind, tone="plain", step=f"{row.step:,}", detail="")
    match row:
        case Phase():
            detail = (
                f"{row.name}: to step {row.last_step:,}, {row.global_batch_size:,} sequences a step of "
                f"{row.sequence_length:,} tokens"
            )
            return replace(event, detail=detail)
        case Checkpoint():
            return replace(
                event,
                detail=row.path,
                size=words.size(row.num_bytes),
                blocked=words.milliseconds(row.blocked_s),
                written=words.milliseconds(row.written_s),
            )
        case Resume():
            passed = f"; passed over: {'; '.join(row.damaged)}" if row.damaged else ""
            return replace(event, tone="warn", detail=f"from {row.path}{passed}")
        case Stop():
            return replace(event, tone="warn", detail=f"{row.reason} (exit code {row.exit_code})")
        case End():
            return replace(event, tone="good", detail=f"training loop took {words.duration(row.seconds)}")
    return event


def scores(run: Run) -> tuple[list[str], list[Line]]:
    """Return the held-out scores as column titles and one line an evaluation."""
    metrics = list(dict.fromkeys(metric for row in run.evaluations for metric in row.metrics))
    titles = ["split", *map(words.metric_title, metrics), "samples", "time"]
    lines = [
        Line(
            name=f"{row.step:,}",
            cells=[
                row.split,
                *(words.score(m, row.metrics[m]) if m in row.metrics else _MISSING for m in metrics),
                f"{row.num_samples:,}",
                words.duration(row.seconds),
            ],
        )
        for row in run.evaluations
    ]
    return titles, lines


def config_lines(runs: Sequence[Run]) -> list[Line]:
    """Return every setting, a column a run, those that differ marked."""
    return _merged([flat_config(run.start) for run in runs])


def version_lines(runs: Sequence[Run]) -> list[Line]:
    return _merged([run.start.versions for run in runs])


def command(run: Run) -> str:
    return shlex.join(run.start.command)


def _merged(columns: Sequence[Mapping[str, str]]) -> list[Line]:
    names = list(dict.fromkeys(name for column in columns for name in column))
    return [_line(name, [column.get(name, _MISSING) for column in columns]) for name in names]


def _line(name: str, cells: list[str]) -> Line:
    return Line(name=name, cells=cells, differs=len(set(cells)) > 1)
