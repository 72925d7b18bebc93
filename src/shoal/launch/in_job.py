"""Starts the workers or the helper of one host of a job: ``shoal launch -- COMMAND``.

On a worker host it starts the command once per worker with torchrun's variables, SHOAL_HELPERS and the
job's secret; on a helper host it runs the server. The host's number comes from Slurm, mpirun or Kubeflow,
elsewhere from ``--node-rank``, ``--nnodes`` and ``--rdzv`` (or MASTER_ADDR and MASTER_PORT). A step of Slurm
may have one task per worker, too.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NoReturn

from shoal.env.launcher import rendezvous
from shoal.env.machine import promised_gpus
from shoal.env.mpi import mpi_ranks
from shoal.env.secret import job_secret
from shoal.env.settings import HELPERS, PROGRESS_FILE, SECRET_FILE, TRANSPORT, helpers
from shoal.env.slurm import SlurmStep, slurm_step, workers_first_node
from shoal.env.torchrun import kubeflow_host
from shoal.env.variables import child_environment, set_variables, without_brackets
from shoal.env.worker import num_training_hosts
from shoal.errors import (
    EXIT_FAILURE,
    EXIT_LOST,
    EXIT_OK,
    EXIT_STOPPED,
    WARNING_SIGNALS,
    ShoalError,
    UsageError,
)
from shoal.launch.emulated import HELPER_COMMAND
from shoal.launch.host_rendezvous import await_workers_end
from shoal.launch.job_folder import NEXT, JobFolder, usable_hosts
from shoal.launch.job_size import (
    check_counts,
    check_transport,
    check_use_of_helpers,
    hosts_apart,
    is_elastic,
)
from shoal.launch.local import INTERFACE_VARIABLES, launch, parse_rendezvous
from shoal.launch.stdin_secret import take_secret
from shoal.launch.supervision import worker_variables

_NAME_DEADLINE_S = 60.0
_REACH_PAUSE_S = 0.5
_WORKERS_DEADLINE_S = 900.0
_RUN_ID = re.compile(r"[\w-][\w.-]{0,100}\.(\d{1,9}|next)")
_READY = re.compile(r"listening on (\S+:\d+)")


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """Options of ``shoal launch``."""

    role: Literal["worker", "helper"] = "worker"
    """worker: start workers; helper: run a server that sums gradients, until SIGTERM."""
    job: Path | None = None
    """Folder on a shared file system, through which the hosts find each other; in Slurm: jobs/ID."""
    workers: int | None = None
    """Workers per host; default: one per GPU, or one."""
    nnodes: int | None = None
    """Number of worker hosts; default: the nodes of the Slurm step, or one."""
    rdzv: str | None = None
    """HOST:PORT of the first worker host; default: from Slurm, or from MASTER_ADDR and MASTER_PORT."""
    node_rank: int | None = None
    """Number of this host among the worker or helper hosts, from 0; default in Slurm: from Slurm."""
    run_id: str | None = None
    """Name of this start of the job, such as bert.2; default in Slurm: from Slurm. bert.next takes the next
    number if the scheduler does not number starts; it needs the job's secret."""
    helpers: int = 0
    """Number of helper hosts that join through the job's folder."""
    helpers_required: bool = False
    """Fail if helpers are missing. By default the run starts without them, after a warning."""
    helpers_wait_s: float = 60.0
    """Seconds to wait for helpers."""
    global_batch: int | None = None
    """Samples per step: use the largest number of hosts whose workers divide it; the others stay idle."""
    interface: str | None = None
    """Network interface, such as eth0, for shoal, gloo and NCCL."""
    elastic: bool = False
    """Go on without a worker that is lost, and start it again: for scripts whose DistributedConfig says so;
    default: whether the command, or its file, has --distributed.elastic."""
    join: bool = False
    """Join the last start of the job in --job, whose workers come and go, instead of a host that has gone."""
    transport: str | None = None
    """tcp (the default), or ofi: and libfabric's providers, such as ofi:efa; the same on all hosts."""
    log_dir: Path | None = None
    """Folder for the output of all workers except the first; default: logs, in the job's folder if any."""
    helper_port: int | None = None
    """Port of a helper's server, as in the workers' SHOAL_HELPERS. The helper then needs no --job, and ends
    with the launcher of the first worker host."""
    stdin_secret: bool = False
    """Read the job's secret from stdin, and save and exit when stdin closes; set by `shoal submit ssh`."""

    def __post_init__(self) -> None:
        check_counts(self)
        check_transport(self.transport)

    @property
    def is_helper(self) -> bool:
        """True on a helper host."""
        return self.role == "helper"


