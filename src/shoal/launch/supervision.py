"""Supervises the worker processes of a job: signals, deadlines, and the exit code of the first failure.

The launchers for this host and for emulated hosts start the processes; :class:`Job` supervises them. Standard
library only.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, Self

from shoal.env.member_signs import have_begun, take_standstills
from shoal.env.worker import MEMBERS
from shoal.errors import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_LOST,
    EXIT_OK,
    EXIT_STOPPED,
    WARNING_SIGNALS,
)
from shoal.launch.worker import WorkerError, read_errors

POLL_S = 0.05
AFTER_FAILURE_S = 5.0
"""Time until the other workers are killed after one has failed."""
_AFTER_STOP_S = 120.0
"""The same after one has saved and exited."""
_AFTER_SIGNAL_S = 10.0
_RESTART_PAUSE_S, _MOST_RESTART_PAUSE_S = 0.5, 60.0
"""Before a worker is started again; the pause doubles each time."""
MOST_STARTS = 3
"""Of all workers that come and go, until the first of these starts in which none is lost before they meet."""
THREADS = ("OMP_NUM_THREADS", "PJRT_NPROC", "TF_NUM_INTRAOP_THREADS")
"""Variables with the number of threads of a worker's libraries: PyTorch and NumPy, JAX, TensorFlow."""

_FORWARDED_AS = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGUSR2: signal.SIGUSR2,
    signal.SIGHUP: signal.SIGTERM,
    signal.SIGINT: signal.SIGTERM,
}
"""Signals to the launcher, and those that it sends to the workers."""
_TAIL_LINES = 20

Output = int | IO[Any] | None
"""A standard stream of ``subprocess.Popen``: ``None`` (this process's own), a constant or a file."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The exit code of a job, and the text for stderr (empty: nothing)."""

    exit_code: int
    text: str = ""

    def report(self) -> int:
        """Print the text, if there is any, and return the exit code."""
        if self.text:
            print(self.text, file=sys.stderr, flush=True)
        return self.exit_code


