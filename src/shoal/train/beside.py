"""Evaluates beside training, in processes or on hosts of their own, and computes samples there.

Evaluations (:class:`Beside`) run on the first worker's host:

1. When an evaluation is due, all workers save the weights, without the optimizer's state, as a checkpoint in
   the folder ``beside`` of the run. Training continues as soon as they are copied.
2. The first worker starts ``shoal evaluate checkpoint`` on one checkpoint after the other: the recipe itself,
   which loads the weights and scores them, with a record of its own.
3. Between two steps the first worker checks whether it has ended, and writes the scores into the run's
   record, under the step of the weights. It deletes the weights, unless their scores end the run.
4. A run that ends waits for pending evaluations. One that continues evaluates the remaining weights.

With ``run.validation_hosts`` they run on the last hosts of the job, which do not train
(:func:`serve_evaluations`). Both sides meet in that folder, on the file system that all hosts share:

- The first worker of each such host rewrites a file every few seconds. It takes the oldest weights that no
  other has taken, starts ``shoal evaluate checkpoint`` on them, and writes an answer.
- It ends when the owner of the run directory has released it, or is silent.

A host that is silent costs scores some time and no more: the run evaluates on its first host instead.

Samples (:class:`Samples`) are what the model of an evaluation's step gives for inputs of the user. The
weights are saved in the folder ``samples``, and ``shoal predict checkpoint`` runs on them, on CPUs and at the
lowest priority. Its rows go into the run's record under the step of the weights. Samples that are not ready
when the next ones are due take their place, and samples that fail are reported.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from shoal import record
from shoal.atomic_io import write_atomically
from shoal.env.launcher import outside_of_job
from shoal.env.worker import WorkerEnv
from shoal.errors import EXIT_OK, EXIT_STOPPED, ShoalError
from shoal.json_text import parse_json
from shoal.train.checkpoint import Checkpointer
from shoal.train.checkpoint_files import (
    checkpoint_path,
    is_checkpoint,
    list_checkpoints,
    remove_checkpoint,
    step_of,
)
from shoal.train.reporting import RunLog
from shoal.train.run_dir import owner_beat
from shoal.train.stopping import Goal, StopRequest
from shoal.train.world import World, run_on_all

FOLDER = "beside"
"""Folder of the run directory for evaluations beside training."""
SAMPLES = "samples"
"""Folder of the run directory for samples: a file of each step."""
LOG = "log.txt"
"""File in both: the output of the commands."""
SILENT_S = 120.0
"""Time without a sign of life after which the other side counts as gone; NFS shows files up to 60 s late."""

_NICE, _NICE_OF_SAMPLES = 10, 19
"""Priorities below that of training."""
_BEAT_S = 2.0
_POLL_S = 0.1
_HOST_POLL_S = 0.2
_START_S = 900.0
"""Time for the run to begin."""
_END_S = 10.0
"""Time in which a command ends after a signal."""
_SAMPLES_END_S = 60.0
"""Time for which the end of a run waits for the last samples."""
_ROW_BYTES, _MOST_BYTES = 8_000, 64_000
"""Largest row, and all rows of samples of a step, in the record; the file has all."""
_TOKEN = "token"
"""File with the name of the process group that asks."""
_ALL = 1_000_000


class SideProcess:
    """Runs one command of shoal at a time beside training, outside of its job.

    Args:
        log: the output is appended to this file.
        nice: priority below that of training.
    """

    def __init__(self, log: Path, *, nice: int) -> None:
        self._log, self._nice = log, nice
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def runs(self) -> bool:
        """True while a command runs, and until :meth:`poll` has returned its exit code."""
        return self._child is not None

    def start(self, words: Sequence[object]) -> None:
        """Start ``shoal WORDS``."""
        with self._log.open("ab") as output:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "shoal", *map(str, words)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=outside_of_job(),
            )
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, self._child.pid, self._nice)

    def poll(self) -> int | None:
        """Return the exit code of the command, once; ``None``: none has ended."""
        code = None if self._child is None else self._child.poll()
        if code is not None:
            self._child = None
        return code

    def close(self) -> None:
        """End the command, by a signal that it handles or, later, by one that it does not."""
        child, self._child = self._child, None
        if child is None:
            return
        child.terminate()
        try:
            child.wait(_END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


# ---- evaluations -----------------------------------------------------------------------------------------


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
        self._process = SideProcess(self._directory / LOG, nice=_NICE)
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

    def ask(self, step: int, models: Mapping[str, nn.Module], samples: int) -> None:
        """Save the weights of a step for an evaluation. A collective.

        Args:
            models: by name.
            samples: number consumed since the start of the run.
        """
        self._checkpointer.save(step, {**models, "samples": samples})
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
        if (code := self._process.poll()) is not None:
            self._collect(log, code, self._out, LOG)
        if not self._process.runs and self._left and not self._is_reached:
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
        self._process.close()
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
        self._process.start(words)

    def _collect(self, log: RunLog, exit_code: int, out: Path, output: str) -> None:
        """Write the scores of the evaluation that has ended.

        Args:
            out: folder of its record.
            output: file of its output, for a message.
        """
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


# ---- evaluation hosts ------------------------------------------------------------------------------------


class Pulse:
    """Watches something that changes while the other side lives, by this host's clock."""

    def __init__(self, read: Callable[[], object]) -> None:
        self._read, self._last, self._at = read, read(), time.monotonic()
        self.has_changed = False

    def silent_s(self) -> float:
        """Return the time since the last change, or since the beginning."""
        now, value = time.monotonic(), self._read()
        if value != self._last:
            self._last, self._at, self.has_changed = value, now, True
        return now - self._at