def in_job(command: Sequence[str], options: HostOptions, *, failure_file: Path | None = None) -> int:
    """Run this host's part of the job and return the exit code; 75: saved, 76: another host is gone.

    Args:
        command: of a worker; empty on a helper host.
        options: of ``shoal launch``.
        failure_file: file for the text of a failure, which is shown too.

    Raises:
        UsageError: options contradict each other or the job.
        ShoalError: the other hosts, the helpers or the shared folder did not appear.
    """
    step = None if options.join else slurm_step()
    if options.join:
        options = _joined(options)
    elif step is None:
        options = _numbered(options)
    for number in (signal.SIGTERM, signal.SIGHUP, *WARNING_SIGNALS):
        signal.signal(number, _exit_stopped)
    if options.stdin_secret:
        set_variables({SECRET_FILE: str(take_secret(sys.stdin))})
    _check(command, options, step)
    if options.interface:
        set_variables(dict.fromkeys(INTERFACE_VARIABLES, options.interface))
    if options.transport:
        set_variables({TRANSPORT: options.transport})
    job = options.job or (Path("jobs") / str(step.job) if step else None)
    folder = JobFolder(job, options.run_id or (step.run_id if step else "0.0")) if job else None
    if options.is_helper:
        return _serve(folder, step, options)
    if step is not None and step.ranks.num_workers != step.num_nodes:
        return _become_worker(command, options, step, _required(folder))
    return _launch_host(command, options, step, folder, failure_file)


def _joined(options: HostOptions) -> HostOptions:
    """Return the options with those of the hosts that this one joins; the launchers agree on its number."""
    starts = [] if options.job is None else JobFolder(options.job, "").starts()
    if options.job is None or not starts:
        raise UsageError(f"--join needs --job DIR, the folder of a job that runs; {options.job} has no start")
    run_id = starts[-1].run_id
    place = JobFolder(options.job, run_id).place()
    return replace(options, **place, run_id=run_id, node_rank=1, elastic=True)


def _numbered(options: HostOptions) -> HostOptions:
    """Return the options with this host's number from mpirun or Kubeflow, which start a launcher per host."""
    if options.node_rank is not None:
        return options
    ranks, pod = mpi_ranks(), kubeflow_host()
    if ranks is not None and ranks.num_local_workers > 1:
        raise UsageError(
            f"mpirun has started {ranks.num_local_workers} shoal launch on this host; it starts the workers "
            "itself: start one per host (mpirun --map-by ppr:1:node), or the command without shoal launch"
        )
    if ranks is not None:
        number, num_hosts = ranks.rank, ranks.num_workers
    elif pod is not None:
        number, num_hosts = pod.number, pod.num_hosts
        options = replace(options, workers=options.workers or pod.num_workers)
    else:
        return options
    hosts = None if options.is_helper else num_hosts
    return replace(options, node_rank=number, nnodes=options.nnodes or hosts)


