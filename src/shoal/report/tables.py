"""Fills the tables of a page: plain rows of text for the template."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from shoal import formatting
from shoal.record import (
    Checkpoint,
    Contributions,
    End,
    Evaluation,
    Members,
    Phase,
    PipelineStep,
    Resume,
    Row,
    Samples,
    Shares,
    Start,
    Step,
    Stop,
    Target,
)
from shoal.report import plots
from shoal.report.runs import (
    RecordedRun,
    Score,
    final_scores,
    flat_config,
    mean_parts_s,
    mean_rate,
    mean_step_s,
)

MAX_EVENTS = 400
"""Maximum rows of the event table; of a longer one the middle is left out."""
SAMPLE_CELL = 1_000
"""Most characters of a value of a sample."""

_EACH_STEP = "all, in each step"
_MISSING = "–"
_SETTINGS = {"recipe", "global batch", "world", "backend", "device, precision", "parameters"}
_STATES = {"finished": "finished", "stopped": "stopped", "open": "running or killed"}


class Tile(NamedTuple):
    """A large figure at the head of the page; ``tone`` is good, warn or plain."""

    label: str
    value: str
    notes: Sequence[str] = ()
    tone: str = "plain"
    fraction: float | None = None
    """Fraction of a progress bar, 0 to 1; ``None`` for no bar."""


class TableRow(NamedTuple):
    """A row: a name and a cell per column; ``differs`` if the runs' cells differ."""

    name: str
    cells: Sequence[str]
    differs: bool = False


class Segment(NamedTuple):
    """A part of a run's mean step; ``width`` is a percentage of the slowest run's step."""

    colour: str
    title: str
    time: str
    share: str
    width: float


class EventRow(NamedTuple):
    """A row of the event table."""

    when: str
    kind: str
    step: str = ""
    detail: str = ""
    tone: str = "plain"
    size: str = ""
    blocked: str = ""
    written: str = ""


def tiles(run: RecordedRun) -> list[Tile]:
    """Return the main figures of a run: progress, time, throughput, last scores."""
    total, done = run.start.total_steps, run.last_step
    notes = [f"of {total:,}", *([f"{run.num_skipped:,} skipped"] if run.num_skipped else [])]
    if run.state == "finished" or not run.steps:
        time_note = formatting.plural(len(run.groups), "process group")
    else:
        time_note = f"{formatting.duration(max(0, total - done) * mean_step_s(run))} to go at this pace"
    pace = f"{formatting.milliseconds(mean_step_s(run))} per step" if run.steps else "no step recorded yet"
    return [
        Tile("Steps", f"{done:,}", notes, fraction=min(1.0, done / total) if total else None),
        Tile("Training time", formatting.duration(run.seconds), [time_note]),
        Tile("Throughput", _rate(run), [pace]),
        *([_target_tile(run.target)] if run.target else []),
        *map(_score_tile, final_scores(run)),
    ]


def _rate(run: RecordedRun) -> str:
    return formatting.rate(mean_rate(run), run.start.unit) if mean_rate(run) else _MISSING


def _score_tile(score: Score) -> Tile:
    notes, tone = [f"{score.split}, step {score.step:,}"], "plain"
    if not math.isfinite(score.value):
        tone = "warn"
    elif score.reference is not None:
        fraction = formatting.is_fraction(score.metric)
        away = abs(score.value - score.reference)
        amount = f"{100 * away:.1f} points" if fraction else f"{away:.2f}"
        side = "below" if score.value < score.reference else "above"
        notes.append(f"{amount} {side} {formatting.reference_title(score.metric)}")
        better = score.value > score.reference if fraction else score.value < score.reference
        tone = "good" if better else "warn"
    value = formatting.score(score.metric, score.value)
    return Tile(formatting.metric_title(score.metric), value, notes, tone)


def _target_tile(row: Target) -> Tile:
    notes = [f"{formatting.duration(row.seconds - row.evaluation_s)} without evaluation", row.until]
    return Tile("Time to target", formatting.duration(row.seconds), notes, "good")


