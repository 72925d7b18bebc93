"""Runs a command as the workers of an emulated cluster to its end: ``shoal emulate`` and ``--on emulated``.

The rules are those of :mod:`shoal.launch.local`: requests to stop are passed on, a failure ends the others
after a grace, and the failure that caused the others is shown once.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from shoal.env import LAUNCH_DIR
from shoal.errors import EXIT_OK, EXIT_STOPPED, UsageError
from shoal.launch.emulated import Cluster
from shoal.launch.emulated_hosts import Output, end
from shoal.launch.emulated_plan import describe, plan_cluster
from shoal.launch.ending import EXIT_INTERRUPTED, PASSED_ON, Deadlines, requests_to
from shoal.launch.outcome import Outcome, decide_outcome
from shoal.launch.worker import read_errors

_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The cluster to run on, as the command line names it."""

    hosts: int
    nic: str | None = None
    helpers: int = 0
    helper_nic: str | None = None
    workers_per_host: int = 1

    @property
    def num_workers(self) -> int:
        return self.hosts * self.workers_per_host

    def check(self) -> str:
        """Return a description of the hosts, one a line.

        Raises:
            UsageError: a number or a rate is none.
        """
        if self.workers_per_host < 1:
            raise UsageError(f"{self.workers_per_host} workers per host must be at least 1")
        plan = plan_cluster(
            hosts=self.hosts, helpers=self.helpers, nic=self.nic, helper_nic=self.helper_nic, prefix="shoal"
        )
        return describe(plan, workers_per_host=self.workers_per_host)


def emulate(command: Sequence[str], hosts: Hosts, *, log_dir: Path | None = None) -> int:
    """Run any command on emulated hosts and return its exit code: 0, or that of the first failure.

    Rank 0 writes to this process's stdout and stderr, the others to files in ``log_dir``; by default to a
    temporary folder that is kept after a failure only. A signal ends all: 128 + its number.

    Raises:
        UsageError: a number or a rate is none, or this machine cannot emulate hosts.
        ShoalError: the hosts could not be made or a helper's server did not start.
    """
    hosts.check()
    _check_command(command)
    folder = log_dir or Path(tempfile.mkdtemp(prefix="shoal-emulate-"))
    job = _Job(Deadlines(after_signal_s=10.0), merge_outputs=True)
    outcome = Outcome(exit_code=EXIT_OK)
    try:
        job.run(command, hosts, log_dir=folder)
        if not job.exit_codes:  # asked to stop before the start
            return 128 + (job.received or job.forwarded[0])
        outcome = decide_outcome(
            job.first_failures(), {}, killed=job.killed, forwarded=job.forwarded, logs=job.stderr_files
        )
        if job.received is not None and outcome.exit_code != EXIT_OK:
            return 128 + job.received
        return outcome.tell()
    finally:
        if log_dir is None and not outcome.text:
            shutil.rmtree(folder, ignore_errors=True)


def launch_emulated(
    command: Sequence[str], hosts: Hosts, *, log_dir: Path, deadlines: Deadlines | None = None
) -> int:
    """Run a worker command, as :func:`shoal.launch.local.launch` takes it, on emulated hosts.

    Returns:
        0, :data:`~shoal.errors.EXIT_STOPPED` when the workers saved and left, or that of the first failure.

    Raises:
        UsageError: a number or a rate is none, or this machine cannot emulate hosts.
        ShoalError: the hosts could not be made or a helper's server did not start.
    """
    hosts.check()
    job = _Job(deadlines or Deadlines())
    folder = Path(tempfile.mkdtemp(prefix="shoal-launch-"))
    try:
        job.run(command, hosts, log_dir=log_dir, env={LAUNCH_DIR: str(folder)}, error_folder=folder)
        if not job.exit_codes:
            return EXIT_STOPPED
        if job.num_interrupts > 1:
            return EXIT_INTERRUPTED
        return decide_outcome(
            job.exit_codes,
            read_errors(folder),
            killed=job.killed,
            forwarded=job.forwarded,
            logs=job.stderr_files,
        ).tell()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_command(command: Sequence[str]) -> None:
    if not command:
        raise UsageError(
            "no command to run: name it after --, as in shoal emulate --hosts 2 -- python job.py"
        )
    if shutil.which(command[0]) is None:
        raise UsageError(f"the command {command[0]!r} is not found, or may not be executed")


