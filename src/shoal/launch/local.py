"""Starts the workers of this host with torchrun's agent, on one host or by hand on several.

1. The agent (``LocalElasticAgent``, which torchrun itself runs) meets the other hosts' launchers
   (:mod:`shoal.launch.rendezvous`), hands out ranks and starts the command once for each worker.
2. A request to stop (SIGTERM, SIGUSR1, SIGHUP, Ctrl-C) is passed on to the workers, which save and leave.
3. When a worker fails, the others get a few seconds to end by themselves; then they are killed.
4. :func:`shoal.launch.outcome.decide_outcome` finds the failure that caused the others; it is shown once.

``elastic_launch`` wraps the same agent but does not say which processes it has started, ends the workers on
SIGTERM where ours are to save first, and waits 30 s for workers that hang in a collective.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from shoal.env import (
    INTERFACE,
    LAUNCH_DIR,
    MAKE_SECRET,
    SECRET,
    SECRET_FILE,
    STORE_FILE,
    child_environment,
    secret,
    without,
)
from shoal.errors import EXIT_STOPPED, ShoalError, UsageError
from shoal.launch.ending import EXIT_INTERRUPTED, PASSED_ON, Deadlines, requests_to
from shoal.launch.job_secret import write_secret
from shoal.launch.outcome import decide_outcome
from shoal.launch.worker import read_errors

if TYPE_CHECKING:
    from shoal.launch.agent import WorkerAgent

_POLL_S = 0.1
_LISTENS_ON = (INTERFACE, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(kw_only=True)
class _Requests:
    """Requests to stop that this process was sent; the second Ctrl-C is one to end at once."""

    agent: WorkerAgent | None = None
    num_interrupts: int = 0
    before_start: bool = False

    @property
    def to_end_at_once(self) -> bool:
        return self.num_interrupts > 1

    def handle(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        self.num_interrupts += received == signal.SIGINT
        # send() waits for a start that is under way, which this handler does not interrupt: it is a thread's
        if self.agent is None or not self.agent.send(PASSED_ON[received]):
            self.before_start = True
        elif self.to_end_at_once:
            self.agent.kill_workers()


def launch(
    command: Sequence[str],
    *,
    num_workers: int,
    log_dir: Path,
    nnodes: int = 1,
    rdzv: str | None = None,
    rendezvous_deadline_s: float = 900.0,
    grace_s: float = 5.0,
) -> int:
    """Run ``command`` as ``num_workers`` workers on this host and return the exit code of the job.

    The workers find their place by :func:`shoal.env.worker_env`: in RANK, WORLD_SIZE, LOCAL_RANK and
    LOCAL_WORLD_SIZE; on one host also in SHOAL_STORE_FILE, on several in MASTER_ADDR and MASTER_PORT. They
    should run under :func:`shoal.launch.worker.run_worker`. Worker 0 writes to this process's stdout and
    stderr, the others to ``log_dir/worker-00001.log`` and so on. To be called in the main thread, which hears
    the signals.

    On one host nobody listens on a port for the rendezvous, and the workers' backends listen on the loopback
    interface unless the user has chosen another. The job's secret goes to the workers in a file; on one host
    the launcher makes it if the user has given none.

    Args:
        command: the program and its arguments.
        num_workers: workers on this host; the same on every host.
        log_dir: folder for the other workers' output; made if it is not there.
        nnodes: number of hosts; the same command is started on each.
        rdzv: ``host:port`` of one of them, where the launchers meet. Several hosts need it; one does not.
        rendezvous_deadline_s: how long to wait for the other hosts.
        grace_s: how long the other workers may go on after one has failed, before they are killed.

    Returns:
        0, :data:`~shoal.errors.EXIT_STOPPED` when the workers saved and left, or that of the first failure.

    Raises:
        UsageError: a number is below 1, ``rdzv`` is missing or not ``host:port``, or several hosts have no
            secret or one that others can read.
        ShoalError: the other hosts did not come, or somebody else wrote where they meet.
    """
    if num_workers < 1 or nnodes < 1:
        raise UsageError(f"--workers {num_workers} and --nnodes {nnodes} must be at least 1")
    if nnodes > 1 and rdzv is None:
        raise UsageError(f"--nnodes {nnodes} needs --rdzv HOST:PORT, the same on every host")
    host, port = ("", 0) if rdzv is None else _parse_rendezvous(rdzv)
    given = secret()
    if nnodes > 1 and given is None:
        raise UsageError(
            f"--nnodes {nnodes} needs the job's secret, so that strangers cannot take part. Make one with "
            f"{MAKE_SECRET}, copy it to every host, and on each: export {SECRET_FILE}=job.secret"
        )
    log_dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="shoal-launch-"))  # 0700
    requests = _Requests()
    try:
        with requests_to(requests.handle), _quiet_loggers(), without(SECRET):
            from shoal.launch.agent import WorkerLogs, make_agent
            from shoal.launch.rendezvous import OneHost, SeveralHosts

            job_secret = given or secrets.token_hex(32).encode()
            several = SeveralHosts(
                host=host,
                port=port,
                num_hosts=nnodes,
                num_workers=num_workers,
                secret=job_secret,
                deadline_s=rendezvous_deadline_s,
            )
            worker_env = {
                **_worker_env(folder, num_workers),
                **(_one_host_env(folder) if nnodes == 1 else {}),
                SECRET_FILE: str(write_secret(folder, job_secret)),
            }
            requests.agent = agent = make_agent(
                list(command),
                num_workers=num_workers,
                rendezvous=several if nnodes > 1 else OneHost(),
                logs=WorkerLogs(log_dir, worker_env, folder),
                error_folder=folder,
                deadlines=Deadlines(after_failure_s=grace_s),
            )
            agent.start()
            while not requests.before_start and not agent.wait(_POLL_S):
                pass
        return _finish(agent, requests, folder, lambda error: _no_rendezvous(nnodes, host, port, error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _finish(
    agent: WorkerAgent, requests: _Requests, folder: Path, no_rendezvous: Callable[[Exception], ShoalError]
) -> int:
    """Show what went wrong, and return the exit code of the job."""
    if requests.before_start:
        return EXIT_STOPPED
    if requests.to_end_at_once:
        return EXIT_INTERRUPTED
    exit_codes = agent.exit_codes
    if agent.failure is not None and not exit_codes:
        if isinstance(agent.failure, ShoalError):
            raise agent.failure
        raise no_rendezvous(agent.failure) from agent.failure
    return decide_outcome(
        exit_codes,
        read_errors(folder),
        killed=agent.killed,
        forwarded=[int(number) for number in agent.forwarded],
        logs=agent.stderr_files,
    ).tell()


def _no_rendezvous(nnodes: int, host: str, port: int, error: Exception) -> ShoalError:
    return ShoalError(
        f"the launchers of {nnodes} hosts did not come together at {host}:{port} ({error}); start the same "
        "command with the same --nnodes and --rdzv on each, and see that the port can be reached"
    )


def _parse_rendezvous(rdzv: str) -> tuple[str, int]:
    host, _, port = rdzv.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UsageError(
            f"--rdzv {rdzv!r} must be HOST:PORT with a port from 1 to 65535, such as node1:29400"
        )
    return host.lower(), int(port)  # as torch's URL has it, which it compares with MASTER_ADDR


def _worker_env(folder: Path, num_workers: int) -> dict[str, str]:
    changes = {LAUNCH_DIR: str(folder)}
    if "OMP_NUM_THREADS" not in child_environment():  # torchrun would set 1
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        changes["OMP_NUM_THREADS"] = str(max(1, num_cores // num_workers))
    return changes


def _one_host_env(folder: Path) -> dict[str, str]:
    """Return the variables by which workers meet in a file, and talk over loopback if they need a network.

    gloo, NCCL and shoal would listen on the address that the host's name stands for.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    inherited = child_environment()
    return {
        STORE_FILE: str(folder / "store"),
        **{name: loopback for name in _LISTENS_ON if not inherited.get(name)},
    }


@contextmanager
def _quiet_loggers() -> Iterator[None]:
    levels = {name: logging.getLogger(name).level for name in _NOISY_LOGGERS}
    try:
        for name in _NOISY_LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


# What these say of a failure is said better, and once, by the outcome
_NOISY_LOGGERS = (
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.elastic.multiprocessing.api",
)
