"""Starts ``shoal launch`` on other hosts by ssh or by MPI's mpirun, and waits until all have ended.

The stdin of each start carries the job's secret, in its first line. When it closes, because this process
stops or is killed, the launchers on the other hosts save and exit (``stdin_secret.py``). No secret is in a
file or on a command line, and nothing is left running.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from shoal.errors import (
    EXIT_FAILURE,
    EXIT_LOST,
    EXIT_OK,
    EXIT_STOPPED,
    EXIT_USAGE,
    WARNING_SIGNALS,
    ShoalError,
    UsageError,
)
from shoal.launch.job_command import JobCommand
from shoal.launch.job_size import HELPER_PORT, RENDEZVOUS_PORT, SIZE, Workers

_HOST = re.compile(r"([\w.-]+@)?[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?")
_ASK_S = 60.0
_HELPERS_LEAVE_S = 20.0
_OTHERS_END_S = 15.0
"""Time for the other hosts to notice a failure and to report it."""
_POLL_S = 0.1
_BY_WEIGHT = (EXIT_USAGE, EXIT_FAILURE, EXIT_LOST, EXIT_STOPPED, EXIT_OK)


@dataclass(frozen=True, kw_only=True)
class RemoteJob(Workers):
    """Hosts of a job, by name, and the options of their launchers."""

    hosts: Annotated[tuple[str, ...], SIZE]
    """Worker hosts, by names that all hosts can resolve; the launchers connect to the first."""
    helper_hosts: Annotated[tuple[str, ...], SIZE] = ()
    """Helper hosts."""
    folder: Path | None = None
    """Folder to run in, the same on all hosts; default: this one."""
    shoal: str = "shoal"
    """Path of shoal on the hosts, such as /opt/venv/bin/shoal."""
    interface: str | None = None
    """Network interface for shoal, gloo and NCCL."""
    port: int = RENDEZVOUS_PORT
    """Port of the first host to which the launchers connect."""
    option: tuple[str, ...] = ()
    """More options of ssh, as in --option=-F --option=config, or of mpirun."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.hosts:
            raise UsageError("name the worker hosts: --hosts node1 node2")
        for host in (*self.hosts, *self.helper_hosts):
            if not _HOST.fullmatch(host):
                raise UsageError(f"{host!r} is no name of a host")
        names = [name_of(host) for host in (*self.hosts, *self.helper_hosts)]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UsageError(f"the host {twice} is named twice; --workers-per-host N starts several workers")
        if not 0 < self.port < 1 << 16:
            raise UsageError(f"--port {self.port} must be from 1 to 65535")


@dataclass(frozen=True, kw_only=True)
class RemoteStart:
    """A process of this machine that starts launchers on others."""

    label: str
    command: list[str]
    is_helper: bool = False
    stop: signal.Signals | None = None
    """Signal that makes its launcher save and exit, if the end of its stdin does not."""


def name_of(host: str) -> str:
    """Return the name of ``user@name``."""
    return host.rpartition("@")[2]


def ssh_starts(job: RemoteJob, command: Sequence[str]) -> list[RemoteStart]:
    """Return the ssh commands, the helpers' first."""
    ssh = ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=10", *job.option]
    return [
        RemoteStart(label=name_of(host), command=[*ssh, host, _remote(job, words)], is_helper=is_helper)
        for host, words, is_helper in _parts(job, command)
    ]


