"""Computes samples beside training: what the model of an evaluation's step gives for inputs of the user.

When an evaluation is due, all workers save the weights into the folder ``samples`` of the run, and the first
worker starts ``shoal predict checkpoint`` on them, on CPUs and at the lowest priority. Its rows go into the
run's record under the step of the weights. Training waits for the copy of the weights alone: samples that are
not ready when the next ones are due take their place, and samples that fail are reported.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from shoal import record
from shoal.errors import ShoalError
from shoal.json_text import parse_json
from shoal.train.checkpoint import Checkpointer
from shoal.train.checkpoint_files import checkpoint_path, is_checkpoint, list_checkpoints, remove_checkpoint
from shoal.train.reporting import RunLog
from shoal.train.side_process import end_command, start_command
from shoal.train.world import World, run_on_all

FOLDER = "samples"
"""Folder of the run directory for samples: a file of each step."""
LOG = "log.txt"
"""File in it: the output of the commands that fail."""

_NICE = 19
_AT_END_S = 60.0
"""Seconds for which the end of a run waits for the last samples."""
_POLL_S = 0.1
_ROW_BYTES, _MOST_BYTES = 8_000, 64_000
"""Largest row, and all rows of a step, in the record; the file has all."""


class Samples:
    """Samples of a run. All workers construct it together; the first one starts the processes.

    Args:
        directory: of the run.
        inputs: files that ``shoal predict`` of the run's recipe reads.
        world: the workers of the training.

    Raises:
        UsageError: another job uses the directory.
    """

    def __init__(self, directory: Path, inputs: Sequence[Path], world: World) -> None:
        self._directory = directory / FOLDER
        self._inputs, self._world = inputs, world
        self._step: int | None = None  # whose samples are awaited
        self._child: subprocess.Popen[bytes] | None = None
        self._began = 0.0
        if world.is_main:
            self._directory.mkdir(exist_ok=True)
        world.barrier()
        self._checkpointer = Checkpointer(self._directory, keep=1)
        for path in list_checkpoints(self._directory) if world.is_main else ():
            remove_checkpoint(path)  # of an earlier process group

    def ask(self, step: int, models: Mapping[str, nn.Module], log: RunLog | None) -> None:
        """Save the weights of a step for its samples, unless others are still awaited. A collective."""
        self.poll(log)
        waits_for = run_on_all(self._world.control, lambda: self._step)[0]
        if waits_for is not None:
            _say(log, f"no samples of step {step:,}: those of step {waits_for:,} are not ready")
            return
        try:
            self._checkpointer.save(step, models)
        except ShoalError as error:
            _say(log, f"no samples of step {step:,}: {error}")
            return
        if self._world.is_main:
            self._step = step

    def poll(self, log: RunLog | None) -> None:
        """Write samples that are ready, or start to compute those of weights on disk. Never blocks."""
        self._checkpointer.poll()
        if log is None or self._step is None:
            return
        if self._child is None:
            path = checkpoint_path(self._directory, self._step)
            if is_checkpoint(path):
                self._start(path)
        elif self._child.poll() is not None:
            self._collect(log, self._step, self._child.returncode)

    def finish(self, log: RunLog | None) -> None:
        """Wait a while for the samples of the last step. A collective."""
        try:
            self._checkpointer.finish()
        except ShoalError as error:
            _say(log, f"no samples of the last step: {error}")
            return
        ends = time.monotonic() + _AT_END_S
        while log is not None and self._step is not None:
            if time.monotonic() > ends:
                _say(
                    log,
                    f"no samples of step {self._step:,}: they were not ready {_AT_END_S:.0f} s after the "
                    "end; `shoal predict` computes them from the trained model",
                )
                return
            self.poll(log)
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Stop the process in progress, and delete its weights."""
        if self._child is not None:
            end_command(self._child)
            self._child = None
        if self._step is not None:
            remove_checkpoint(checkpoint_path(self._directory, self._step))
            self._step = None

    def _start(self, path: Path) -> None:
        words = ["predict", "checkpoint", path, *self._inputs, "--out", self._out, "--device", "cpu"]
        self._out.unlink(missing_ok=True)
        self._began = time.monotonic()
        self._child = start_command(words, self._directory / LOG, nice=_NICE)

    def _collect(self, log: RunLog, step: int, exit_code: int) -> None:
        """Write the rows of the process that has ended."""
        self._child = self._step = None
        remove_checkpoint(checkpoint_path(self._directory, step))
        if exit_code != 0 or not self._out.is_file():
            _say(
                log,
                f"the samples of step {step:,} failed (exit code {exit_code}); the output is in "
                f"{self._directory / LOG}; training goes on",
            )
            return
        path = self._directory / f"step-{step:08d}.jsonl"
        self._out.replace(path)
        rows, num_rows = _first_rows(path)
        seconds = time.monotonic() - self._began
        log.write(record.Samples(step=step, path=str(path), rows=rows, num_rows=num_rows, seconds=seconds))

    @property
    def _out(self) -> Path:
        return self._directory / "next.jsonl"


def _first_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of a file that the record takes, and the number of all."""
    lines = path.read_bytes().splitlines()
    rows, left = [], _MOST_BYTES
    for line in lines:
        left -= len(line)
        if left < 0:
            break
        if len(line) <= _ROW_BYTES:
            rows.append(parse_json(line, f"a line of {path}"))
    return rows, len(lines)


def _say(log: RunLog | None, text: str) -> None:
    if log is not None:
        log.progress.say(text)
