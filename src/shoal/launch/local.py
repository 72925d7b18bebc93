"""Starts the workers of this host, for a job on one host or on several.

1. Launchers of several hosts assign ranks (:func:`shoal.launch.host_rendezvous.join_hosts`).
2. The command is started once per worker, with torchrun's environment variables.
3. :class:`shoal.launch.supervision.Job` forwards signals, ends the others when a worker fails, and shows the
   failure that caused the others once.

torchrun's agent is not used: it unpickles its rendezvous, ends workers on SIGTERM before they can save, and
waits 30 s for workers that hang in a collective.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.env.launcher import STORE_PORT, rendezvous
from shoal.env.machine import num_cores
from shoal.env.secret import MAKE_SECRET, job_secret
from shoal.env.settings import INTERFACE, LAUNCH_DIR, SECRET, SECRET_FILE
from shoal.env.variables import child_environment, without, without_brackets
from shoal.env.worker import STORE_FILE
from shoal.errors import EXIT_STOPPED, UsageError
from shoal.launch.spot_notice import watched_notice
from shoal.launch.supervision import POLL_S, THREADS, Job, Outcome, worker_variables, write_secret

if TYPE_CHECKING:
    from shoal.launch.host_rendezvous import HostGroup

_LOOPBACK = "127.0.0.1"
INTERFACE_VARIABLES = (INTERFACE, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_ELSEWHERE = "192.0.2.1"
"""An address for documentation, which no host has: it is reached by the default route."""
_SIOCGIFADDR = 0x8915
STOP_DEADLINE_S = 10.0
"""Time for a rendezvous to stop, whose store may not answer."""
_RESTARTS = {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
"""By these, and TORCHELASTIC_RUN_ID, libraries recognise workers of a launcher."""


def launch(
    command: Sequence[str],
    *,
    num_workers: int,
    log_dir: Path,
    nnodes: int = 1,
    rdzv: str | None = None,
    rendezvous_deadline_s: float = 900.0,
    run_id: str = "shoal",
    failure_file: Path | None = None,
    helpers_wait: bool = False,
    usr2_is_term: bool = False,
    settle: Callable[[HostGroup], Sequence[str]] | None = None,
    is_elastic: bool = False,
) -> int:
    """Run ``command`` as ``num_workers`` workers on this host and return the exit code of the job.

    The workers read their rank by :func:`shoal.env.launcher.worker_env`, from RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT; on one host SHOAL_STORE_FILE goes before the last two. They
    should run under :func:`shoal.launch.worker.run_worker`. Rank 0 writes to this process's stdout and
    stderr, the others to ``log_dir/worker-00001.out`` and ``.err`` and so on. Call it in the main thread,
    which receives the signals.

    On one host the rendezvous uses a file, and a port only if a script asks torch for the URL ``env://``. The
    workers' backends listen on the loopback interface unless the user has chosen another. The job's secret
    goes to the workers in a file; on one host the launcher creates one if the user has not.

    Args:
        command: the program and its arguments.
        num_workers: workers on this host; the same on every host.
        log_dir: folder for the other workers' output; created if missing.
        nnodes: number of hosts; start the same command on each.
        rdzv: ``host:port`` of one of them, for the launchers' rendezvous; required for several hosts, unless
            MASTER_ADDR and MASTER_PORT are set.
        rendezvous_deadline_s: seconds to wait for the other hosts.
        run_id: name of this start of the job, which workers find in TORCHELASTIC_RUN_ID.
        failure_file: file for the text of a failure, which is shown too.
        helpers_wait: helpers connect to ``rdzv`` too, even with one host, and end with the launchers.
        usr2_is_term: SIGUSR2 is mpirun's way to ask for the end; workers get SIGTERM.
        settle: on several hosts, returns the command once they have met: what all of them have to agree on.
        is_elastic: workers go on without one that is lost, and take it in when it is started again.

    Returns:
        0, :data:`~shoal.errors.EXIT_STOPPED` when the workers saved and left, or that of the first failure.

    Raises:
        UsageError: a number is below 1, ``rdzv`` is missing or not ``host:port``, or several hosts have no
            secret or one that others can read.
        ShoalError: the other hosts did not join, or a stranger wrote to their store.
    """
    given_secret = job_secret()
    host, port = _rendezvous_of(num_workers, nnodes, rdzv, has_secret=given_secret is not None)
    folder = Path(tempfile.mkdtemp(prefix="shoal-launch-"))  # 0700
    try:
        job = Job(log_dir, error_dir=folder, usr2_is_term=usr2_is_term)
        with job, watched_notice(_end_workers), without(SECRET):
            secret = given_secret or secrets.token_hex(32).encode()
            group = None
            if nnodes > 1 or helpers_wait:
                group = _meet(
                    job,
                    host,
                    port,
                    nnodes,
                    num_workers,
                    secret=secret,
                    deadline_s=rendezvous_deadline_s,
                    is_elastic=is_elastic,
                )
            if job.stop_requested:
                return EXIT_STOPPED
            shared = {
                SECRET_FILE: str(write_secret(folder, secret)),
                **_worker_env(folder, num_workers),
                **(_one_host_env(folder) if nnodes == 1 else _several_hosts_env(host, port)),
                **_RESTARTS,
                "TORCHELASTIC_RUN_ID": run_id,
                "TORCHELASTIC_USE_AGENT_STORE": str(nnodes > 1),
            }
            if group is not None and settle is not None:
                command = settle(group)
            first = group.rank * num_workers if group else 0
            master = _LOOPBACK, _free_port()
            if group is not None and nnodes > 1:
                master = host, group.master_port
            ranks = range(first, first + num_workers)
            start = partial(
                _start_worker, job, command, shared, num_hosts=nnodes, num_local=num_workers, master=master
            )
            job.wait(
                {rank: start(rank) for rank in ranks},
                restart=start if is_elastic else None,
                has_other_hosts=nnodes > 1,
            )
            outcome = _common_outcome(job, group, nnodes, is_elastic=is_elastic)
        if failure_file is not None and outcome.text:
            failure_file.parent.mkdir(parents=True, exist_ok=True)
            failure_file.write_text(outcome.text, encoding="utf-8")
        return outcome.report()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _end_workers(notice: str) -> None:
    """Ask the workers of this host to save and leave, as by SIGTERM."""
    text = f"shoal: EC2 takes this instance back ({notice}): its workers save and leave"
    print(text, file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)


def _meet(
    job: Job,
    host: str,
    port: int,
    num_hosts: int,
    num_workers: int,
    *,
    secret: bytes,
    deadline_s: float,
    is_elastic: bool,
) -> HostGroup | None:
    """Return the group of the launchers of all hosts, or ``None`` if the job was asked to stop before."""
    from shoal.launch.host_rendezvous import join_hosts  # not for one host

    return _unless_stopped(
        job,
        partial(
            join_hosts,
            host=host,
            port=port,
            num_hosts=num_hosts,
            num_workers=num_workers,
            secret=secret,
            deadline_s=deadline_s,
            stopped=lambda: job.stop_requested,
            is_elastic=is_elastic,
        ),
    )


def _common_outcome(job: Job, group: HostGroup | None, num_hosts: int, *, is_elastic: bool) -> Outcome:
    """Return the outcome of a job whose workers have ended here; leave the group of the hosts."""
    outcome = job.outcome(has_other_hosts=num_hosts > 1)
    if group is None:
        return outcome
    code, text = group.cause(outcome.exit_code, outcome.text)
    group.leave(wait=job.num_interrupts < 2, may_lack=is_elastic or job.has_failed, exit_code=code)
    return Outcome(exit_code=code, text=text)


def _rendezvous_of(num_workers: int, nnodes: int, rdzv: str | None, *, has_secret: bool) -> tuple[str, int]:
    """Check the numbers and the secret; return the rendezvous' host and port, empty and 0 for one host."""
    if num_workers < 1 or nnodes < 1:
        raise UsageError(f"--workers {num_workers} and --nnodes {nnodes} must be at least 1")
    rdzv = rdzv or (rendezvous() if nnodes > 1 else None)
    if nnodes > 1 and rdzv is None:
        raise UsageError(f"--nnodes {nnodes} needs --rdzv HOST:PORT, the same on every host")
    location = ("", 0) if rdzv is None else parse_rendezvous(rdzv)
    if nnodes > 1 and not has_secret:
        raise UsageError(
            f"--nnodes {nnodes} needs the job's secret, so that strangers cannot take part. Make one with "
            f"{MAKE_SECRET}, copy it to every host, and on each: export {SECRET_FILE}=job.secret"
        )
    return location


