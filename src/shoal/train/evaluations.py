"""Keeps the scores of a run, and compares them with its target and its best."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from shoal import record
from shoal.errors import ShoalError, UsageError
from shoal.train.checkpoint import load_models
from shoal.train.checkpoint_files import checkpoint_path, write_best_step
from shoal.train.config import RunOutputConfig, required
from shoal.train.reporting import RunLog, format_metrics
from shoal.train.stopping import Goal, Score, Scores, Target
from shoal.train.world import World, run_on_all

if TYPE_CHECKING:
    from shoal.train.beside import Beside, Samples


class Evaluations:
    """The scores of a run, and its target. The first worker reads and writes the record.

    Args:
        directory: the run directory; ``None`` for an inner run, which has no record.
        world: the workers.
        target: the scores that end the run, if any.
        best: the best score so far, if the run keeps its best checkpoint.

    Attributes:
        scores: those of the last step, by split.
    """

    def __init__(
        self, directory: Path | None, world: World, target: Target | None, best: Best | None
    ) -> None:
        self._directory, self._world, self._best = directory, world, best
        self._goal = Goal(target) if target is not None else None
        self._beside: Beside | None = None
        self._samples: Samples | None = None
        self.scores: dict[str, Mapping[str, float]] = {}

    def add(self, step: int, split: str, scores: Mapping[str, float]) -> None:
        """Take the scores of a split after ``step``, the last one."""
        self.scores[split] = scores
        if self._best is not None:
            self._best.add(step, self.scores)

    def is_best(self, step: int) -> bool:
        """Return whether ``step`` has the best score so far; false on all workers but the first."""
        return self._best is not None and self._world.is_main and self._best.step == step

    def end_run(self) -> bool:
        """Return whether the scores end the run; false on all workers but the first.

        They have reached the target, or have not become better for as many evaluations as the settings say.
        """
        return self._world.is_main and (self.is_reached() or (self._best is not None and self._best.is_stale))

    def best_step(self, last: int) -> int:
        """Return the step with the best score, or ``last``; name its checkpoint. A collective."""
        step = None if self._best is None else self._best.step

        def name_it() -> int:
            if self._world.is_main:
                write_best_step(required(self._directory), step)
            return last if step is None else step

        return run_on_all(self._world.control, name_it)[0]

    def load_best(self, last: int, kept: Mapping[str, Any], log: RunLog | None) -> int:
        """Load the weights with the best score, if the run keeps them; return their step. A collective.

        Args:
            last: the last step, whose weights stay if there are no better ones.
            kept: the state of the run, whose models are loaded.
        """
        step = self.best_step(last)
        if step == last:
            return last
        try:
            load_weights(checkpoint_path(required(self._directory), step), kept, self._world)
        except ShoalError as error:
            step, note = last, f"{error}; the last weights are the result"
        else:
            note = f"the weights of step {step:,}, which have the best score, are the result"
        if log is not None:
            log.progress.say(note)
        return step

    def is_reached(self) -> bool:
        """Return whether the target is reached; false on all workers but the first."""
        return self._goal is not None and self._world.is_main and self._goal.holds(self.scores)

    def have_reached(self) -> bool:
        """Return whether the target is reached, on all workers. A collective."""
        return self._goal is not None and self._on_main(self.is_reached)

    def read(self, step: int) -> list[record.Row]:
        """Restore from the record what an earlier first worker knew after ``step``; return the rows."""
        rows = record.read_record(required(self._directory))
        self.scores = {split: row.metrics for split, row in self.last(step).items()}
        if self._goal is not None:
            self._goal.read(rows)
        if self._best is not None:
            self._best.read(rows, step)
        return rows

    def has_ended(self, step: int, total: int) -> bool:
        """Return whether an earlier process group has ended the run at ``step``. A collective."""

        def ended() -> bool:
            rows = self.read(step)
            is_ended = any(isinstance(row, record.End) and row.step == step for row in rows)
            return is_ended and (step == total or self.end_run())

        return step > total or self._on_main(ended)

    def lacks(self, step: int, split: str | None) -> bool:
        """Return whether the record has no scores of ``step`` and ``split`` (default: any). A collective."""
        return not self._on_main(lambda: any(split in (None, name) for name in self.last(step)))

    def last(self, step: int) -> dict[str, record.Evaluation]:
        """Return the rows of the record with scores of ``step``, by split."""
        rows = record.read_record(required(self._directory))
        return {row.split: row for row in rows if isinstance(row, record.Evaluation) and row.step == step}

    def _on_main(self, ask: Callable[[], bool]) -> bool:
        """Return the first worker's answer on all workers. A collective."""
        return run_on_all(self._world.control, lambda: self._world.is_main and ask())[0]

    def report_target(self, step: int, log: RunLog | None) -> None:
        """Write once that the target is reached, or at the end that it is not, on the first worker."""
        goal = self._goal
        if goal is None or log is None or goal.row is not None:
            return
        if goal.holds(self.scores):
            log.write(goal.reach(record.read_record(required(self._directory)), step, self.scores))
        else:
            scores = format_metrics(goal.scores_of(self.scores)) or "no such score"
            log.progress.say(f"the target {goal.target} was not reached: {scores}")

    def report_stale(self, log: RunLog | None) -> None:
        """Say that training ends because scores became no better, if it does, on the first worker."""
        if log is not None and self._best is not None and self._best.is_stale:
            log.progress.say(f"training ends: {self._best}")

    def end_of_run(self) -> str:
        """Return that the scores ended the run, in words for the first worker; empty: another reason did."""
        if self._best is not None and self._best.is_stale:
            return f"has ended: {self._best}"
        if self._goal is None or not self.is_reached():
            return ""
        scores = format_metrics(self._goal.scores_of(self.scores))
        return f"has reached its target {self._goal.target} ({scores})"

    def open_beside(self, output: RunOutputConfig, step: int) -> None:
        """Evaluate and compute samples beside training from now on, as far as settings ask. A collective.

        Args:
            output: the settings.
            step: the last step done; weights of later steps, of an earlier process group, are deleted.

        Raises:
            UsageError: another job uses the directory.
        """
        if self._directory is None:
            return
        if output.evaluates_beside and self._beside is None:
            from shoal.train.beside import Beside

            self._beside = Beside(
                self._directory,
                num_workers=output.validation_beside or self._world.ranks.num_local_workers,
                num_hosts=output.validation_hosts,
                world=self._world,
                step=step,
                goal=self._goal,
            )
        if output.samples and self._samples is None:
            from shoal.train.beside import Samples

            self._samples = Samples(self._directory, output.samples, self._world)

    def sample(self, step: int, kept: Mapping[str, Any], log: RunLog | None) -> None:
        """Request the samples of a step, if the run has any. A collective."""
        if self._samples is not None:
            self._samples.ask(step, models_of(kept), log)

    def request(self, step: int, kept: Mapping[str, Any], samples: int) -> bool:
        """Request an evaluation beside training; return false if evaluations run within it. A collective.

        Args:
            step: the step of the weights.
            kept: the state of the run, whose models are evaluated.
            samples: number consumed since the start of the run.
        """
        if self._beside is None:
            return False
        self._beside.ask(step, models_of(kept), samples)
        return True

    def poll(self, log: RunLog | None) -> None:
        """Write the scores and samples that processes beside training have returned. Never blocks."""
        for beside in (self._beside, self._samples):
            if beside is not None:
                beside.poll(log)

    def finish(self, log: RunLog | None) -> None:
        """Wait for the evaluations and the last samples beside training. A collective."""
        for beside in (self._beside, self._samples):
            if beside is not None:
                beside.finish(log)

    def close(self) -> None:
        """Stop what runs beside training; weights to evaluate stay for a later process group."""
        for beside in (self._beside, self._samples):
            if beside is not None:
                beside.close()
        self._beside = self._samples = None