def _check(command: Sequence[str], options: HostOptions, step: SlurmStep | None) -> None:
    if options.is_helper and command:
        raise UsageError("--role helper runs shoal's server and takes no command")
    if not options.is_helper and not command:
        raise UsageError("name the command of the workers after --: shoal launch -- python train.py")
    if command and command[0].startswith("-"):
        raise UsageError(f"{command[0]} is no option of shoal launch: see shoal launch --help")
    if command and shutil.which(command[0]) is None:
        raise UsageError(
            f"{command[0]}, the command of the workers, is not found on {os.uname().nodename}, "
            "or may not be executed"
        )
    check_use_of_helpers(command, options.helpers or len(helpers()))
    if step is None:
        _check_without_slurm(options)
    if options.run_id is not None and not _RUN_ID.fullmatch(options.run_id):
        raise UsageError(f"--run-id {options.run_id!r} is not of the form JOB.START, such as bert.2")
    needs_folder = job_secret() is None or bool(options.helpers) or options.is_helper
    if (options.run_id or "").endswith(NEXT) and needs_folder:
        raise UsageError(
            f"--run-id {options.run_id}: only the first worker host knows the number of the start, so hosts "
            f"cannot meet in its folder; give the job's secret in {SECRET_FILE}, and helpers in {HELPERS}"
        )
    if step is not None:
        _check_step(options, step)


def _check_without_slurm(options: HostOptions) -> None:
    needs_folder = options.helpers or (options.is_helper and not options.helper_port)
    if needs_folder and options.job is None:
        raise UsageError("hosts meet their helpers in a folder that all share: --job DIR")
    if options.is_helper and options.job is None and job_secret() is None:
        raise UsageError(f"--helper-port needs the job's secret: {SECRET_FILE}, the same on all hosts")
    if options.job is not None and options.node_rank is None and (options.nnodes or 1) > 1:
        raise UsageError("--job with several hosts needs --node-rank N, the number of this one, from 0")


def _check_step(options: HostOptions, step: SlurmStep) -> None:
    if options.nnodes not in (None, step.num_nodes):
        raise UsageError(
            f"--nnodes {options.nnodes}, but Slurm has started this step on {step.num_nodes} nodes; "
            "leave it out"
        )
    if step.ranks.num_workers != step.num_nodes and options.workers not in (None, 1):
        raise UsageError(
            f"--workers {options.workers}, but Slurm has started {step.ranks.num_workers} tasks on "
            f"{step.num_nodes} nodes, and several tasks of a node are a worker each: start one task per node "
            "(srun --ntasks-per-node=1), or leave out --workers"
        )
    workers = 0 if options.is_helper else options.workers or step.ranks.num_local_workers
    if 0 < step.num_gpus < workers:
        raise UsageError(
            f"{workers} workers on the node {os.uname().nodename}, and Slurm gives the job "
            f"{step.num_gpus} GPUs there: ask for as many GPUs as workers (--gpus-per-node)"
        )


# ---- worker hosts ------------------------------------------------------------------------------------------