def mpi_starts(job: RemoteJob, command: Sequence[str], version: str) -> list[RemoteStart]:
    """Return the mpirun commands, one per host, the helpers' first.

    One mpirun for all hosts would count helpers as workers, and some pass stdin to the first process only.
    Open MPI 5 does not pass on the end of stdin: USR2 replaces it, also when this process is killed.

    Args:
        job: the job.
        command: of the workers.
        version: output of ``mpirun --version``.

    Raises:
        UsageError: the MPI is unknown.
    """
    open_mpi = re.search(r"Open MPI\D*(\d+)", version)
    if open_mpi is None and "HYDRA" not in version and "Intel(R) MPI" not in version:
        raise UsageError(
            f"mpirun is of neither Open MPI nor Hydra: {version.strip()[:100]!r}; use shoal submit ssh"
        )
    mpirun, stop = ["mpirun", "--host" if open_mpi else "-hosts"], None
    if open_mpi and int(open_mpi[1]) >= 5:
        mpirun, stop = ["setpriv", "--pdeathsig", "USR2", *mpirun], signal.SIGUSR2
    folder = ["-wdir", str(job.folder)] if job.folder else []
    return [
        RemoteStart(
            label=name_of(host),
            command=[*mpirun, host, "-n", "1", *folder, *job.option, *words],
            is_helper=is_helper,
            stop=stop,
        )
        for host, words, is_helper in _parts(job, command)
    ]


def _parts(job: RemoteJob, command: Sequence[str]) -> list[tuple[str, list[str], bool]]:
    """Return each host, the helpers first, with the words of its launcher and whether it is a helper."""
    helpers = [(host, launch_words(job, helper=True), True) for host in job.helper_hosts]
    workers = [
        (host, launch_words(job, command, node_rank=rank), False) for rank, host in enumerate(job.hosts)
    ]
    return [*helpers, *workers]


def launch_words(
    job: RemoteJob, command: Sequence[str] = (), *, helper: bool = False, node_rank: int = 0
) -> list[str]:
    """Return the words of ``shoal launch`` for a host."""
    rdzv = f"--rdzv={name_of(job.hosts[0])}:{job.port}"
    common = ["--stdin-secret", rdzv, *([f"--interface={job.interface}"] if job.interface else [])]
    common += [f"--transport={job.transport}"] if job.transport else []
    if helper:
        return [job.shoal, "launch", *common, "--role=helper", f"--helper-port={HELPER_PORT}"]
    number = (f"--nnodes={len(job.hosts)}", f"--node-rank={node_rank}")
    servers = ",".join(f"{name_of(host)}:{HELPER_PORT}" for host in job.helper_hosts)
    named = ["env", f"SHOAL_HELPERS={servers}"] if servers else []
    return [*named, job.shoal, "launch", *common, *number, *job.launch_options(), "--", *command]


def _remote(job: RemoteJob, words: Sequence[str]) -> str:
    """Return the command line for the remote shell."""
    return f"cd {shlex.quote(str(job.folder or Path.cwd()))} && exec {shlex.join(words)}"