def time_to_target(run: RecordedRun) -> str:
    """Return the time to the target's scores, with and without evaluations, and the target."""
    if run.target is None:
        until = run.start.config.get("run", {}).get("until")
        return f"{until}: not reached" if until else _MISSING
    whole, pure = run.target.seconds, run.target.seconds - run.target.evaluation_s
    times = f"{formatting.duration(whole)} ({formatting.duration(pure)} without evaluation)"
    return f"{times}, at step {run.target.step:,}: {run.target.until}"


def state_text(run: RecordedRun) -> str:
    """Return the state of the run, with the reason of a stop."""
    stop = run.groups[-1].stop if run.state == "stopped" else None
    return _STATES[run.state] + (f": {stop.reason}" if stop else "")


def facts(runs: Sequence[RecordedRun]) -> list[TableRow]:
    """Return the summary table, a column per run; settings that differ are marked."""
    several_worlds = len({run.start.num_workers for run in runs}) > 1
    rows: list[tuple[str, Callable[[RecordedRun], str]]] = [
        ("state", state_text),
        ("recipe", lambda run: run.start.recipe),
        ("started (UTC)", lambda run: formatting.moment(run.groups[0].start.time_s)),
        ("last row (UTC)", lambda run: formatting.moment(run.rows[-1].time_s)),
        ("training time", lambda run: formatting.duration(run.seconds)),
        ("time to target", time_to_target),
        ("steps", lambda run: f"{run.last_step:,} of {run.start.total_steps:,}"),
        ("samples", lambda run: f"{run.steps[-1].samples:,}" if run.steps else _MISSING),
        ("throughput", _rate),
        ("step time", lambda run: formatting.milliseconds(mean_step_s(run)) if run.steps else _MISSING),
        *([("scaling efficiency", lambda run: efficiency(runs, run))] if several_worlds else []),
        ("global batch", global_batches),
        *([("shares of the workers", shares)] if any(run.shares for run in runs) else []),
        *([("contributions", contributions)] if any(map(_is_loose, runs)) else []),
        *([("data read", reads)] if any(run.reads for run in runs) else []),
        ("world", lambda run: world(run.start)),
        ("backend", lambda run: _backend(run.start)),
        ("device, precision", lambda run: f"{run.start.device}, {run.start.precision}"),
        ("parameters", lambda run: formatting.count(run.start.num_parameters)),
        (
            "peak memory",
            lambda run: formatting.size(run.peak_memory_bytes) if run.peak_memory_bytes else _MISSING,
        ),
        *(_PLANNED if any(run.start.planned for run in runs) else []),
        ("skipped steps", skipped),
        (
            "checkpoints, resumes",
            lambda run: f"{len(run.checkpoints):,}, {sum(isinstance(row, Resume) for row in run.rows):,}",
        ),
    ]
    lines = [_line(name, [cell(run) for run in runs]) for name, cell in rows]
    return [
        *(line._replace(differs=line.differs and line.name in _SETTINGS) for line in lines),
        *_score_lines(runs),
    ]


def beside_plan(run: RecordedRun, figure: str, measured: float | None, text: Callable[[float], str]) -> str:
    """Return a planned figure, and how much more or less was measured."""
    planned = run.start.planned.get(figure)
    if planned is None:
        return _MISSING
    if not measured:
        return text(planned)
    percent = 100 * (measured / planned - 1)
    side = "less" if percent < 0 else "more"
    return f"{text(planned)}; measured {text(measured)}, {abs(percent):.1f} % {side}"


def planned_memory(run: RecordedRun) -> str:
    """Return the planned memory of a device's tensors; on CPUs only the memory of the process is measured."""
    if not run.start.device.startswith("CPU"):
        return beside_plan(run, "memory_bytes", run.peak_memory_bytes, formatting.size)
    planned = beside_plan(run, "memory_bytes", None, formatting.size)
    if planned == _MISSING or not run.peak_memory_bytes:
        return planned
    return f"{planned} of tensors; measured {formatting.size(run.peak_memory_bytes)} of the whole process"


def planned_seconds(run: RecordedRun) -> str:
    """Return the planned time of the whole run; beside it the measured time, once all its steps are done."""
    planned = run.start.planned.get("num_steps")
    if planned is not None and planned != run.start.total_steps:
        return f"{formatting.duration(run.start.planned['total_s'])} for {planned:,} steps"
    measured = run.seconds if run.state == "finished" else None
    return beside_plan(run, "total_s", measured, formatting.duration)