class Job:
    """The workers of one launcher, from start to exit; a context that receives the launcher's signals.

    Signals are forwarded once each; a second Ctrl-C kills. When a worker fails, the others get a grace
    period. Workers lead process groups, so that a kill reaches their children; workers that still run are
    killed at the end of the context. Enter it in the main thread.

    Args:
        log_dir: folder for the output of all workers but rank 0, created if missing.
        error_dir: folder in which workers report errors (:func:`shoal.launch.worker.write_error`); ``None``
            for a command that reports none: its stdout and stderr go to one file, its exit code 75 has no
            meaning, a request to stop gives it 10 s, and only the first failure counts.
        usr2_is_term: SIGUSR2 asks for the end, as SIGTERM does, for which workers get it.
    """

    def __init__(self, log_dir: Path, *, error_dir: Path | None, usr2_is_term: bool = False) -> None:
        self.exit_codes: dict[int, int] = {}
        """Exit codes by rank; minus the signal's number for a death by signal."""
        self.received: int | None = None
        """The last signal that requests a stop."""
        self.num_interrupts = 0
        self._log_dir, self._error_dir, self._usr2_is_term = log_dir, error_dir, usr2_is_term
        self._workers: dict[int, subprocess.Popen[str]] = {}
        self._forwarded: list[int] = []
        self._killed: set[int] = set()
        self._ended_at: dict[int, float] = {}
        self._logs: dict[int, Path] = {}
        self._files = ExitStack()
        self._handlers: dict[signal.Signals, Any] = {}
        self._restart: Callable[[int], subprocess.Popen[str]] | None = None
        self._can_restart: Callable[[int], bool] = lambda rank: True
        self._restart_at: dict[int, float] = {}
        self._kill_at: dict[str, float] = {}
        self._has_other_hosts, self._num_starts = False, 1
        self._num_restarts: Counter[int] = Counter()

    def __enter__(self) -> Self:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._handlers = {number: signal.signal(number, self._on_signal) for number in _FORWARDED_AS}
        return self

    def __exit__(self, *exception: object) -> None:
        self._kill()
        self._files.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    @property
    def stop_requested(self) -> bool:
        """True after a signal that requests a stop; start no worker then."""
        return bool(self._forwarded)

    @property
    def has_failed(self) -> bool:
        """True after a worker has failed or reported an error."""
        codes = self.exit_codes.values()
        return any(code not in (EXIT_OK, EXIT_STOPPED) for code in codes) or bool(self._errors())

    def outputs(self, rank: int) -> tuple[Output, Output]:
        """Return stdout and stderr for a worker: rank 0 gets the terminal, the others files by rank."""
        if rank == 0:
            return None, None
        suffix, mode = "log" if self._error_dir is None else "err", "a" if rank in self._logs else "w"
        path = self._logs[rank] = self._log_dir / f"worker-{rank:05}.{suffix}"
        err = self._files.enter_context(path.open(mode))
        if self._error_dir is None:
            return err, subprocess.STDOUT
        return self._files.enter_context(path.with_suffix(".out").open(mode)), err

    def wait(
        self,
        workers: Mapping[int, subprocess.Popen[str]],
        *,
        restart: Callable[[int], subprocess.Popen[str]] | None = None,
        can_restart: Callable[[int], bool] = lambda rank: True,
        has_other_hosts: bool = False,
    ) -> None:
        """Wait for the end of all workers (by rank): forward signals, and kill those past a deadline.

        Args:
            restart: starts a worker again, where the others go on without it if a signal has ended it, or if
                they have given it up. If one is lost before they have met, all are started again.
            can_restart: whether its host is there; called again and again.
            has_other_hosts: workers on other hosts go on, too, even if all of these are lost.
        """
        self._workers, self._restart, self._can_restart = dict(workers), restart, can_restart
        self._has_other_hosts = has_other_hosts
        sent: list[int] = []
        reports = self._error_dir is not None
        while self._poll():
            now = time.monotonic()
            for number in [number for number in self._forwarded if number not in sent]:
                sent.append(number)
                for rank in self._alive():
                    self._workers[rank].send_signal(number)
            for event, has_come, seconds in (
                ("failure", self.has_failed, AFTER_FAILURE_S),
                ("stop", reports and EXIT_STOPPED in self.exit_codes.values(), _AFTER_STOP_S),
                ("signal", not reports and self.received is not None, _AFTER_SIGNAL_S),
            ):
                if has_come:
                    self._kill_at.setdefault(event, now + seconds)
            if self.num_interrupts > 1 or now > min(self._kill_at.values(), default=now):
                self._kill()
            time.sleep(POLL_S)

    def outcome(self, *, has_other_hosts: bool = False) -> Outcome:
        """Return the outcome of the job, from its workers' exit codes and errors.

        Args:
            has_other_hosts: other launchers have workers of the job, too.
        """
        if not self.exit_codes:  # asked to stop before the start
            return Outcome(exit_code=EXIT_STOPPED)
        if self.num_interrupts > 1:
            return Outcome(exit_code=EXIT_INTERRUPTED)
        codes = self.exit_codes
        if self._error_dir is None:
            failed = [self._ended_at[rank] for rank, code in codes.items() if code != EXIT_OK]
            codes = {r: c for r, c in codes.items() if c == EXIT_OK or self._ended_at[r] == min(failed)}
        return decide_outcome(
            codes,
            self._errors(),
            killed=self._killed,
            forwarded=self._forwarded,
            logs=self._logs,
            has_other_hosts=has_other_hosts,
        )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.num_interrupts += number == signal.SIGINT
        if number == signal.SIGUSR2 and self._usr2_is_term:
            number = signal.SIGTERM
        if number not in WARNING_SIGNALS:
            self.received = number
        if (forwarded := _FORWARDED_AS[signal.Signals(number)]) not in self._forwarded:
            self._forwarded.append(forwarded)

    def _poll(self) -> bool:
        """Collect exit codes; return whether a worker still runs."""
        now = time.monotonic()
        self._end_standstills()
        for rank in self._alive():
            code = self._workers[rank].poll()
            if code is None:
                continue
            if rank in self._restart_at and self.stop_requested:
                self.exit_codes[rank] = EXIT_STOPPED
            elif rank in self._restart_at:
                assert self._restart is not None
                if now > self._restart_at[rank] and self._can_restart(rank):
                    del self._restart_at[rank]
                    self._workers[rank] = self._restart(rank)
            elif self._is_lost_early(rank, code):
                self._start_all_again(rank, code)
                break
            elif self._has_left(rank, code):
                print(f"shoal: worker {rank} has left; the others go on", file=sys.stderr, flush=True)
                del self._workers[rank]
            elif self._restarts and self._have_met() and self._is_lost(rank, code):
                self._restart_at[rank] = now + self._pause_before_restart(rank, code)
            else:
                self.exit_codes[rank] = code
                self._ended_at[rank] = now
        if self._restart_at.keys() >= set(self._alive()) and self._is_over():
            self._end_without_restarts()
        return bool(self._alive())

    def _end_standstills(self) -> None:
        """Kill the workers of this host that the others have given up."""
        if self._restart is None or self._error_dir is None:
            return
        for rank, pid in take_standstills(self._error_dir):
            if rank in self._workers and self._workers[rank].pid == pid:
                end_process_groups([self._workers[rank]], grace_s=0)

    def _has_left(self, rank: int, code: int) -> bool:
        """Return whether a worker that has ended was asked to stop by another than this launcher."""
        goes_on = EXIT_OK in self.exit_codes.values() or any(each != rank for each in self._alive())
        return self._restarts and self._have_met() and code == EXIT_STOPPED and goes_on

    @property
    def _restarts(self) -> bool:
        """True if lost workers are restarted."""
        return self._restart is not None and not self.stop_requested

    def _is_lost_early(self, rank: int, code: int) -> bool:
        """Return whether a worker has ended, or lost another, before all had met, and all may start again."""
        if not self._restarts or self._has_other_hosts or self._have_met() or self._num_starts == MOST_STARTS:
            return False
        error = self._all_errors().get(rank)
        return self._is_lost(rank, code) or (error is not None and error.lost_peer)

    def _have_met(self) -> bool:
        """Return whether the workers go on without one from now on."""
        return self._error_dir is None or have_begun(self._error_dir)

    def _start_all_again(self, rank: int, code: int) -> None:
        """End all workers, and start them from the beginning: they have not taken a step."""
        assert self._error_dir is not None
        self._num_starts += 1
        print(
            f"shoal: worker {rank} {_how_lost(code)} before the first step; all start again (start "
            f"{self._num_starts} of {MOST_STARTS})",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        end_process_groups(list(self._workers.values()), grace_s=0)
        for path in self._error_dir.glob("error-*.json"):
            path.unlink()
        for store in self._error_dir.glob(f"*{MEMBERS}"):
            shutil.rmtree(store)
        for ended in (self.exit_codes, self._ended_at, self._kill_at):
            ended.clear()
        self._restart_at = dict.fromkeys(self._workers, time.monotonic() + _RESTART_PAUSE_S)

    def _is_lost(self, rank: int, code: int) -> bool:
        """Return whether a worker that has ended is one without which the others go on."""
        return rank not in self._killed and (code < 0 or code == EXIT_LOST)

    def _pause_before_restart(self, rank: int, code: int) -> float:
        """Return the seconds until a worker is started again, more each time, and say so."""
        pause_s: float = min(_RESTART_PAUSE_S * 2 ** self._num_restarts[rank], _MOST_RESTART_PAUSE_S)
        self._num_restarts[rank] += 1
        print(
            f"shoal: worker {rank} {_how_lost(code)}; the others go on, and it is started again in "
            f"{pause_s:g} s",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        return pause_s

    def _is_over(self) -> bool:
        """Return whether nobody is there to take in workers that were to be started again."""
        return bool(self.exit_codes) or (self._have_met() and not self._has_other_hosts)

    def _end_without_restarts(self) -> None:
        """Start no worker again: the others have ended without it, or all were lost."""
        for rank in self._restart_at:
            if self.exit_codes:
                del self._workers[rank]
            else:
                self.exit_codes |= {lost: self._workers[lost].returncode for lost in self._restart_at}
                self._ended_at |= dict.fromkeys(self._restart_at, time.monotonic())
                break
        self._restart_at.clear()

    def _alive(self) -> list[int]:
        return [rank for rank in self._workers if rank not in self.exit_codes]

    def _all_errors(self) -> dict[int, WorkerError]:
        return {} if self._error_dir is None else read_errors(self._error_dir)

    def _errors(self) -> dict[int, WorkerError]:
        errors = self._all_errors()
        if self._restart is None:
            return errors
        return {rank: error for rank, error in errors.items() if error.exit_code != EXIT_LOST}

    def _kill(self) -> None:
        alive = self._alive()
        self._killed.update(alive)
        end_process_groups([self._workers[rank] for rank in alive], grace_s=0)


def end_process_groups(processes: Sequence[subprocess.Popen[str]], *, grace_s: float) -> None:
    """End process groups by their leaders: SIGTERM, SIGKILL after ``grace_s``; wait for the leaders."""
    until = time.monotonic() + grace_s
    for number in (signal.SIGTERM, signal.SIGKILL) if grace_s > 0 else (signal.SIGKILL,):
        alive = [process for process in processes if process.poll() is None]
        for process in alive:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        while any(process.poll() is None for process in alive) and (
            number == signal.SIGKILL or time.monotonic() < until
        ):
            time.sleep(POLL_S / 2)


def worker_variables(
    rank: int, *, num_hosts: int, workers_per_host: int, master: tuple[str, int]
) -> dict[str, str]:
    """Return torchrun's environment variables for one worker; ``master``: address and port of rank 0."""
    host, local_rank = divmod(rank, workers_per_host)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_hosts * workers_per_host),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(workers_per_host),
        "GROUP_RANK": str(host),
        "GROUP_WORLD_SIZE": str(num_hosts),
        "NODE_RANK": str(host),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
    }


