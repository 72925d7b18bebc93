"""Evaluates weights beside training: in processes of their own, on the first worker's host.

1. Where an evaluation is due, all workers save the weights, without the optimizer's state, as a checkpoint in
   the folder ``beside`` of the run. Training goes on as soon as they are copied.
2. The first worker starts ``shoal evaluate checkpoint`` on each of these in turn: the recipe itself, which
   loads the weights and scores them, with a record of its own.
3. Between two steps the first worker looks whether that has ended, and writes the scores into the record,
   under the step of the weights. The weights are deleted, unless they have the scores that end the run.
4. A run that ends waits for what is under way. One that continues evaluates the weights that are left.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from shoal import record
from shoal.env.launcher import outside_of_job
from shoal.train.checkpoint import Checkpointer, load_models
from shoal.train.checkpoint_files import (
    checkpoint_path,
    is_checkpoint,
    list_checkpoints,
    remove_checkpoint,
    step_of,
)
from shoal.train.reporting import RunLog
from shoal.train.stopping import Goal
from shoal.train.world import World

FOLDER = "beside"
"""Folder of the run directory."""
LOG = "log.txt"
"""File in it: the output of the evaluations."""

_NICE = 10
"""By so much the priority of an evaluation is below that of training."""
_END_S = 10.0
"""Seconds in which an evaluation ends after a signal."""
_POLL_S = 0.1
_ALL = 1_000_000


class Beside:
    """Evaluations beside a training. All workers construct it together; the first one evaluates.

    Args:
        directory: of the run.
        num_workers: processes of an evaluation.
        world: the workers of the training.
        step: the last step done; weights of later steps, of an earlier process group, are deleted.
        goal: the target of the run, if it has one; it is told of scores that reach it.

    Raises:
        UsageError: another job uses the directory.
    """

    def __init__(
        self, directory: Path, *, num_workers: int, world: World, step: int, goal: Goal | None
    ) -> None:
        self._run_dir, self._directory = directory, directory / FOLDER
        self._num_workers, self._goal, self._is_main = num_workers, goal, world.is_main
        self._left: deque[tuple[int, int]] = deque()  # step, samples
        self._child: subprocess.Popen[bytes] | None = None
        self._out = self._directory / f"scores-{time.time_ns()}"  # an old evaluation may use another one
        if self._is_main:
            self._directory.mkdir(exist_ok=True)
        world.barrier()
        self._checkpointer = Checkpointer(self._directory, keep=_ALL)
        if self._is_main:
            self._take_over(step)

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
        """Save the weights of a step to be evaluated; all workers call it.

        Args:
            kept: the state of the run, whose models are saved.
            samples: consumed since the start of the run.
        """
        self._checkpointer.save(step, {**models_of(kept), "samples": samples})
        if self._is_main:
            self._left.append((step, samples))

    def poll(self, log: RunLog | None) -> None:
        """Write the scores that are there, and start the next evaluation. Never blocks."""
        self._checkpointer.poll()
        if log is None or not self._is_main:
            return
        if self._child is not None and self._child.poll() is not None:
            self._collect(log, self._child.returncode)
        if self._child is None and self._left and not self._is_reached:
            path = checkpoint_path(self._directory, self._left[0][0])
            if is_checkpoint(path):
                self._start(path)

    def finish(self, log: RunLog | None) -> None:
        """Wait for all evaluations, unless one has reached the target; all workers call it.

        Raises:
            ShoalError: weights could not be saved.
        """
        self._checkpointer.finish()
        while log is not None and self._left and not self._is_reached:
            self.poll(log)
            time.sleep(_POLL_S)

    def close(self) -> None:
        """End the evaluation that is under way; its weights stay for a run that continues."""
        if self._child is not None:
            self._child.terminate()
            try:
                self._child.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
            self._child = None
        if self._is_main:
            shutil.rmtree(self._out, ignore_errors=True)

    def _start(self, path: Path) -> None:
        command = [sys.executable, "-m", "shoal", "evaluate", "checkpoint", str(path)]
        command += ["--run", str(self._run_dir), "--out", str(self._out), "--workers", str(self._num_workers)]
        with (self._directory / LOG).open("ab") as output:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=outside_of_job(),
            )
        os.setpriority(os.PRIO_PROCESS, self._child.pid, _NICE)

    def _collect(self, log: RunLog, exit_code: int) -> None:
        """Write the scores of the evaluation that has ended."""
        self._child = None
        step, samples = self._left.popleft()
        rows = [row for row in self._found() if row.step == step] if exit_code == 0 else []
        if not rows:
            log.progress.say(
                f"the evaluation of step {step:,} beside training failed (exit code {exit_code}); what it "
                f"said is in {self._directory / LOG}; training goes on"
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

    def _found(self) -> list[record.Evaluation]:
        return [row for row in record.read_record(self._out) if isinstance(row, record.Evaluation)]


def models_of(kept: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Return the models among the state of a run."""
    return {name: value for name, value in kept.items() if isinstance(value, nn.Module)}


def load_weights(path: Path, kept: Mapping[str, Any], world: World) -> tuple[int, int]:
    """Load the models of a checkpoint into those of a run; all workers call it.

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