def _launch_host(
    command: Sequence[str],
    options: HostOptions,
    step: SlurmStep | None,
    folder: JobFolder | None,
    failure_file: Path | None,
) -> int:
    """Start the workers of this host."""
    num_workers = options.workers or _num_gpus()
    num_offered = options.nnodes or (step.num_nodes if step else 1)
    num_apart = hosts_apart(command)
    num_training = num_training_hosts(num_offered, num_apart)
    num_training = usable_hosts(num_training, num_workers, options.global_batch)
    num_hosts = num_training + num_apart
    number = step.node if step else options.node_rank or 0
    if num_hosts < num_offered and number == 0:
        print(
            f"shoal launch: {num_offered - num_hosts} of {num_offered} hosts stay idle: the global batch of "
            f"{options.global_batch} divides over {num_training} × {num_workers} workers",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    if number >= num_hosts:
        return EXIT_OK
    rdzv = options.rdzv or (f"{step.first_node}:{step.port}" if step else None)
    is_first = number == 0
    set_variables(_job_variables(folder, options, is_first=is_first))
    may_lose = options.elastic or is_elastic(command)
    if may_lose and is_first and folder is not None and rdzv is not None:
        folder.publish_place(rdzv=rdzv, nnodes=num_hosts, workers=num_workers)
    log_dir = options.log_dir or (folder.job / "logs" if folder else Path("logs"))
    helpers_wait = options.rdzv is not None and not options.helpers and bool(helpers())
    code = launch(
        command,
        num_workers=num_workers,
        nnodes=num_hosts,
        rdzv=rdzv if num_hosts > 1 or helpers_wait else None,
        log_dir=log_dir,
        run_id=folder.run_id if folder else options.run_id or "shoal",
        failure_file=failure_file,
        helpers_wait=helpers_wait,
        usr2_is_term=options.stdin_secret,
        is_elastic=may_lose,
    )
    if code in (EXIT_OK, EXIT_STOPPED) and folder is not None and is_first:
        folder.saved()
    return code


def _become_worker(
    command: Sequence[str], options: HostOptions, step: SlurmStep, folder: JobFolder
) -> NoReturn:
    """Replace this process, one of several tasks on its node, by the command as one worker."""
    ranks = step.ranks
    if ranks.num_workers != step.num_nodes * ranks.num_local_workers:
        raise UsageError(
            f"Slurm has started {ranks.num_workers} tasks on {step.num_nodes} nodes, not the same number on "
            "each; use srun --ntasks-per-node"
        )
    variables = _job_variables(folder, options, is_first=ranks.rank == 0)
    variables |= worker_variables(
        ranks.rank,
        num_hosts=step.num_nodes,
        workers_per_host=ranks.num_local_workers,
        master=(step.first_node, step.port),
    )
    variables |= {"LOCAL_RANK": str(ranks.local_rank), "TORCHELASTIC_RUN_ID": folder.run_id}
    try:
        os.execvpe(command[0], list(command), child_environment(**variables))
    except OSError as problem:
        raise ShoalError(f"{command[0]} cannot be started: {problem.strerror}") from None


def _job_variables(folder: JobFolder | None, options: HostOptions, *, is_first: bool) -> dict[str, str]:
    """Return the variables of the secret, the helpers and the progress for this host's workers."""
    variables: dict[str, str] = {}
    if folder is not None:
        has_secret = job_secret() is not None
        if is_first:
            secret_file = folder.begin(with_secret=not has_secret)
            variables[PROGRESS_FILE] = str(folder.progress_file.absolute())
        elif not has_secret:
            secret_file = folder.await_secret()
        if not has_secret:
            variables[SECRET_FILE] = str(secret_file.absolute())
        if options.helpers:
            wait_s = options.helpers_wait_s
            variables[HELPERS] = (
                folder.gather_helpers(options.helpers, deadline_s=wait_s, required=options.helpers_required)
                if is_first
                else folder.await_helpers(deadline_s=wait_s)
            )
    if helpers() and not options.helpers:
        _await_named_helpers(options)
    return variables


def _await_named_helpers(options: HostOptions) -> None:
    """Wait until the servers of SHOAL_HELPERS accept connections; name those that do not."""
    until = time.monotonic() + options.helpers_wait_s
    left = [(helper.address, helper.port) for helper in helpers()]
    while left and time.monotonic() < until:
        left = [server for server in left if not _accepts(server)]
        if left:
            time.sleep(_REACH_PAUSE_S)
    if not left:
        return
    names = ", ".join(f"{name}:{port}" for name, port in left)
    if options.helpers_required:
        raise ShoalError(f"helpers did not answer within {options.helpers_wait_s:g} s: {names}")
    print(
        f"shoal launch: WARNING: no answer within {options.helpers_wait_s:g} s from {names}; the run starts "
        "without them",
        file=sys.stderr, flush=True,
    )  # fmt: skip


def _accepts(server: tuple[str, int]) -> bool:
    try:
        socket.create_connection(server, timeout=_REACH_PAUSE_S).close()
    except OSError:
        return False
    return True


def _num_gpus() -> int:
    """Return the number of GPUs that torch sees, or 1, for a worker on the CPU."""
    try:
        from torch import cuda  # takes seconds, which --workers saves
    except ModuleNotFoundError:  # workers of JAX or TensorFlow, which run on the CPU
        return 1
    count = cuda.device_count()
    if count == 0 and (promised := promised_gpus()):
        raise UsageError(
            f"the job has {promised} GPUs on {os.uname().nodename}, and torch finds none there: see shoal "
            "doctor on that host; --workers N starts workers all the same"
        )
    return max(count, 1)


# ---- helper hosts ------------------------------------------------------------------------------------------


def _serve(folder: JobFolder | None, step: SlurmStep | None, options: HostOptions) -> int:
    """Run the server of this helper host, at the address by which it reaches the first worker host.

    It ends at SIGTERM. Without a shared folder it ends with the launcher of the first worker host, and
    ignores SIGTERM once connected to it: the workers get the signal too, and need their helper to save.
    """
    secret_file = folder.await_secret() if folder is not None and job_secret() is None else None
    rdzv = options.rdzv or rendezvous() or ""
    towards = (
        without_brackets(rdzv.rpartition(":")[0]) or workers_first_node() or (step.first_node if step else "")
    )
    if not towards:
        raise UsageError("a helper needs the first worker host's name: --rdzv HOST:PORT")
    arguments = ["--address", address_towards(towards), "--port", str(options.helper_port or 0)]
    if secret_file is not None:
        arguments += ["--secret-file", str(secret_file)]
    server = subprocess.Popen([*HELPER_COMMAND, *arguments], stdout=subprocess.PIPE, text=True)
    mpiruns_stop = (signal.SIGUSR2,) if options.stdin_secret else ()
    for number in {signal.SIGHUP, *WARNING_SIGNALS}.difference(mpiruns_stop):
        signal.signal(number, signal.SIG_IGN)
    held = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: None if held.is_set() else server.terminate())
    signal.signal(signal.SIGINT, lambda *_: server.terminate())
    ends: list[int] = []
    if folder is None:
        leader = parse_rendezvous(rdzv)
        threading.Thread(target=_end_with_workers, args=(server, leader, held, ends), daemon=True).start()
    assert server.stdout is not None
    for line in server.stdout:
        print(line, end="", flush=True)
        if folder is not None and (ready := _READY.search(line)):
            folder.publish_helper(step.ranks.rank if step else options.node_rank or 0, ready[1])
    code = server.wait()
    return ends[0] if ends and not code else code if code >= 0 else EXIT_FAILURE