def planned_cost(run: RecordedRun) -> str:
    """Return the planned cost, and that of the time so far at the same prices."""
    rate = run.start.planned.get("dollars_per_h")
    if rate is None:
        return _MISSING
    planned, so_far = (rate * seconds / 3600 for seconds in (run.start.planned["total_s"], run.seconds))
    return f"{planned:,.2f} dollars; {so_far:,.2f} so far"


_PLANNED: list[tuple[str, Callable[[RecordedRun], str]]] = [
    ("plan for", lambda run: run.start.planned.get("cluster", _MISSING)),
    (
        "planned step",
        lambda run: beside_plan(run, "step_s", mean_step_s(run), formatting.milliseconds),
    ),
    (
        "planned throughput",
        lambda run: beside_plan(
            run, "samples_per_s", mean_rate(run), lambda rate: formatting.rate(rate, run.start.unit)
        ),
    ),
    ("planned memory", planned_memory),
    ("planned time", planned_seconds),
    ("planned cost", planned_cost),
]


def _score_lines(runs: Sequence[RecordedRun]) -> list[TableRow]:
    columns = [
        {(s.metric, s.split): formatting.score(s.metric, s.value) for s in final_scores(r)} for r in runs
    ]
    return [
        TableRow(
            f"{formatting.metric_title(metric)} ({split})",
            [c.get((metric, split), _MISSING) for c in columns],
        )
        for metric, split in dict.fromkeys(key for column in columns for key in column)
    ]


def global_batches(run: RecordedRun) -> str:
    """Return the arithmetic of the global batch, per phase if there are several."""
    if len(run.phases) < 2:
        return batch_arithmetic(run.start)
    return "; ".join(f"{phase.name}: {phase_text(phase, run.start.num_workers)}" for phase in run.phases)


def phase_text(phase: Phase, num_workers: int) -> str:
    """Return ``steps 1 to 900, 128 tokens per sequence, 256 = 32 × 2 workers × 4 accumulation``."""
    return (
        f"steps {phase.step:,} to {phase.last_step:,}, {phase.sequence_length:,} tokens per sequence, "
        f"{batch_arithmetic(phase, num_workers)}"
    )


def batch_arithmetic(row: Start | Phase, num_workers: int = 0) -> str:
    """Return ``256 = 32 × 2 workers × 4 accumulation``; ≤ instead of = if the batch does not divide."""
    workers = row.num_workers if isinstance(row, Start) else num_workers
    product = row.micro_batch_size * workers * row.accumulation_steps
    sign = "=" if product == row.global_batch_size else "≤"
    return (
        f"{row.global_batch_size:,} {sign} {row.micro_batch_size:,} × "
        f"{formatting.plural(workers, 'worker')} × {row.accumulation_steps:,} accumulation"
    )


def shares(run: RecordedRun) -> str:
    """Return ``69 × 2, 68 × 5, 34 samples since step 11 (1 change)``."""
    if not run.shares:
        return "equal"
    last = run.shares[-1]
    return f"{last} samples since step {last.step:,} ({formatting.plural(len(run.shares), 'change')})"


def reads(run: RecordedRun) -> str:
    """Return ``1.2 GB from memory, 0.9 GB from other hosts, 0.1 GB from storage; each host keeps all``."""
    if not run.reads:
        return _MISSING
    totals = {
        "memory": sum(row.memory_bytes for row in run.reads),
        "other hosts": sum(row.peer_bytes for row in run.reads),
        "storage": sum(row.storage_bytes for row in run.reads),
    }
    text = ", ".join(f"{formatting.size(count)} from {origin}" for origin, count in totals.items())
    kept = {"all": "all", "own": "its part", "window": "what fits"}.get(run.reads[-1].policy)
    text += f"; each host keeps {kept}" if kept else ""
    failures = sum(row.peer_failures for row in run.reads)
    text += f"; {formatting.plural(failures, 'failure')} of other hosts" if failures else ""
    without = sum(row.without_room for row in run.reads)
    return f"{text}; {formatting.plural(without, 'shard')} without room" if without else text


