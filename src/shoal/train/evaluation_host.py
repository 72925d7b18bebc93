"""Evaluates on hosts of their own: ``run.validation_hosts``, the last hosts of a job, which do not train.

Both sides meet in the folder ``beside`` of the run, on the file system that all hosts share:

- The run saves weights there, as for evaluations on its own hosts (:mod:`shoal.train.evaluations`).
- The first worker of each such host rewrites a file every few seconds. It takes the oldest weights that no
  other has taken, starts ``shoal evaluate checkpoint`` on them, and writes an answer.
- It ends when the owner of the run directory has released it, or is silent.

A host that is silent costs scores some time and no more: the run evaluates on its first host instead.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from shoal.atomic_io import write_atomically
from shoal.env.worker import WorkerEnv
from shoal.errors import EXIT_OK, EXIT_STOPPED, ShoalError
from shoal.json_text import parse_json
from shoal.train.checkpoint_files import list_checkpoints, step_of
from shoal.train.run_dir import owner_beat
from shoal.train.side_process import end_command, start_command
from shoal.train.stopping import StopRequest

FOLDER = "beside"
"""Folder of the run directory for evaluations beside training."""
SILENT_S = 120.0
"""Time without a sign of life after which the other side counts as gone; NFS shows files up to 60 s late."""
_BEAT_S = 2.0
_POLL_S = 0.2
_START_S = 900.0
"""Time for the run to begin."""
_TOKEN = "token"
"""File with the name of the process group that asks."""


# ---- signs of life -----------------------------------------------------------------------------------------


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


# ---- the run's side ----------------------------------------------------------------------------------------


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


# ---- the evaluation host's side ----------------------------------------------------------------------------


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
            time.sleep(_POLL_S)
    finally:
        host.close()
    return EXIT_OK if stop.requested is None else EXIT_STOPPED


class _Host:
    """One evaluation host."""

    def __init__(self, folder: Path, number: int, num_workers: int) -> None:
        self._folder, self._number, self._num_workers = folder, number, num_workers
        self._run = Pulse(lambda: owner_beat(folder.parent))
        self._beat, self._num_beats = 0.0, 0
        self._child: subprocess.Popen[bytes] | None = None
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
        if self._child is not None and (code := self._child.poll()) is not None:
            self._child = None
            write_atomically(self._answer, json.dumps({"exit_code": code}).encode())
        if self._child is None and (path := self._take(token)) is not None:
            step = step_of(path)
            self._answer = _file(self._folder, "answer", token, step)
            words = ["evaluate", "checkpoint", path, "--run", self._folder.parent]
            words += ["--out", scores_folder(self._folder, step), "--workers", self._num_workers]
            self._child = start_command(words, self._folder / f"log-{self._number}.txt", nice=0)

    def close(self) -> None:
        """End the evaluation in progress."""
        if self._child is not None:
            end_command(self._child)
        with contextlib.suppress(OSError):
            _beat_file(self._folder, self._number).unlink(missing_ok=True)

    def _take(self, token: str) -> Path | None:
        """Return the oldest weights that no host has taken, and take them."""
        for path in list_checkpoints(self._folder):
            with contextlib.suppress(FileExistsError):
                _file(self._folder, "taken", token, step_of(path)).open("xb").close()
                return path
        return None