def write_secret(folder: Path, secret: bytes) -> Path:
    """Write the job's secret to a new file (mode 0600) in ``folder`` and return its path."""
    path = folder / "secret"
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(secret)
    return path


# ---- the failure that caused the others --------------------------------------------------------------------


def decide_outcome(
    exit_codes: Mapping[int, int],
    errors: Mapping[int, WorkerError],
    *,
    killed: Collection[int] = (),
    forwarded: Collection[int] = (),
    logs: Mapping[int, Path] | None = None,
    has_other_hosts: bool = False,
) -> Outcome:
    """Return the failure that caused the others.

    A worker's own error comes first, the earliest of several; then a death by a signal that the launcher
    did not send, and an exit without an error; then the mere loss of another worker, which is blamed on
    another host only if there is one.

    Args:
        exit_codes: of this host's workers by rank; minus the signal's number for a death by signal.
        errors: reported by workers themselves, by rank.
        killed: ranks that the launcher has killed.
        forwarded: signals sent by the launcher; a worker that died of one had not started to train.
        logs: files with the output of workers, by rank.
        has_other_hosts: workers of the job run on other hosts, too.
    """
    logs = logs or {}
    own = [error for error in errors.values() if not error.lost_peer]
    if own:
        first = min(own, key=lambda error: error.time_s)
        prefix = f"worker {first.rank}: " if first.is_bug else ""
        return Outcome(exit_code=first.exit_code, text=f"{prefix}{first.message}")
    silent = {
        rank: code
        for rank, code in sorted(exit_codes.items())
        if rank not in errors and rank not in killed and code not in (EXIT_OK, EXIT_STOPPED)
        and -code not in forwarded
    }  # fmt: skip
    if silent:
        # a death by signal explains an exit code elsewhere rather than the other way round
        rank = min(silent, key=lambda rank: silent[rank] > 0)
        return _without_report(rank, silent[rank], logs)
    if any(code == EXIT_STOPPED or -code in forwarded for code in exit_codes.values()):
        return Outcome(exit_code=EXIT_STOPPED)
    if errors:
        first = min(errors.values(), key=lambda error: error.time_s)
        if not has_other_hosts:
            text = f"worker {first.rank}: {first.message}{_log_hint(first.rank, logs)}"
            return Outcome(exit_code=first.exit_code, text=text)
        return Outcome(
            exit_code=EXIT_LOST,
            text=f"worker {first.rank} lost another worker, which runs on another host: look for the error "
            f"in that host's output. Its own error: {first.message}{_log_hint(first.rank, logs)}",
        )
    return Outcome(exit_code=EXIT_FAILURE if killed else EXIT_OK)


