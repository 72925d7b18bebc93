"""Joins the workers of a command if this process is one of them, else starts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from shoal.env.launcher import worker_env
from shoal.env.machine import num_gpus
from shoal.env.worker import WorkerEnv, num_training_hosts
from shoal.errors import EXIT_OK, UsageError
from shoal.launch.emulated_job import Hosts, read_events
from shoal.planner.hardware import Catalog, Machines, require_accelerators
from shoal.train.config import required
from shoal.train.run_dir import require_free, require_writable

if TYPE_CHECKING:
    from shoal.launch.host_rendezvous import HostGroup


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Options of starting workers."""

    workers: int | None = None
    """Workers on this host (default: one per GPU, or one), or on each emulated host (default: one)."""
    nnodes: int = 1
    """Hosts; start the same command on each, with --rdzv and the same secret in SHOAL_SECRET_FILE."""
    rdzv: str | None = None
    """HOST:PORT of the rendezvous; this host listens there and has rank 0."""
    on: Literal["local", "emulated"] = "local"
    """local: workers on this host; emulated: emulated hosts with separate networks, on this machine."""
    emulated: Annotated[Hosts, Parameter(name="*")] = field(default_factory=Hosts)
    fail: str | None = None
    """Emulated hosts that are cut off and come back, in seconds after the start, such as 3@40s,join@60s; with
    --distributed.elastic."""
    dry_run: bool = False
    """Print the resolved settings, the batch arithmetic, parameters and memory, and stop."""
    cluster: str | None = None
    """With --dry-run: hosts of the planner's catalog, such as 8xp4d.24xlarge, in place of this one."""

    def __post_init__(self) -> None:
        for name, number in (("workers", self.workers), ("nnodes", self.nnodes)):
            if number is not None and number < 1:
                raise UsageError(f"--{name} {number} must be at least 1")
        if self.cluster is not None and (not self.dry_run or self.on != "local"):
            raise UsageError(
                f"--cluster {self.cluster} is for dry runs: add --dry-run and leave --on out, or start the "
                "command on each of these hosts"
            )
        if self.on == "local" and (options := self.emulated.changed_options()):
            raise UsageError(f"{', '.join(options)} set up emulated hosts: add --on emulated")
        if self.on == "local" and self.fail is not None:
            raise UsageError(f"--fail {self.fail} is for emulated hosts: add --on emulated")
        if self.on == "emulated" and self.emulated.hosts is None:
            raise UsageError("--on emulated needs --hosts N, the number of hosts to emulate")
        if self.fail is not None:
            read_events(self.fail, required(self.emulated.hosts))
        if self.on == "emulated" and (self.nnodes != 1 or self.rdzv is not None):
            raise UsageError(
                "--nnodes and --rdzv name real hosts and do not go with --on emulated: use --hosts"
            )

    @cached_property
    def machines(self) -> Machines | None:
        """The hosts of ``--cluster``.

        Raises:
            UsageError: they are not known, have no accelerators, or contradict another option.
        """
        if self.cluster is None:
            return None
        machines = Catalog().machines(self.cluster)
        require_accelerators(machines)
        most = machines.instance.num_accelerators
        if self.nnodes not in (1, machines.count) or (self.workers or 1) > most:
            raise UsageError(
                f"--nnodes {self.nnodes} and --workers {self.workers} do not go with --cluster "
                f"{self.cluster}, {machines.count} hosts with {most} accelerators each: leave them out"
            )
        return machines

    def counts(self, hosts_apart: int = 0) -> tuple[int, int]:
        """Return the number of hosts that train, and of workers on each.

        Args:
            hosts_apart: hosts that do not train.

        Raises:
            UsageError: none is left.
        """
        if self.on == "emulated":
            num_hosts, num_local = required(self.emulated.hosts), self.workers or 1
        elif self.machines is not None:
            num_hosts = self.machines.count
            num_local = self.workers or self.machines.instance.num_accelerators
        else:
            num_hosts, num_local = self.nnodes, self.workers or num_gpus() or 1
        return num_training_hosts(num_hosts, hosts_apart), num_local


def start(
    options: Launch,
    *,
    command: list[str],
    run_dir: Path,
    describe: Callable[[int], list[str]],
    work: Callable[[WorkerEnv], int],
    settle: Callable[[HostGroup], Sequence[str]] | None = None,
    is_elastic: bool = False,
    hosts_apart: int = 0,
) -> int:
    """Do a worker's work if this process is one, else start the workers; return the exit code.

    Args:
        command: what a worker is started with: this command again.
        run_dir: the run's directory; the workers' output goes into its folder ``logs``.
        describe: checks the settings for a number of workers, and returns the lines of a dry run.
        work: what a worker does, given its environment.
        settle: as for :func:`shoal.launch.local.launch`.
        is_elastic: as there.
        hosts_apart: the last hosts, whose workers do not train.

    Raises:
        UsageError: settings that cannot work together or with the data, or a job that uses ``run_dir``.
        ShoalError: a worker failed.
        ModuleNotFoundError: torch is not installed.
    """
    if options.fail is not None and not is_elastic:
        raise UsageError(f"--fail {options.fail} goes with --distributed.elastic LEAST:MOST: add it")
    worker = worker_env()
    if worker is not None:
        from shoal.launch.worker import run_worker

        return run_worker(lambda: work(worker), run=run_dir)
    num_hosts, num_local = options.counts(hosts_apart)
    hosts = ["emulated hosts", options.emulated.check(num_local)] if options.on == "emulated" else []
    lines = describe(num_hosts * num_local)
    if options.dry_run:
        print("\n".join([*lines, *hosts, "dry run: nothing was started"]))
        return EXIT_OK
    from shoal.launch.emulated_job import launch_emulated  # --help does without them
    from shoal.launch.local import launch

    if find_spec("torch") is None:
        raise ModuleNotFoundError("workers need torch", name="torch")  # one line, not a traceback of each
    require_writable(run_dir)
    require_free(run_dir)  # before the workers' logs are written over
    log_dir = run_dir / "logs"
    if options.on == "emulated":
        return launch_emulated(
            command,
            options.emulated,
            workers_per_host=num_local,
            log_dir=log_dir,
            is_elastic=is_elastic,
            events=read_events(options.fail, num_hosts) if options.fail else (),
        )
    return launch(
        command,
        num_workers=num_local,
        nnodes=options.nnodes,
        rdzv=options.rdzv,
        log_dir=log_dir,
        settle=settle,
        is_elastic=is_elastic,
    )
