"""Derives a run's state, process groups, scores and times from its record. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError, UsageError
from shoal.record import (
    PARTS,
    Checkpoint,
    Contributions,
    End,
    Evaluation,
    Phase,
    PipelineStep,
    Reads,
    Resume,
    Row,
    Shares,
    Start,
    Step,
    Stop,
    Target,
    duration_s,
    process_groups,
    read_record,
)

TRAINING = "training"


@dataclass(frozen=True)
class Group:
    """A process group's rows, from its start to the last row that it wrote."""

    rows: Sequence[Row]

    @property
    def start(self) -> Start:
        assert isinstance(self.rows[0], Start)
        return self.rows[0]

    @property
    def stop(self) -> Stop | None:
        return next((row for row in self.rows if isinstance(row, Stop)), None)

    @property
    def seconds(self) -> float:
        return duration_s(self.rows)


@dataclass(frozen=True, kw_only=True)
class Score:
    """The last value of a metric; ``split`` is the held-out part or :data:`TRAINING`."""

    metric: str
    split: str
    value: float
    step: int
    reference: float | None


@dataclass(frozen=True)
class RecordedRun:
    """One run's record; each list is in the order of time."""

    name: str
    path: Path | str
    """Directory of the run, or its location in an object store."""
    rows: Sequence[Row]

    @cached_property
    def groups(self) -> list[Group]:
        return [Group(rows) for rows in process_groups(self.rows)]

    @cached_property
    def steps(self) -> list[Step]:
        return [row for row in self.rows if isinstance(row, Step)]

    @cached_property
    def evaluations(self) -> list[Evaluation]:
        return [row for row in self.rows if isinstance(row, Evaluation)]

    @cached_property
    def checkpoints(self) -> list[Checkpoint]:
        return [row for row in self.rows if isinstance(row, Checkpoint)]

    @cached_property
    def phases(self) -> list[Phase]:
        """Empty for a run with one phase."""
        return [row for row in self.rows if isinstance(row, Phase)]

    @cached_property
    def pipeline_steps(self) -> list[PipelineStep]:
        rows = [row for row in self.rows if isinstance(row, PipelineStep)]
        return [row for row in rows if row.predicted or row.traced]

    @property
    def start(self) -> Start:
        """Start of the newest process group."""
        return self.groups[-1].start

    @property
    def last_step(self) -> int:
        return max((row.step for row in self.rows if not isinstance(row, Start | Phase | Shares)), default=0)

    @cached_property
    def shares(self) -> list[Shares]:
        """Empty for a run with equal shares."""
        return [row for row in self.rows if isinstance(row, Shares)]

    @cached_property
    def contributions(self) -> list[Contributions]:
        """Empty for a run whose steps wait for all workers."""
        return [row for row in self.rows if isinstance(row, Contributions)]

    @cached_property
    def reads(self) -> list[Reads]:
        """The last such row of each process group; empty for a run without a cache of its data."""
        groups = [[row for row in group.rows if isinstance(row, Reads)] for group in self.groups]
        return [rows[-1] for rows in groups if rows]

    @property
    def state(self) -> str:
        """``finished``, ``stopped``, or ``open`` (running or killed)."""
        if any(isinstance(row, End) for row in self.groups[-1].rows):
            return "finished"
        return "stopped" if self.groups[-1].stop else "open"

    @property
    def seconds(self) -> float:
        """Total time of the process groups, without the pauses between them."""
        return duration_s(self.rows)

    @property
    def target(self) -> Target | None:
        """The row of the scores up to which the run was to train, once it has them."""
        return next((row for row in reversed(self.rows) if isinstance(row, Target)), None)

    @property
    def num_skipped(self) -> int:
        return sum(step.num_skipped for step in self.steps)

    @property
    def peak_memory_bytes(self) -> int:
        return max((step.peak_memory_bytes for step in self.steps), default=0)


Read = Callable[[Any], list[Row]]
"""Returns the rows of a run by its path."""


