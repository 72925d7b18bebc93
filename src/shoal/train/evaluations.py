"""Keeps the scores of a run, compares them with its target and its best, and evaluates beside training.

Beside training, evaluations run in processes of their own, on the first worker's host:

1. When an evaluation is due, all workers save the weights, without the optimizer's state, as a checkpoint in
   the folder ``beside`` of the run. Training continues as soon as they are copied.
2. The first worker starts ``shoal evaluate checkpoint`` on one checkpoint after the other: the recipe itself,
   which loads the weights and scores them, with a record of its own.
3. Between two steps the first worker checks whether it has ended, and writes the scores into the run's
   record, under the step of the weights. It deletes the weights, unless their scores end the run.
4. A run that ends waits for pending evaluations. One that continues evaluates the remaining weights.

Samples (:mod:`shoal.train.samples`) are computed beside training as well, wherever the scores are.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shoal import record
from shoal.errors import ShoalError, UsageError
from shoal.train.checkpoint import Checkpointer, load_models
from shoal.train.checkpoint_files import (
    checkpoint_path,
    is_checkpoint,
    list_checkpoints,
    remove_checkpoint,
    step_of,
    write_best_step,
)
from shoal.train.config import RunOutputConfig, required
from shoal.train.evaluation_host import FOLDER, SILENT_S, OtherHosts, scores_folder
from shoal.train.reporting import RunLog, format_metrics
from shoal.train.samples import Samples
from shoal.train.side_process import end_command, start_command
from shoal.train.stopping import Score, Scores, Target
from shoal.train.world import World, run_on_all

LOG = "log.txt"
"""File in it: the output of the evaluations."""

_NICE = 10
"""Priority of an evaluation below that of training."""
_POLL_S = 0.1
_ALL = 1_000_000


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
        if output.evaluates_beside and self._directory is not None and self._beside is None:
            self._beside = Beside(
                self._directory,
                num_workers=output.validation_beside or self._world.ranks.num_local_workers,
                num_hosts=output.validation_hosts,
                world=self._world,
                step=step,
                goal=self._goal,
            )
        if output.samples and self._directory is not None and self._samples is None:
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
        self._beside.ask(step, kept, samples)
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


# ---- the target -----------------------------------------------------------------------------------------


class Goal:
    """Compares scores with the target of a run; on the first worker.

    Attributes:
        target: the scores that end the run.
        row: its row in the record, once the target is reached.
        reached: step and scores of the first weights that an evaluation beside training scored high enough.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.row: record.Target | None = None
        self.reached: tuple[int, Scores] | None = None

    def read(self, rows: Sequence[record.Row]) -> None:
        """Restore the row that an earlier process group wrote about this target."""
        rows_of_it = (row for row in rows if isinstance(row, record.Target) and row.until == str(self.target))
        self.row = next(rows_of_it, None)

    def holds(self, scores: Scores) -> bool:
        """Return whether the target is reached: before, or by the scores of the last step."""
        return self.row is not None or self.reached is not None or self.target.holds(scores)

    def offer(self, step: int, scores: Scores) -> bool:
        """Return whether the scores of an earlier step reach the target; if so, keep them."""
        if not self.target.holds(scores):
            return False
        self.reached = (step, scores)
        return True

    def scores_of(self, scores: Scores) -> dict[str, float]:
        """Return the scores that reached the target, or else those of the last step."""
        if self.row is not None:
            return self.row.metrics
        return self.target.scores_of(self.reached[1] if self.reached else scores)

    def reach(self, rows: Sequence[record.Row], step: int, scores: Scores) -> record.Target:
        """Return the row of the target, for the record.

        Args:
            rows: the record.
            step: the last step.
            scores: its scores.
        """
        step = self.reached[0] if self.reached else step
        self.row = record.target_row(rows, step, str(self.target), self.scores_of(scores))
        return self.row


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


# ---- beside training ------------------------------------------------------------------------------------