def contributions(run: RecordedRun) -> str:
    """Return ``95 % of the gradients used (worker 2: 80 %), staleness 0 to 2, mean 0.4``."""
    if not run.contributions:
        return _exchanges(run)
    workers = max(len(row.used) for row in run.contributions)
    used, dropped = [0] * workers, [0] * workers
    staleness: list[int] = []
    for row in run.contributions:
        for total, counts in ((used, row.used), (dropped, row.dropped), (staleness, row.staleness)):
            total.extend([0] * (len(counts) - len(total)))
            for index, count in enumerate(counts):
                total[index] += count
    parts = [u / max(u + d, 1) for u, d in zip(used, dropped, strict=True)]
    least = min(range(workers), key=parts.__getitem__)
    of_least = f" (worker {least}: {formatting.percent(parts[least])})" if sum(dropped) else ""
    mean = sum(each * count for each, count in enumerate(staleness)) / max(sum(used), 1)
    most = max(len(staleness) - 1, 0)
    of_all = formatting.percent(sum(used) / max(sum(used) + sum(dropped), 1))
    return f"{of_all} of the gradients used{of_least}, staleness 0 to {most}, mean {mean:.2f}"


def _is_loose(run: RecordedRun) -> bool:
    """Return whether the steps of a run are not those of all workers together."""
    return bool(run.contributions) or _exchanges(run) != _EACH_STEP


def _exchanges(run: RecordedRun) -> str:
    """Return ``all, once in 20 steps, in 4 fragments, 2 steps late``, if there are local steps."""
    servers: Mapping[str, Any] = run.start.config.get("servers") or {}
    every = servers.get("local_steps")
    if every is None:
        return _EACH_STEP
    fragments, delay = servers.get("fragments", 1), servers.get("delay", 0)
    parts = f", in {fragments} fragments" * (fragments > 1) + f", {formatting.plural(delay, 'step')} late" * (
        delay > 0
    )
    return f"all, once in {every} steps{parts}"


def world(start: Start) -> str:
    return f"{formatting.plural(start.num_workers, 'worker')} on {formatting.plural(start.num_hosts, 'host')}"


def skipped(run: RecordedRun) -> str:
    """Return the number of steps skipped because of overflow, and the steps that reported them."""
    steps = [step.step for step in run.steps if step.num_skipped]
    return f"{run.num_skipped:,} (reported at step {formatting.ranges(steps)})" if steps else "none"


def efficiency(runs: Sequence[RecordedRun], run: RecordedRun) -> str:
    """Return a run's rate per worker, relative to the run of the same recipe with the fewest workers."""
    same = [other for other in runs if other.start.recipe == run.start.recipe and other.steps]
    base = min(same, key=lambda other: other.start.num_workers, default=run)
    if not run.steps or base.start.num_workers == run.start.num_workers:
        return _MISSING
    share = (mean_rate(run) / run.start.num_workers) / (mean_rate(base) / base.start.num_workers)
    return f"{formatting.percent(share)} (from {formatting.plural(base.start.num_workers, 'worker')})"


def step_shares(runs: Sequence[RecordedRun]) -> list[list[Segment]]:
    """Return the parts of the mean step of each run; the bars share one scale and the parts' colours."""
    parts = [mean_parts_s(run) for run in runs]
    longest = max((sum(seconds.values()) for seconds in parts), default=0.0)
    colours = {
        name: plots.css_colour(plots.part_colour(index))
        for index, name in enumerate(dict.fromkeys(name for seconds in parts for name in seconds))
    }
    return [_segments(seconds, longest, colours) for seconds in parts]


def _segments(seconds: Mapping[str, float], longest: float, colours: Mapping[str, str]) -> list[Segment]:
    total = sum(seconds.values())
    return [
        Segment(
            colour=colours[name],
            title=name.replace("_", " "),
            time=formatting.milliseconds(value) if total else _MISSING,
            share=formatting.percent(value / total) if total else _MISSING,
            width=100 * value / longest if longest else 0.0,
        )
        for name, value in seconds.items()
    ]


def part_rows(shares: Sequence[Sequence[Segment]]) -> list[list[Segment | None]]:
    """Return a row for each part of the steps: its segment of each run, or ``None`` where it has none."""
    titles = dict.fromkeys(segment.title for run in shares for segment in run)
    by_title = [{segment.title: segment for segment in run} for run in shares]
    return [[segments.get(title) for segments in by_title] for title in titles]


