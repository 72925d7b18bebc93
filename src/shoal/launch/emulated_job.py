"""Runs a command as the workers of an emulated cluster: ``shoal emulate`` and ``--on emulated``.

:class:`shoal.launch.supervision.Job` applies the same rules as on this host.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.env.settings import INTERFACE as INTERFACE_VARIABLE
from shoal.env.settings import LAUNCH_DIR
from shoal.env.worker import STORE_FILE
from shoal.errors import EXIT_OK, UsageError
from shoal.launch.job_size import check_use_of_helpers
from shoal.launch.supervision import Job, Outcome

if TYPE_CHECKING:
    from shoal.launch.emulated import Cluster


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Options of an emulated cluster, with the arguments of :class:`shoal.launch.emulated.Cluster`."""

    hosts: int | None = None
    """Number of emulated hosts. Needs Linux, root and iproute2."""
    nic: str | None = None
    """Rate of each emulated host's link in each direction, such as 200mbit; default: not limited."""
    helpers: int = 0
    """Emulated helper hosts, each with a server that sums gradients for backend shoal."""
    helper_nic: str | None = None
    """Rate of the helper hosts' links; default: --nic."""

    def changed_options(self) -> list[str]:
        """Return the options that differ from their defaults."""
        names = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        return [f"--{name.replace('_', '-')}" for name in names]

    def check(self, workers_per_host: int) -> str:
        """Return a description of the hosts, one per line.

        Raises:
            UsageError: a number or a rate is invalid.
        """
        from shoal.launch.emulated_network import describe, plan_cluster  # not for --help

        if workers_per_host < 1:
            raise UsageError(f"{workers_per_host} workers per host must be at least 1")
        return describe(plan_cluster(**asdict(self), prefix="shoal"), workers_per_host=workers_per_host)


class HostEvent(NamedTuple):
    """A host that is cut off, or one that comes back."""

    seconds: float
    """After the workers were started."""
    host: int | None
    """The host that is cut off; ``None``: the one that is away longest comes back."""


def read_events(text: str, num_hosts: int) -> list[HostEvent]:
    """Return the events of ``HOST@SECONDSs,join@SECONDSs``.

    Raises:
        UsageError: the text has another form; an event is out of order; there is no such host to lose, or
            none to come back.

    Example:
        >>> read_events("3@40s,join@60s", num_hosts=4)
        [HostEvent(seconds=40.0, host=3), HostEvent(seconds=60.0, host=None)]
    """
    events: list[HostEvent] = []
    away: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,3}|join)@(\d{1,6}(?:\.\d{1,3})?)s", part)
        if match is None:
            raise UsageError(f"--fail {text!r}: {part!r} is neither HOST@SECONDSs, as in 3@40s, nor join@60s")
        host = None if match[1] == "join" else int(match[1])
        event = HostEvent(float(match[2]), host)
        if events and event.seconds < events[-1].seconds:
            raise UsageError(f"--fail {text!r}: {part} comes before {events[-1].seconds:g}s: put it in order")
        if host is None and not away:
            raise UsageError(f"--fail {text!r}: no host is away at {part}: lose one before")
        if host is not None and (host >= num_hosts or host in away):
            raise UsageError(f"--fail {text!r}: {part} names none of {num_hosts} hosts that is there then")
        events.append(event)
        away = away[1:] if host is None else [*away, host]
    return events


def emulate(
    command: Sequence[str], hosts: Hosts, *, workers_per_host: int = 1, log_dir: Path | None = None
) -> int:
    """Run any command on emulated hosts and return its exit code: 0, or that of the first failure.

    Rank 0 writes to this process's stdout and stderr, the others to files in ``log_dir``; by default to a
    temporary folder, kept only after a failure. A signal ends all: 128 + its number.

    Raises:
        UsageError: a number or a rate is invalid, or this machine cannot emulate hosts.
        ShoalError: the hosts could not be created or a helper's server did not start.
    """
    hosts.check(workers_per_host)
    if not command:
        raise UsageError(
            "no command to run: name it after --, as in shoal emulate --hosts 2 -- python job.py"
        )
    if shutil.which(command[0]) is None:
        raise UsageError(f"the command {command[0]!r} is not found, or may not be executed")
    check_use_of_helpers(command, hosts.helpers)
    folder = log_dir or Path(tempfile.mkdtemp(prefix="shoal-emulate-"))
    outcome = Outcome(exit_code=EXIT_OK)
    try:
        with Job(folder, error_dir=None) as job:
            _run(job, command, hosts, workers_per_host, log_dir=folder)
        outcome = job.outcome()
        if job.received is not None and outcome.exit_code != EXIT_OK:
            outcome = Outcome(exit_code=128 + job.received)
        return outcome.report()
    finally:
        if log_dir is None and not outcome.text:
            shutil.rmtree(folder, ignore_errors=True)