def final_scores(last: Mapping[str, record.Evaluation]) -> dict[str, float]:
    """Return the scores of the last step by name: those of the validation, or of all splits."""
    scores = {
        split: row.metrics for split, row in last.items() if split == "validation" or "validation" not in last
    }
    return {
        name if len(scores) == 1 else f"{split}/{name}": value
        for split, values in scores.items()
        for name, value in values.items()
    }


def as_numbers(metrics: Mapping[str, float | Tensor]) -> dict[str, float]:
    """Return scores as numbers.

    Raises:
        UsageError: a score is not a number.
    """
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[name] = value.item() if hasattr(value, "item") else value  # a tensor, a number of NumPy
            float(numbers[name])
        except (TypeError, ValueError, RuntimeError):
            shape = f" of shape {list(value.shape)}" if isinstance(value, Tensor) else ""
            raise UsageError(
                f"run.evaluation: the score {name!r} is a {type(value).__name__}{shape}; give a number, or a "
                "tensor of one element"
            ) from None
    return numbers


def models_of(kept: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Return the models among the state of a run."""
    return {name: value for name, value in kept.items() if isinstance(value, nn.Module)}


def load_weights(path: Path, kept: Mapping[str, Any], world: World) -> tuple[int, int]:
    """Load the models of a checkpoint into those of a run. A collective.

    Args:
        path: a checkpoint, or a run directory, whose newest checkpoint is loaded.
        kept: the state of the run.

    Returns:
        Step and samples of the checkpoint.

    Raises:
        ShoalError: there is no checkpoint, or it is damaged.
        UsageError: it is of another model.
    """
    step, values = load_models(path, models_of(kept), world.control)
    return step, int(values.get("samples", 0))


# ---- the best score -------------------------------------------------------------------------------------


class Best:
    """Follows the score by which a run keeps its best checkpoint; on the first worker.

    Args:
        score: of which the best value counts.
        patience: evaluations in a row without a better value after which the run ends; 0: any number.
    """

    def __init__(self, score: Score, patience: int = 0) -> None:
        self._score, self._patience = score, patience
        self._values: dict[int, float] = {}

    def add(self, step: int, scores: Scores) -> None:
        """Take the scores of a step; a repeated evaluation replaces the former one."""
        for value in self._score.scores_of(scores).values():
            self._values[step] = value

    def read(self, rows: Sequence[record.Row], last: int) -> None:
        """Take the scores in the record up to step ``last``."""
        for row in rows:
            if isinstance(row, record.Evaluation) and row.step <= last:
                self.add(row.step, {row.split: row.metrics})

    @property
    def step(self) -> int | None:
        """The step with the best value, the first of equal ones; ``None``: there is no finite value."""
        sign = 1 if self._score.rises else -1
        finite = {step: sign * value for step, value in self._values.items() if math.isfinite(value)}
        return max(sorted(finite), key=finite.__getitem__, default=None)

    @property
    def is_stale(self) -> bool:
        """Return whether the patience is exhausted: too many evaluations in a row have not been better."""
        return 0 < self._patience <= self._num_since

    def __str__(self) -> str:
        value = "none" if self.step is None else f"{self._values[self.step]:.4g} of step {self.step:,}"
        return (
            f"the best {self._score} is {value}, and {self._num_since} evaluations in a row were not better"
        )

    @property
    def _num_since(self) -> int:
        return sum(step > (self.step or 0) for step in self._values)
