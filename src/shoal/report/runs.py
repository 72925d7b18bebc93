"""What happened in a run, from its record: state, process groups, scores, where the time went."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ShoalError
from shoal.record import (
    PARTS,
    Checkpoint,
    End,
    Evaluation,
    Phase,
    Resume,
    Row,
    Start,
    Step,
    Stop,
    read_record,
)

TRAINING = "training"


@dataclass(frozen=True, kw_only=True)
class Group:
    """The time from one start of a process group to the last row that it left."""

    start: Start
    resume: Resume | None
    stop: Stop | None
    end: End | None
    last_time_s: float

    @property
    def seconds(self) -> float:
        return max(0.0, self.last_time_s - self.start.time_s)


@dataclass(frozen=True, kw_only=True)
class Score:
    """The last value of a metric; ``split`` is the held-out part or :data:`TRAINING`."""

    metric: str
    split: str
    value: float
    step: int
    reference: float | None


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run's record, sorted by kind; each list is in the order of time."""

    name: str
    path: Path
    rows: Sequence[Row]
    groups: Sequence[Group]
    steps: Sequence[Step]
    evaluations: Sequence[Evaluation]
    checkpoints: Sequence[Checkpoint]
    phases: Sequence[Phase]
    """Empty for a run that has one phase."""

    @property
    def start(self) -> Start:
        """How the newest process group was started."""
        return self.groups[-1].start

    @property
    def last_step(self) -> int:
        return max((row.step for row in self.rows if not isinstance(row, Start | Phase)), default=0)

    @property
    def state(self) -> str:
        """``finished``, ``stopped``, or ``open`` (running, or killed without a word)."""
        if self.groups[-1].end:
            return "finished"
        return "stopped" if self.groups[-1].stop else "open"

    @property
    def seconds(self) -> float:
        """Time under way, the pauses between process groups left out."""
        return sum(group.seconds for group in self.groups)

    @property
    def num_skipped(self) -> int:
        return sum(step.num_skipped for step in self.steps)

    @property
    def peak_memory_bytes(self) -> int:
        return max((step.peak_memory_bytes for step in self.steps), default=0)


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the records of several runs; runs of one name are told apart by their directories.

    Raises:
        ShoalError: a directory holds no readable record, or a record without a start.
    """
    records = [(path, read_record(path)) for path in paths]
    names: list[str] = []
    for path, rows in records:
        first = next((row for row in rows if isinstance(row, Start)), None)
        if first is None:
            raise ShoalError(f"the record in {path} has no start: nothing has been trained there yet")
        names.append(first.run)
    unique = [
        f"{name} ({path})" if names.count(name) > 1 else name
        for name, (path, _) in zip(names, records, strict=True)
    ]
    return [_run(name, path, rows) for name, (path, rows) in zip(unique, records, strict=True)]


def _run(name: str, path: Path, rows: Sequence[Row]) -> Run:
    return Run(
        name=name,
        path=path,
        rows=rows,
        groups=_groups(rows),
        steps=[row for row in rows if isinstance(row, Step)],
        evaluations=[row for row in rows if isinstance(row, Evaluation)],
        checkpoints=[row for row in rows if isinstance(row, Checkpoint)],
        phases=[row for row in rows if isinstance(row, Phase)],
    )


def _groups(rows: Sequence[Row]) -> list[Group]:
    begins = [index for index, row in enumerate(rows) if isinstance(row, Start)]
    groups: list[Group] = []
    for begin, after in zip(begins, [*begins[1:], len(rows)], strict=True):
        own = rows[begin:after]
        start = own[0]
        assert isinstance(start, Start)
        groups.append(
            Group(
                start=start,
                resume=next((row for row in own if isinstance(row, Resume)), None),
                stop=next((row for row in own if isinstance(row, Stop)), None),
                end=next((row for row in own if isinstance(row, End)), None),
                last_time_s=max(row.time_s for row in own),
            )
        )
    return groups


def steps_per_row(run: Run) -> list[int]:
    """Return how many optimizer steps each :class:`Step` row is the average of."""
    numbers: list[int] = []
    before = 0
    for row in run.rows:
        if isinstance(row, Resume):
            before = max(before, row.step)
        elif isinstance(row, Step):
            numbers.append(max(1, row.step - before))
            before = row.step
    return numbers


def mean_step_s(run: Run) -> float:
    """Return the average time of an optimizer step over the whole run, in seconds; 0 without any."""
    weights = steps_per_row(run)
    return _mean([step.step_s for step in run.steps], weights)


def mean_rate(run: Run) -> float:
    """Return samples a second over the whole run; 0 without any step."""
    weights = steps_per_row(run)
    seconds = [weight * step.step_s for weight, step in zip(weights, run.steps, strict=True)]
    return _mean([step.samples_per_s for step in run.steps], seconds)


def mean_parts_s(run: Run) -> dict[str, float]:
    """Return seconds a step in each part, over the whole run; parts that a newer version adds come last."""
    weights = steps_per_row(run)
    names = [*PARTS, *sorted({name for step in run.steps for name in step.parts_s} - set(PARTS))]
    return {name: _mean([step.parts_s.get(name, 0.0) for step in run.steps], weights) for name in names}


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    pairs = [(v, w) for v, w in zip(values, weights, strict=True) if math.isfinite(v) and math.isfinite(w)]
    total = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / total if total else 0.0


def metric_names(runs: Sequence[Run]) -> list[str]:
    """Return every metric of the runs' steps and evaluations, ``loss`` first, else as they appear."""
    names: dict[str, None] = {"loss": None}
    for run in runs:
        for row in run.rows:
            if isinstance(row, Step | Evaluation):
                names.update(dict.fromkeys(row.metrics))
    return list(names)


def final_scores(run: Run) -> list[Score]:
    """Return the last held-out value of each metric and split; without any evaluation, the last step's."""
    found: dict[tuple[str, str], Score] = {}
    references = run.start.references
    for row in run.evaluations:
        for metric, value in row.metrics.items():
            found[metric, row.split] = Score(
                metric=metric,
                split=row.split,
                value=value,
                step=row.step,
                reference=references.get(metric),
            )
    if not found and run.steps:
        last = run.steps[-1]
        for metric, value in {"loss": last.loss, **last.metrics}.items():
            found[metric, TRAINING] = Score(
                metric=metric,
                split=TRAINING,
                value=value,
                step=last.step,
                reference=references.get(metric),
            )
    return list(found.values())


def flat_config(start: Start) -> dict[str, str]:
    """Return a configuration as ``section.field`` -> value, in its own order."""
    flat: dict[str, str] = {}

    def walk(prefix: str, value: object) -> None:
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                walk(f"{prefix}.{name}" if prefix else str(name), inner)
        elif value is None:
            flat[prefix] = "none"
        elif isinstance(value, bool):
            flat[prefix] = str(value).lower()
        elif isinstance(value, list):
            flat[prefix] = ", ".join(map(str, value)) or "(empty)"
        else:
            flat[prefix] = "(empty)" if value == {} else str(value)

    walk("", start.config)
    return flat
