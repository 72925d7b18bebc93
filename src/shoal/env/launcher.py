"""Detects the launcher of this process: torchrun, Slurm or mpirun, in this order."""

from __future__ import annotations

import re

from shoal.env import mpi, torchrun
from shoal.env.settings import HELPERS, LAUNCH_DIR, PROGRESS_FILE, SECRET, SECRET_FILE
from shoal.env.slurm import slurm_step, slurm_worker
from shoal.env.torchrun import kubeflow_host
from shoal.env.variables import Environ, child_environment, number, text, variables_of
from shoal.env.worker import DEFAULT_PORT, STORE_FILE, WorkerEnv

STORE_PORT = "SHOAL_STORE_PORT"
"""Port at MASTER_ADDR for the store of programs without torch; shoal's launchers of several hosts set it."""
_OF_THE_JOB = re.compile(
    r"(?:GLOBAL_|LOCAL_|GROUP_|ROLE_)?RANK|(?:LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|NODE_RANK|MASTER_(?:ADDR|PORT)"
    r"|(?:TORCHELASTIC|PET|OMPI|PMI|PMIX|MPI|SLURM_STEP)_\w+|SLURM_(?:PROCID|LOCALID|NODEID)"
    rf"|{LAUNCH_DIR}|{STORE_FILE}|{STORE_PORT}|{SECRET}|{SECRET_FILE}|{HELPERS}|{PROGRESS_FILE}"
)
"""Environment variables that a launcher gives to the workers of a job."""
_NAMES = (torchrun.NAMES, *mpi.NAMES.values())


def worker_env(environ: Environ = None) -> WorkerEnv | None:
    """Return this worker's environment if a launcher has started the process, else ``None``.

    Raises:
        UsageError: a variable is missing or is not a number in its range.
    """
    environ = variables_of(environ)
    if (worker := torchrun.torchrun_worker(environ)) is not None:
        return worker
    step = slurm_step(environ)
    if step is not None and mpi.mpi_ranks(environ) is None:  # srun --mpi=pmi2 sets PMI_RANK too
        return slurm_worker(step, environ)
    return mpi.mpi_worker(environ)


def num_local_workers(environ: Environ = None) -> int:
    """Return the number of workers on this host; 0 if no launcher says it."""
    environ = variables_of(environ)
    for names in _NAMES:
        size = environ.get(names.num_local_workers, "")
        if size.isascii() and size.isdigit() and int(size):
            return int(size)
    return 0


def has_other_hosts(environ: Environ = None) -> bool:
    """Return whether a launcher says that workers of this job run on other hosts too."""
    environ = variables_of(environ)
    for names in _NAMES:
        sizes = environ.get(names.num_workers, ""), environ.get(names.num_local_workers, "")
        if all(map(str.isdecimal, sizes)):
            return int(sizes[1]) < int(sizes[0])
    host = kubeflow_host(environ)
    return host is not None and host.num_hosts > 1


def rendezvous(environ: Environ = None) -> str | None:
    """Return ``MASTER_ADDR:MASTER_PORT`` (default port 29500), Kubeflow's PET_MASTER_ADDR, or ``None``."""
    for name in ("MASTER", "PET_MASTER"):
        if address := text(f"{name}_ADDR", environ):
            return f"{address}:{text(f'{name}_PORT', environ) or DEFAULT_PORT}"
    return None


def store_port(worker: WorkerEnv, environ: Environ = None) -> int:
    """Return the port of rank 0's store for programs without torch.

    It is the one after MASTER_PORT if torchrun's agent listens there, for a store that only torch reads.

    Raises:
        UsageError: SHOAL_STORE_PORT is not a number.
    """
    holds_port = text("TORCHELASTIC_USE_AGENT_STORE", environ) == "True"
    return number(variables_of(environ), STORE_PORT, default=worker.master_port + holds_port)


def outside_of_job() -> dict[str, str]:
    """Return a copy of this process's environment without the variables that make it a worker of its job."""
    return {name: value for name, value in child_environment().items() if not _OF_THE_JOB.fullmatch(name)}