def step_totals(runs: Sequence[RecordedRun]) -> list[str]:
    return [formatting.milliseconds(sum(mean_parts_s(r).values())) if r.steps else _MISSING for r in runs]


def events(run: RecordedRun) -> list[EventRow]:
    """Return the events of a run, oldest first: starts, checkpoints, resumes, stops, the end."""
    figures = Step | Contributions | Evaluation | Samples | PipelineStep
    listed = [_event(row) for row in run.rows if not isinstance(row, figures)]
    if len(listed) <= MAX_EVENTS:
        return listed
    half = MAX_EVENTS // 2
    left_out = EventRow("", "…", detail=f"{len(listed) - 2 * half:,} rows left out")
    return [*listed[:half], left_out, *listed[-half:]]


def _backend(start: Start) -> str:
    """Return the backend with its reason, which records before 27 November 2026 do not have."""
    return f"{start.backend} ({start.backend_reason})" if start.backend_reason else start.backend


def _event(row: Row) -> EventRow:
    when = formatting.moment(row.time_s)
    if isinstance(row, Start):
        detail = f"{world(row)}, {row.device}, {row.precision}, {_backend(row)} · {batch_arithmetic(row)}"
        return EventRow(when, row.kind, detail=detail)
    event = EventRow(when, row.kind, f"{row.step:,}")
    match row:
        case Phase():
            return event._replace(
                detail=f"{row.name}: to step {row.last_step:,}, {row.global_batch_size:,} sequences per step "
                f"of {row.sequence_length:,} tokens"
            )
        case Shares():
            return event._replace(detail=f"{row} samples for the workers, by rank")
        case Members():
            detail = f"{row.num_before} workers before, {row.num_workers} from here on"
            return event._replace(tone="warn" if row.num_workers < row.num_before else "plain", detail=detail)
        case Checkpoint():
            return event._replace(
                detail=row.path,
                size=formatting.size(row.num_bytes),
                blocked=formatting.milliseconds(row.blocked_s),
                written=formatting.milliseconds(row.written_s),
            )
        case Resume():
            passed = f"; passed over: {'; '.join(row.damaged)}" if row.damaged else ""
            return event._replace(tone="warn", detail=f"from {row.path}{passed}")
        case Target():
            return event._replace(tone="good", detail=f"{row.until} after {formatting.duration(row.seconds)}")
        case Stop():
            return event._replace(tone="warn", detail=f"{row.reason} (exit code {row.exit_code})")
        case End():
            detail = f"training loop took {formatting.duration(row.seconds)}"
            return event._replace(tone="good", detail=detail)
    return event


def scores(run: RecordedRun) -> tuple[list[str], list[TableRow]]:
    """Return the held-out scores: column titles, and a line per evaluation."""
    metrics = list(dict.fromkeys(metric for row in run.evaluations for metric in row.metrics))
    titles = ["split", *map(formatting.metric_title, metrics), "samples", "time"]
    lines = []
    for row in run.evaluations:
        values = [formatting.score(m, row.metrics[m]) if m in row.metrics else _MISSING for m in metrics]
        cells = [row.split, *values, f"{row.num_samples:,}", formatting.duration(row.seconds)]
        lines.append(TableRow(f"{row.step:,}", cells))
    return titles, lines


def samples(run: RecordedRun) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return the steps with samples, the newest first: its number, column titles, and the rows."""
    rows = [row for row in run.rows if isinstance(row, Samples)]
    return [(f"{row.step:,}", *row.cells(SAMPLE_CELL)) for row in reversed(rows)]


def config_lines(runs: Sequence[RecordedRun]) -> list[TableRow]:
    """Return every setting, a column per run; those that differ are marked."""
    return _merged([flat_config(run.start.config) for run in runs])


def version_lines(runs: Sequence[RecordedRun]) -> list[TableRow]:
    return _merged([run.start.versions for run in runs])


def command(run: RecordedRun) -> str:
    return shlex.join(run.start.command)


def _merged(columns: Sequence[Mapping[str, str]]) -> list[TableRow]:
    names = list(dict.fromkeys(name for column in columns for name in column))
    return [_line(name, [column.get(name, _MISSING) for column in columns]) for name in names]


def _line(name: str, cells: list[str]) -> TableRow:
    return TableRow(name, cells, differs=len(set(cells)) > 1)