def _end_with_workers(
    server: subprocess.Popen[str], leader: tuple[str, int], held: threading.Event, ends: list[int]
) -> None:
    """Stop the server when the first worker host's launcher has ended, or does not answer.

    ``ends`` gets this helper's exit code: 76 if it is to start again with the workers.
    """
    try:
        code = await_workers_end(
            *leader, job_secret() or b"", deadline_s=_WORKERS_DEADLINE_S, reached=held.set
        )
        ends.append(EXIT_LOST if code in (None, EXIT_STOPPED, EXIT_LOST) else EXIT_OK)
    except ShoalError as problem:
        print(f"shoal launch: {problem}; this helper stops", file=sys.stderr, flush=True)
        ends.append(EXIT_OK)
    server.terminate()


# ---- names and addresses -----------------------------------------------------------------------------------


def address_towards(host: str, *, deadline_s: float = _NAME_DEADLINE_S) -> str:
    """Return the address of this machine from which ``host`` is reached: IPv4 if there is one, else IPv6.

    Names are looked up again until the deadline, with growing pauses: those of pods and of nodes that have
    just booted appear late.

    Raises:
        ShoalError: the name has no address.
    """
    until, pause_s = time.monotonic() + deadline_s, 0.1
    while True:
        problems = []
        for family in (socket.AF_INET, socket.AF_INET6):
            try:
                with socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect((host, 9))  # sends nothing, only selects a route
                    return str(probe.getsockname()[0])
            except OSError as problem:
                problems.append(problem)
        if time.monotonic() + pause_s > until:
            raise ShoalError(
                f"the host {host!r} cannot be found by {os.uname().nodename} ({problems[0]}); see /etc/hosts "
                "and the name servers there"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 2.0)


def _exit_stopped(number: int, frame: object) -> NoReturn:
    """Exit with the code for "stopped": no worker has started yet."""
    sys.exit(EXIT_STOPPED)


def _required(folder: JobFolder | None) -> JobFolder:
    assert folder is not None
    return folder