class OtherHosts:
    """The evaluation hosts of a run, for its first worker.

    Args:
        folder: ``beside`` of the run directory.
        num_hosts: their number.
    """

    def __init__(self, folder: Path, num_hosts: int) -> None:
        self._folder, self._token = folder, f"{time.time_ns()}"
        self._remove("*")  # of an earlier process group
        self._pulses = [Pulse(partial(_content, _beat_file(folder, n))) for n in range(num_hosts)]
        write_atomically(folder / _TOKEN, self._token.encode())

    def are_silent(self) -> bool:
        """Return whether one has given no sign of life for long."""
        return any(pulse.silent_s() > SILENT_S for pulse in self._pulses)

    def answer(self, step: int) -> int | None:
        """Return the exit code of the evaluation of a step's weights; ``None``: it has not ended."""
        content = _content(_file(self._folder, "answer", self._token, step))
        return None if content is None else int(parse_json(content, "an answer")["exit_code"])

    def forget(self, step: int) -> None:
        """Delete what was said about a step."""
        self._remove(f"{step:08d}")

    def close(self) -> None:
        """Tell the hosts that no more weights come."""
        (self._folder / _TOKEN).unlink(missing_ok=True)
        self._remove("*")

    def _remove(self, steps: str) -> None:
        for kind in ("answer", "taken"):
            for path in self._folder.glob(f"{kind}-*-{steps}"):
                path.unlink(missing_ok=True)


def scores_folder(folder: Path, step: int) -> Path:
    """Return the folder of the record with the scores of a step, which an evaluation host has computed."""
    return folder / f"scores-of-{step:08d}"


def _beat_file(folder: Path, number: int) -> Path:
    return folder / f"host-{number}"


def _file(folder: Path, kind: str, token: str, step: int) -> Path:
    return folder / f"{kind}-{token}-{step:08d}"


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None


