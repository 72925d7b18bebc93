"""Runs a command as the workers of an emulated cluster: ``shoal emulate`` and ``--on emulated``.

:class:`shoal.launch.supervision.Job` applies the same rules as on this host.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from shoal.env.settings import LAUNCH_DIR
from shoal.errors import EXIT_OK, UsageError
from shoal.launch.job_size import check_use_of_helpers
from shoal.launch.supervision import Job, Outcome


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


def launch_emulated(command: Sequence[str], hosts: Hosts, *, workers_per_host: int, log_dir: Path) -> int:
    """Run a worker command on emulated hosts, as :func:`shoal.launch.local.launch` does on this host.

    Returns:
        0, :data:`~shoal.errors.EXIT_STOPPED` when the workers saved and left, or that of the first failure.

    Raises:
        UsageError: a number or a rate is invalid, or this machine cannot emulate hosts.
        ShoalError: the hosts could not be created or a helper's server did not start.
    """
    hosts.check(workers_per_host)
    folder = Path(tempfile.mkdtemp(prefix="shoal-launch-"))
    try:
        with Job(log_dir, error_dir=folder) as job:
            _run(job, command, hosts, workers_per_host, log_dir=log_dir, env={LAUNCH_DIR: str(folder)})
        return job.outcome().report()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(
    job: Job,
    command: Sequence[str],
    hosts: Hosts,
    workers_per_host: int,
    *,
    log_dir: Path,
    env: Mapping[str, str] | None = None,
) -> None:
    """Create the hosts, run the command on each until it ends, and remove the hosts."""
    from shoal.launch.emulated import Cluster

    with Cluster(**asdict(hosts), log_dir=log_dir) as cluster:
        cluster.start_helpers()
        if job.stop_requested:
            return
        workers = cluster.start_workers(
            command, workers_per_host=workers_per_host, env=env, outputs=job.outputs
        )
        job.wait(dict(enumerate(workers)))
        for index, helper in enumerate(cluster.helpers):
            if helper.poll() is not None:
                print(
                    f"shoal: the server of helper host {index} ended early with exit code "
                    f"{helper.returncode}; its output: {cluster.helper_logs[index]}",
                    file=sys.stderr,
                )