@dataclass
class _Job:
    """The workers of one command, from the first to the last moment."""

    deadlines: Deadlines
    exit_codes: dict[int, int] = field(default_factory=dict)
    stderr_files: dict[int, Path] = field(default_factory=dict)
    killed: set[int] = field(default_factory=set)
    forwarded: list[int] = field(default_factory=list)
    received: int | None = None
    """The signal that asked to stop."""
    num_interrupts: int = 0
    merge_outputs: bool = False
    """A worker's stdout and stderr go to one file."""
    _workers: list[subprocess.Popen[str]] = field(default_factory=list)
    _ended_at: dict[int, float] = field(default_factory=dict)

    def run(
        self,
        command: Sequence[str],
        hosts: Hosts,
        *,
        log_dir: Path,
        env: Mapping[str, str] | None = None,
        error_folder: Path | None = None,
    ) -> None:
        """Make the hosts, run the command to its end on each, and take the hosts away."""
        log_dir.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            stack.enter_context(requests_to(self.handle))
            cluster = stack.enter_context(
                Cluster(
                    hosts=hosts.hosts,
                    nic=hosts.nic,
                    helpers=hosts.helpers,
                    helper_nic=hosts.helper_nic,
                    log_dir=log_dir,
                )
            )
            cluster.start_helpers()
            if self.forwarded:
                return

            def outputs(rank: int) -> tuple[Output, Output]:
                if rank == 0:
                    return None, None
                err = log_dir / f"worker-{rank:05}.{'log' if self.merge_outputs else 'err'}"
                self.stderr_files[rank] = err
                file = stack.enter_context(err.open("w"))
                if self.merge_outputs:
                    return file, subprocess.STDOUT
                return stack.enter_context(err.with_suffix(".out").open("w")), file

            self._workers = cluster.start_workers(
                command, workers_per_host=hosts.workers_per_host, env=env, outputs=outputs
            )
            self._await_end(error_folder)
            for index, helper in enumerate(cluster.helpers):
                if helper.poll() is not None:
                    print(
                        f"shoal: the server of helper host {index} ended early with exit code "
                        f"{helper.returncode}; its output: {cluster.helper_logs[index]}",
                        file=sys.stderr,
                    )

    def first_failures(self) -> dict[int, int]:
        """Return the exit codes without those failures that came after the first one."""
        failed = [self._ended_at[rank] for rank, code in self.exit_codes.items() if code != EXIT_OK]
        return {
            rank: code
            for rank, code in self.exit_codes.items()
            if code == EXIT_OK or self._ended_at[rank] == min(failed)
        }

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Take note of a signal; the loop passes it on. The second Ctrl-C ends all at once."""
        self.num_interrupts += number == signal.SIGINT
        if number != signal.SIGUSR1:
            self.received = number
        if (passed_on := PASSED_ON[signal.Signals(number)]) not in self.forwarded:
            self.forwarded.append(passed_on)

    def _await_end(self, error_folder: Path | None) -> None:
        sent: list[int] = []
        kill_at: dict[str, float] = {}
        while self._poll():
            now = time.monotonic()
            for number in [number for number in self.forwarded if number not in sent]:
                sent.append(number)
                self._send(number)
            codes = self.exit_codes.values()
            failed = any(code not in (EXIT_OK, EXIT_STOPPED) for code in codes)
            if failed or (error_folder is not None and read_errors(error_folder)):
                kill_at.setdefault("failure", now + self.deadlines.after_failure_s)
            if EXIT_STOPPED in codes and error_folder is not None:
                kill_at.setdefault("stop", now + self.deadlines.after_stop_s)
            if self.received is not None and self.deadlines.after_signal_s is not None:
                kill_at.setdefault("signal", now + self.deadlines.after_signal_s)
            if self.num_interrupts > 1 or now > min(kill_at.values(), default=now):
                self._kill()
            time.sleep(_POLL_S)

    def _poll(self) -> bool:
        """Note who has ended; return whether somebody still runs."""
        now = time.monotonic()
        for rank, worker in enumerate(self._workers):
            if rank not in self.exit_codes and (code := worker.poll()) is not None:
                self.exit_codes[rank] = code
                self._ended_at[rank] = now
        return len(self.exit_codes) < len(self._workers)

    def _send(self, number: int) -> None:
        for rank, worker in enumerate(self._workers):
            if rank not in self.exit_codes:
                with suppress(ProcessLookupError):
                    worker.send_signal(number)

    def _kill(self) -> None:
        alive = [rank for rank in range(len(self._workers)) if rank not in self.exit_codes]
        self.killed.update(alive)
        end([self._workers[rank] for rank in alive], grace_s=0)