def _start_worker(
    job: Job,
    command: Sequence[str],
    shared: Mapping[str, str],
    rank: int,
    *,
    num_hosts: int,
    num_local: int,
    master: tuple[str, int],
) -> subprocess.Popen[str]:
    """Start a worker of this host, with the shared variables and those of its rank."""
    stdout, stderr = job.outputs(rank)
    variables = worker_variables(rank, num_hosts=num_hosts, workers_per_host=num_local, master=master)
    return subprocess.Popen(
        list(command),
        env=child_environment(**shared, **variables),
        stdout=stdout,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )


def _unless_stopped(job: Job, join: Callable[[], HostGroup]) -> HostGroup | None:
    """Return the result of ``join``, or ``None`` as soon as the job is asked to stop."""
    group: Future[HostGroup] = Future()

    def run() -> None:
        try:
            group.set_result(join())
        except Exception as error:  # noqa: BLE001  # raised where the result is taken
            group.set_exception(error)

    # in a thread: the store's calls do not return for a signal's handler
    thread = threading.Thread(target=run, name="rendezvous", daemon=True)
    thread.start()
    while not group.done() and not job.stop_requested:
        time.sleep(POLL_S)
    if job.stop_requested:
        thread.join(STOP_DEADLINE_S)
        return None
    return group.result()