def launch_emulated(
    command: Sequence[str],
    hosts: Hosts,
    *,
    workers_per_host: int,
    log_dir: Path,
    is_elastic: bool = False,
    events: Sequence[HostEvent] = (),
) -> int:
    """Run a worker command on emulated hosts, as :func:`shoal.launch.local.launch` does on this host.

    Args:
        is_elastic: workers go on without one that is lost, and take it in when it is started again.
        events: hosts that are cut off and come back.

    Returns:
        0, :data:`~shoal.errors.EXIT_STOPPED` when the workers saved and left, or that of the first failure.

    Raises:
        UsageError: a number or a rate is invalid, or this machine cannot emulate hosts.
        ShoalError: the hosts could not be created or a helper's server did not start.
    """
    from shoal.launch.emulated_network import INTERFACE  # not for --help

    hosts.check(workers_per_host)
    folder = Path(tempfile.mkdtemp(prefix="shoal-launch-"))
    try:
        with Job(log_dir, error_dir=folder) as job:
            env = {LAUNCH_DIR: str(folder)}
            if is_elastic:  # a store that stays when a host is lost
                env |= {STORE_FILE: str(folder / "store"), INTERFACE_VARIABLE: INTERFACE}
            failures = Failures(events, workers_per_host) if is_elastic else None
            _run(job, command, hosts, workers_per_host, log_dir=log_dir, env=env, failures=failures)
        return job.outcome().report()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Failures:
    """Cuts hosts off and connects them again, at their times, in a thread."""

    def __init__(self, events: Sequence[HostEvent], workers_per_host: int) -> None:
        self._events, self._workers_per_host = events, workers_per_host
        self._away: list[int] = []

    def has_host_of(self, rank: int) -> bool:
        """Return whether the host of a worker is connected."""
        return rank // self._workers_per_host not in self._away

    @contextmanager
    def of(self, cluster: Cluster) -> Iterator[None]:
        """Let the hosts of a cluster fail in this block."""
        ended = threading.Event()
        thread = threading.Thread(target=self._run, args=(cluster, ended), name="failures", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _run(self, cluster: Cluster, ended: threading.Event) -> None:
        began = time.monotonic()
        for event in self._events:
            if ended.wait(max(0.0, began + event.seconds - time.monotonic())):
                return
            host = self._away[0] if event.host is None else event.host
            cluster.link(host, up=event.host is None)
            if event.host is None:
                self._away.remove(host)
            else:
                self._away.append(host)
            what = "is connected again" if event.host is None else "is cut off"
            print(f"shoal: host {host} {what} after {event.seconds:g} s", file=sys.stderr, flush=True)


def _run(
    job: Job,
    command: Sequence[str],
    hosts: Hosts,
    workers_per_host: int,
    *,
    log_dir: Path,
    env: Mapping[str, str] | None = None,
    failures: Failures | None = None,
) -> None:
    """Create the hosts, run the command on each until it ends, and remove the hosts."""
    from shoal.launch.emulated import Cluster

    with Cluster(**asdict(hosts), log_dir=log_dir) as cluster:
        cluster.start_helpers()
        if job.stop_requested:
            return
        options: Any = {"workers_per_host": workers_per_host, "env": env, "outputs": job.outputs}
        workers = dict(enumerate(cluster.start_workers(command, **options)))
        if failures is None:
            job.wait(workers)
        else:
            with failures.of(cluster):
                job.wait(
                    workers,
                    restart=lambda rank: cluster.start_worker(rank, command, **options),
                    can_restart=failures.has_host_of,
                )
        for index, helper in enumerate(cluster.helpers):
            if helper.poll() is not None:
                print(
                    f"shoal: the server of helper host {index} ended early with exit code "
                    f"{helper.returncode}; its output: {cluster.helper_logs[index]}",
                    file=sys.stderr,
                )
