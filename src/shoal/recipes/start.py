"""Joins the workers of a command if this process is one of them, else starts them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoal.env import WorkerEnv, worker_env
from shoal.errors import EXIT_OK, UsageError
from shoal.launch.emulated_job import Hosts, launch_emulated
from shoal.launch.local import launch
from shoal.train.run_dir import require_free, require_writable


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Options of starting workers."""

    workers: int | None = None
    """Workers on this host; default: one a GPU, or one."""
    nnodes: int = 1
    """Hosts; start the same command on each, with --rdzv and the same secret in SHOAL_SECRET_FILE."""
    rdzv: str | None = None
    """HOST:PORT of one host, where all meet; it listens there and has rank 0."""
    on: Literal["local", "emulated"] = "local"
    """local: workers on this host; emulated: on hosts with a network of their own, made on this machine."""
    hosts: int | None = None
    """Emulated hosts, each with --workers workers."""
    nic: str | None = None
    """Rate of each emulated host's link in each direction, such as 200mbit; default: not limited."""
    helpers: int = 0
    """Emulated helper hosts, which only sum gradients."""
    helper_nic: str | None = None
    """Rate of the helper hosts' links; default: --nic."""
    dry_run: bool = False
    """Print the resolved settings, the batch arithmetic, parameters and memory, and stop."""

    def emulated_hosts(self) -> Hosts | None:
        """Return the emulated hosts to run on, or ``None`` for this host.

        Raises:
            UsageError: options that do not go together.
        """
        if self.on == "local":
            given = {"--hosts": self.hosts, "--nic": self.nic, "--helper-nic": self.helper_nic}
            names = [name for name, value in given.items() if value is not None]
            names += ["--helpers"] if self.helpers else []
            if names:
                raise UsageError(f"{', '.join(names)} set up emulated hosts: add --on emulated")
            return None
        if self.hosts is None:
            raise UsageError("--on emulated needs --hosts N, the number of hosts to emulate")
        if self.nnodes != 1 or self.rdzv is not None:
            raise UsageError(
                "--nnodes and --rdzv name real hosts and do not go with --on emulated: use --hosts"
            )
        return Hosts(
            hosts=self.hosts,
            nic=self.nic,
            helpers=self.helpers,
            helper_nic=self.helper_nic,
            workers_per_host=1 if self.workers is None else self.workers,
        )


def start(
    how: Launch,
    *,
    command: list[str],
    run_dir: Path,
    describe: Callable[[int], list[str]],
    work: Callable[[WorkerEnv], int],
) -> int:
    """Do a worker's work if this process is one, else start the workers; return the exit code.

    Args:
        command: what a worker is started with: this command again.
        run_dir: the run's directory; the workers' output goes into its folder ``logs``.
        describe: checks the settings for a number of workers, and returns the lines of a dry run.
        work: what a worker does at its place.

    Raises:
        UsageError: settings that cannot work together or with the data, or a job that uses ``run_dir``.
        ShoalError: a worker failed.
    """
    place = worker_env()
    if place is not None:
        from shoal.launch.worker import run_worker

        return run_worker(lambda: work(place))
    emulated, num_local = how.emulated_hosts(), how.workers
    if not num_local:
        from torch import cuda  # takes seconds, which a launcher with --workers does without

        num_local = max(cuda.device_count(), 1)
    hosts = [] if emulated is None else ["emulated hosts", emulated.check()]
    lines = describe(num_local * how.nnodes if emulated is None else emulated.num_workers)
    if how.dry_run:
        print("\n".join([*lines, *hosts, "dry run: nothing was started"]))
        return EXIT_OK
    require_writable(run_dir)
    require_free(run_dir)  # before the workers' logs are written over
    log_dir = run_dir / "logs"
    if emulated is not None:
        return launch_emulated(command, emulated, log_dir=log_dir)
    return launch(command, num_workers=num_local, nnodes=how.nnodes, rdzv=how.rdzv, log_dir=log_dir)