def parse_rendezvous(rdzv: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``.

    Raises:
        UsageError: it is of another form.
    """
    host, _, port = rdzv.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UsageError(
            f"--rdzv {rdzv!r} must be HOST:PORT with a port from 1 to 65535, such as node1:29400"
        )
    # in lower case, as in torch's URL, which it compares with MASTER_ADDR
    return without_brackets(host).lower(), int(port)


def _free_port() -> int:
    """Return a port that is free now, for the store of scripts that use MASTER_PORT."""
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _worker_env(folder: Path, num_workers: int) -> dict[str, str]:
    inherited, threads = child_environment(), str(max(1, num_cores() // num_workers))  # torchrun would set 1
    return {LAUNCH_DIR: str(folder), **{name: threads for name in THREADS if name not in inherited}}


def _one_host_env(folder: Path) -> dict[str, str]:
    """Return the variables for a rendezvous in a file and, for backends that need a network, loopback.

    gloo, NCCL and shoal would otherwise listen on the address that the host name resolves to.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    inherited = child_environment()
    return {
        STORE_FILE: str(folder / "store"),
        **{name: loopback for name in INTERFACE_VARIABLES if not inherited.get(name)},
    }


def _several_hosts_env(master: str, port: int) -> dict[str, str]:
    """Return the port for workers without torch, and the interface for gloo and shoal.

    The port is the one after ``port``. The interface is set if they would choose the loopback interface: gloo
    listens at the address of this host's own name, which is 127.0.1.1 in Debian's /etc/hosts, and shoal at
    the address towards ``master``, which on that host itself may be the same.
    """
    inherited = child_environment()
    suspects = {"GLOO_SOCKET_IFNAME": socket.gethostname(), INTERFACE: master}
    loopback = [name for name, host in suspects.items() if not inherited.get(name) and _is_loopback(host)]
    interface = outgoing_interface(master) if loopback else None
    return {STORE_PORT: str(port + 1), **(dict.fromkeys(loopback, interface) if interface else {})}


def _is_loopback(host: str) -> bool:
    try:
        return socket.gethostbyname(host).startswith("127.")
    except OSError:
        return True


def outgoing_interface(towards: str) -> str | None:
    """Return the interface towards a host; else that of the default route; else the only one."""
    addresses = _interface_addresses()
    for host in (towards, _ELSEWHERE):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
            probe.connect((host, 9))  # sends nothing, only selects a route
            if name := addresses.get(probe.getsockname()[0]):
                return name
    return next(iter(addresses.values())) if len(addresses) == 1 else None


def _interface_addresses() -> dict[str, str]:
    """Return the names of interfaces by their IPv4 address, without loopback."""
    names = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
                names[socket.inet_ntoa(answer[20:24])] = name
    return {address: name for address, name in names.items() if not address.startswith("127.")}