def load_runs(paths: Sequence[Path | str], read: Read = read_record) -> list[RecordedRun]:
    """Read the records of several runs; runs of the same name get their directories as suffix.

    Args:
        paths: directories of runs, or their locations elsewhere.
        read: reads a record.

    Raises:
        ShoalError: a directory has no readable record, or a record without a start.
    """
    records = [(path, read(path)) for path in paths]
    names: list[str] = []
    for path, rows in records:
        first = next((row for row in rows if isinstance(row, Start)), None)
        if first is None:
            raise ShoalError(f"the record in {path} has no start: nothing has been trained there yet")
        names.append(first.run)
    return [
        RecordedRun(f"{name} ({path})" if names.count(name) > 1 else name, path, rows)
        for name, (path, rows) in zip(names, records, strict=True)
    ]


def steps_per_row(run: RecordedRun) -> list[int]:
    """Return the number of optimizer steps that each :class:`Step` row averages."""
    numbers: list[int] = []
    before = 0
    for row in run.rows:
        if isinstance(row, Resume):
            before = max(before, row.step)
        elif isinstance(row, Step):
            numbers.append(max(1, row.step - before))
            before = row.step
    return numbers


def mean_step_s(run: RecordedRun) -> float:
    """Return the mean seconds per optimizer step over the whole run; 0 without any."""
    return _mean([step.step_s for step in run.steps], steps_per_row(run))


def mean_rate(run: RecordedRun) -> float:
    """Return samples per second over the whole run; 0 without any step."""
    seconds = [weight * step.step_s for weight, step in zip(steps_per_row(run), run.steps, strict=True)]
    return _mean([step.samples_per_s for step in run.steps], seconds)


def mean_parts_s(run: RecordedRun) -> dict[str, float]:
    """Return seconds per step in each part over the whole run; unknown parts come last."""
    weights = steps_per_row(run)
    names = [*PARTS, *sorted({name for step in run.steps for name in step.parts_s} - set(PARTS))]
    return {name: _mean([step.parts_s.get(name, 0.0) for step in run.steps], weights) for name in names}


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    pairs = [(v, w) for v, w in zip(values, weights, strict=True) if math.isfinite(v) and math.isfinite(w)]
    total = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / total if total else 0.0


def metric_names(runs: Sequence[RecordedRun]) -> list[str]:
    """Return every metric of the runs' steps and evaluations, ``loss`` first, else in order of appearance."""
    rows = [row for run in runs for row in run.rows if isinstance(row, Step | Evaluation)]
    return list(dict.fromkeys(["loss", *(name for row in rows for name in row.metrics)]))


def final_scores(run: RecordedRun) -> list[Score]:
    """Return the last held-out value of each metric and split; without evaluations, the last step's."""
    values = [(row.split, row.step, row.metrics) for row in run.evaluations]
    if not values and run.steps:
        last = run.steps[-1]
        values = [(TRAINING, last.step, {"loss": last.loss, **last.metrics})]
    scores = {
        (metric, split): Score(
            metric=metric, split=split, value=value, step=step, reference=run.start.references.get(metric)
        )
        for split, step, metrics in values
        for metric, value in metrics.items()
    }
    return list(scores.values())


def flat_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return a configuration as ``section.field`` -> value, in its own order."""
    flat: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, dict) and value:
            flat |= flat_config(value, f"{prefix}{name}.")
        elif isinstance(value, list | dict):
            flat[prefix + name] = ", ".join(map(str, value)) or "(empty)"
        else:
            flat[prefix + name] = str(value).lower() if isinstance(value, bool | None) else str(value)
    return flat


def recorded_step(run_dir: Path, step: int | None = None) -> PipelineStep:
    """Return the pipeline's timeline of a run's step, by default of the last one recorded.

    Raises:
        UsageError: the run has none, or not for that step.
        ShoalError: there is no record.
    """
    rows = {row.step: row for row in read_record(run_dir) if isinstance(row, PipelineStep)}
    if not rows:
        raise UsageError(
            f"the record of {run_dir} has no step of a pipeline: only runs with --parallel.pipeline 2 or "
            "more have one"
        )
    if step is None:
        step = max(rows)
    if step not in rows:
        known = ", ".join(f"{number:,}" for number in rows)
        raise UsageError(f"--step {step} was not recorded in {run_dir}; these were: {known}")
    return rows[step]