def check_hosts(job: RemoteJob, version: str, command: JobCommand | None) -> None:
    """Compare the versions of shoal on all hosts, by ssh, and look for the command's files on worker hosts.

    Args:
        job: the job.
        version: of shoal here.
        command: of the workers; ``None``: its files are not looked for.

    Raises:
        ShoalError: a host cannot be reached, has no shoal or another version, or lacks a file.
    """
    processes = {
        host: subprocess.Popen(
            [
                *("ssh", "-T", "-o", "BatchMode=yes"),
                *job.option,
                host,
                _question(job, command if host in job.hosts else None),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
        for host in (*job.hosts, *job.helper_hosts)
    }
    wrong, absent = [], []
    for host, process in processes.items():
        try:
            output, complaint = process.communicate(timeout=_ASK_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            wrong.append(f"{host} did not answer in {_ASK_S:g} s")
            continue
        if process.returncode != 0:
            wrong.append(f"{host}: {complaint.strip() or f'exit code {process.returncode}'}")
        elif (lines := output.strip().splitlines())[:1] != [version]:
            wrong.append(f"{host} has {output.strip()!r:.100}")
        elif lines[1:]:
            absent.append(f"{host} has no {' and no '.join(lines[1:])}")
    if wrong:
        raise ShoalError(
            f"not all hosts have {version} as {job.shoal} in {job.folder or Path.cwd()}: {'; '.join(wrong)} "
            "(--shoal PATH, --folder DIR)"
        )
    if absent:
        raise ShoalError(
            f"not all hosts have the files of the command in {job.folder or Path.cwd()}: {'; '.join(absent)} "
            "(--folder DIR; --no-check starts it anyway)"
        )


def _question(job: RemoteJob, command: JobCommand | None) -> str:
    """Return the remote command line that prints shoal's version, then the files that are not there."""
    question = f"cd {shlex.quote(str(job.folder or Path.cwd()))} && {shlex.quote(job.shoal)} --version"
    if command is None or command.is_elsewhere:
        return question
    tests = [("command -v --", command.words[0]), *([("test -e", command.script)] if command.script else [])]
    looked = [f"{test} {shlex.quote(file)} > /dev/null || echo {shlex.quote(file)}" for test, file in tests]
    return f"{question} && {{ {'; '.join(looked)}; }}"


def run(starts: Sequence[RemoteStart]) -> int:
    """Run all starts until they end and return the exit code of the job.

    Their output goes to this process's stdout and stderr, each line after its host's name. The stdin of all
    is closed by a signal, or 15 s after a worker host has failed.
    """
    secret = secrets.token_hex(32)
    running: list[tuple[RemoteStart, subprocess.Popen[str]]] = []
    stdins: list[int] = []
    closings: list[bool] = []

    def close(*signal_and_frame: Any) -> None:
        # a second signal may interrupt this anywhere: a file object would refuse to be closed twice at once
        closings.append(True)
        with suppress(IndexError):
            while True:
                os.close(stdins.pop())
        for start, process in running:
            if start.stop is not None and process.poll() is None:
                process.send_signal(start.stop)

    handlers = {
        number: signal.signal(number, close)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *WARNING_SIGNALS)
    }
    readers = []
    try:
        for start in starts:
            running.append((start, process := _started(start, secret, stdins)))
            if closings:
                close()
            for source, out in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                reader = threading.Thread(target=_copy, args=(start.label, source, out), daemon=True)
                reader.start()
                readers.append(reader)
        codes = _await_all([process for each, process in running if not each.is_helper], close)
        close()
        for each, process in running:
            if each.is_helper:
                _end_helper(process)
    finally:
        close()
        for _, process in running:
            if process.poll() is None:
                process.terminate()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for reader in readers:
        reader.join(_HELPERS_LEAVE_S)
    # ssh itself ends with 255, and a signal is negative: the host is gone
    known = [
        code if code in _BY_WEIGHT else EXIT_LOST if code in (255, *range(-64, 0)) else EXIT_FAILURE
        for code in codes
    ]
    return next(code for code in _BY_WEIGHT if code in known)


def _await_all(workers: Sequence[subprocess.Popen[str]], close: Callable[[], None]) -> list[int]:
    """Return the exit codes of the worker hosts; some time after a failure, stop the others."""
    failed_at = None
    while any(process.poll() is None for process in workers):
        if failed_at is None and any(process.poll() for process in workers):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() > failed_at + _OTHERS_END_S:
            close()
            break
        time.sleep(_POLL_S)
    return [process.wait() for process in workers]


def _started(start: RemoteStart, secret: str, stdins: list[int]) -> subprocess.Popen[str]:
    """Start a process; its stdin has the secret and stays open until its writing end in ``stdins`` closes."""
    stdin, writer = os.pipe()
    stdins.append(writer)
    with suppress(OSError):
        os.write(writer, f"{secret}\n".encode())
    try:
        return subprocess.Popen(
            start.command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C is for this process, which closes the stdins
        )
    except FileNotFoundError:
        raise ShoalError(f"{start.command[0]} was not found on this machine; install it") from None
    finally:
        os.close(stdin)


def _copy(label: str, source: Any, out: Any) -> None:
    with source:
        for line in source:
            out.write(f"{label}: {line}")
            out.flush()


def _end_helper(process: subprocess.Popen[str]) -> None:
    try:
        process.wait(_HELPERS_LEAVE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