def _without_report(rank: int, code: int, logs: Mapping[int, Path]) -> Outcome:
    end = f"{_log_hint(rank, logs)}{_tail(logs.get(rank))}"
    if code > 0:
        return Outcome(exit_code=code, text=f"worker {rank} ended with exit code {code}{end}")
    number, hint = -code, ""
    if number == signal.SIGKILL:
        hint = (
            ": killed from outside, or by the kernel because memory was full (see dmesg); a smaller "
            "--train.micro-batch-size needs less"
        )
    elif number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE):
        hint = ": native code crashed; the lines above or in its log show where in Python"
    name = _name_of_signal(number)
    return Outcome(exit_code=EXIT_FAILURE, text=f"worker {rank} was ended by {name}{hint}{end}")


def _how_lost(code: int) -> str:
    """Return in words how a worker with this exit code was lost."""
    if code < 0:
        return f"was ended by {_name_of_signal(-code)}"
    return "was given up by the others" if code == EXIT_LOST else "lost another one"


def _name_of_signal(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _log_hint(rank: int, logs: Mapping[int, Path]) -> str:
    return f"\n(its whole output: {logs[rank]})" if rank in logs else ""


def _tail(path: Path | None) -> str:
    if path is None or not path.is_file():
        return ""
    lines = path.read_text("utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
    return "".join(f"\n  {line}" for line in lines)