class Beside:
    """Evaluations beside training. All workers construct it together; the first one starts the processes.

    Args:
        directory: of the run.
        num_workers: processes of an evaluation on this host.
        num_hosts: hosts that evaluate instead, as long as they give signs of life.
        world: the workers of the training.
        step: the last step done; weights of later steps, of an earlier process group, are deleted.
        goal: the target of the run, if it has one; it gets the scores.

    Raises:
        UsageError: another job uses the directory.
    """

    def __init__(
        self,
        directory: Path,
        *,
        num_workers: int,
        num_hosts: int,
        world: World,
        step: int,
        goal: Goal | None,
    ) -> None:
        self._run_dir, self._directory = directory, directory / FOLDER
        self._num_workers, self._goal, self._is_main = num_workers, goal, world.is_main
        self._left: deque[tuple[int, int]] = deque()  # step, samples
        self._child: subprocess.Popen[bytes] | None = None
        self._hosts: OtherHosts | None = None
        self._out = self._directory / f"scores-{time.time_ns()}"  # an old evaluation may use another one
        if self._is_main:
            self._directory.mkdir(exist_ok=True)
        world.barrier()
        self._checkpointer = Checkpointer(self._directory, keep=_ALL)
        if self._is_main:
            self._take_over(step)
            self._hosts = OtherHosts(self._directory, num_hosts) if num_hosts else None

    def _take_over(self, step: int) -> None:
        """Evaluate weights of an earlier process group, up to ``step``."""
        rows = record.read_record(self._run_dir) if (self._run_dir / record.FILE_NAME).is_file() else []
        scored = {row.step for row in rows if isinstance(row, record.Evaluation)}
        samples = {row.step: row.samples for row in rows if isinstance(row, record.Step)}
        for path in list_checkpoints(self._directory):
            if step_of(path) > step or step_of(path) in scored:
                remove_checkpoint(path)
            else:
                self._left.append((step_of(path), samples.get(step_of(path), 0)))

    def ask(self, step: int, kept: Mapping[str, Any], samples: int) -> None:
        """Save the weights of a step for an evaluation. A collective.

        Args:
            kept: the state of the run, whose models are saved.
            samples: number consumed since the start of the run.
        """
        self._checkpointer.save(step, {**models_of(kept), "samples": samples})
        if self._is_main:
            self._left.append((step, samples))

    def poll(self, log: RunLog | None) -> None:
        """Write the scores of an evaluation that has ended, and start the next one. Never blocks."""
        self._checkpointer.poll()
        if log is None or not self._is_main:
            return
        if self._hosts is not None and self._left:
            self._ask_hosts(self._hosts, log)
            return
        if self._child is not None and self._child.poll() is not None:
            self._collect(log, self._child.returncode, self._out, LOG)
        if self._child is None and self._left and not self._is_reached:
            path = checkpoint_path(self._directory, self._left[0][0])
            if is_checkpoint(path):
                self._start(path)

    def finish(self, log: RunLog | None) -> None:
        """Wait for all evaluations, unless one has reached the target. A collective.

        Raises:
            ShoalError: weights could not be saved.
        """
        self._checkpointer.finish()
        while log is not None and self._left and not self._is_reached:
            self.poll(log)
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Stop the evaluation in progress; its weights stay for a later process group."""
        if self._child is not None:
            end_command(self._child)
            self._child = None
        if self._is_main:
            shutil.rmtree(self._out, ignore_errors=True)
        if self._hosts is not None:
            self._hosts.close()

    def _ask_hosts(self, hosts: OtherHosts, log: RunLog) -> None:
        """Write the scores of an evaluation that has ended on another host."""
        step, _ = self._left[0]
        code = hosts.answer(step)
        if code is not None:
            out = scores_folder(self._directory, step)
            self._collect(log, code, out, "log-*.txt")
            shutil.rmtree(out, ignore_errors=True)
            hosts.forget(step)
        elif hosts.are_silent():
            hosts.close()
            self._hosts = None
            log.progress.say(
                f"an evaluation host has given no sign of life for {SILENT_S:.0f} s: evaluations run on this "
                f"host from here on; its output: {self._directory / 'log-*.txt'}"
            )

    def _start(self, path: Path) -> None:
        words = ["evaluate", "checkpoint", path, "--run", self._run_dir, "--out", self._out]
        words += ["--workers", self._num_workers]
        self._child = start_command(words, self._directory / LOG, nice=_NICE)

    def _collect(self, log: RunLog, exit_code: int, out: Path, output: str) -> None:
        """Write the scores of the evaluation that has ended.

        Args:
            out: folder of its record.
            output: file of its output, for a message.
        """
        self._child = None
        step, samples = self._left.popleft()
        rows = [row for row in _results(out) if row.step == step] if exit_code == 0 else []
        if not rows:
            log.progress.say(
                f"the evaluation of step {step:,} beside training failed (exit code {exit_code}); its "
                f"output is in {self._directory / output}; training goes on"
            )
        for row in rows:
            log.write(replace(row, beside=True, samples=samples or row.samples, time_s=time.time()))
        scores = {row.split: row.metrics for row in rows}
        if self._goal is not None and self._goal.offer(step, scores):
            path = checkpoint_path(self._directory, step)
            log.progress.say(f"the weights of step {step:,} have the scores of the target: {path}")
        else:
            remove_checkpoint(checkpoint_path(self._directory, step))

    @property
    def _is_reached(self) -> bool:
        return self._goal is not None and self._goal.reached is not None


def _results(out: Path) -> list[record.Evaluation]:
    return [row for row in record.read_record(out) if isinstance(row, record.Evaluation)]


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