def serve_evaluations(run_dir: Path, worker: WorkerEnv, num_hosts: int) -> int:
    """Evaluate the weights of a run until it ends; return the exit code. Called by all workers of the host.

    Args:
        run_dir: the run directory.
        worker: of the whole job.
        num_hosts: evaluation hosts.
    """
    ranks = worker.ranks
    if ranks.local_rank != 0:
        return EXIT_OK
    first = ranks.num_workers - num_hosts * ranks.num_local_workers
    host = _Host(run_dir / FOLDER, (ranks.rank - first) // ranks.num_local_workers, ranks.num_local_workers)
    stop = StopRequest()
    try:
        while not host.run_has_ended() and stop.requested is None:
            try:
                host.poll()
            except (OSError, ShoalError) as error:  # the shared folder; the run does without this host
                print(f"shoal: evaluation host: {error}", flush=True)
            time.sleep(_HOST_POLL_S)
    finally:
        host.close()
    return EXIT_OK if stop.requested is None else EXIT_STOPPED


class _Host:
    """One evaluation host."""

    def __init__(self, folder: Path, number: int, num_workers: int) -> None:
        self._folder, self._number, self._num_workers = folder, number, num_workers
        self._run = Pulse(lambda: owner_beat(folder.parent))
        self._beat, self._num_beats = 0.0, 0
        self._process = SideProcess(folder / f"log-{number}.txt", nice=0)
        self._answer = Path()  # of the child

    def run_has_ended(self) -> bool:
        """Return whether the run has begun and ended, or does not begin."""
        silent_s = self._run.silent_s()
        if not self._run.has_changed:
            return silent_s > _START_S
        return owner_beat(self._folder.parent) is None or silent_s > SILENT_S

    def poll(self) -> None:
        """Give a sign of life, answer for an evaluation that has ended, and start the next one."""
        token = (_content(self._folder / _TOKEN) or b"").decode()
        if not token:
            return
        if time.monotonic() - self._beat > _BEAT_S:
            self._beat, self._num_beats = time.monotonic(), self._num_beats + 1
            sign = f"{time.time_ns()} {self._num_beats}".encode()
            write_atomically(_beat_file(self._folder, self._number), sign)
        if (code := self._process.poll()) is not None:
            write_atomically(self._answer, json.dumps({"exit_code": code}).encode())
        if not self._process.runs and (path := self._take(token)) is not None:
            step = step_of(path)
            self._answer = _file(self._folder, "answer", token, step)
            words = ["evaluate", "checkpoint", path, "--run", self._folder.parent]
            words += ["--out", scores_folder(self._folder, step), "--workers", self._num_workers]
            self._process.start(words)

    def close(self) -> None:
        """End the evaluation in progress."""
        self._process.close()
        with contextlib.suppress(OSError):
            _beat_file(self._folder, self._number).unlink(missing_ok=True)

    def _take(self, token: str) -> Path | None:
        """Return the oldest weights that no host has taken, and take them."""
        for path in list_checkpoints(self._folder):
            with contextlib.suppress(FileExistsError):
                _file(self._folder, "taken", token, step_of(path)).open("xb").close()
                return path
        return None


# ---- samples ---------------------------------------------------------------------------------------------


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
        self._directory = directory / SAMPLES
        self._inputs, self._world = inputs, world
        self._step: int | None = None  # whose samples are awaited
        self._process = SideProcess(self._directory / LOG, nice=_NICE_OF_SAMPLES)
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
        if not self._process.runs:
            path = checkpoint_path(self._directory, self._step)
            if is_checkpoint(path):
                self._start(path)
        elif (code := self._process.poll()) is not None:
            self._collect(log, self._step, code)

    def finish(self, log: RunLog | None) -> None:
        """Wait a while for the samples of the last step. A collective."""
        try:
            self._checkpointer.finish()
        except ShoalError as error:
            _say(log, f"no samples of the last step: {error}")
            return
        ends = time.monotonic() + _SAMPLES_END_S
        while log is not None and self._step is not None:
            if time.monotonic() > ends:
                _say(
                    log,
                    f"no samples of step {self._step:,}: they were not ready {_SAMPLES_END_S:.0f} s after "
                    "the end; `shoal predict` computes them from the trained model",
                )
                return
            self.poll(log)
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Stop the process in progress, and delete its weights."""
        self._process.close()
        if self._step is not None:
            remove_checkpoint(checkpoint_path(self._directory, self._step))
            self._step = None

    def _start(self, path: Path) -> None:
        words = ["predict", "checkpoint", path, *self._inputs, "--out", self._out, "--device", "cpu"]
        self._out.unlink(missing_ok=True)
        self._began = time.monotonic()
        self._process.start(words)

    def _collect(self, log: RunLog, step: int, exit_code: int) -> None:
        """Write the rows of the process that has ended."""
        self._step = None
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
