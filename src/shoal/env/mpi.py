"""Reads the variables of mpirun: Open MPI's, and those of MPICH's Hydra, which Intel MPI has too."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.env.variables import Environ, number, variables_of
from shoal.env.worker import RankNames, WorkerEnv, WorkerRanks, read_worker
from shoal.errors import UsageError

NAMES = {
    "Open MPI": RankNames(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH": RankNames("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


def mpi_worker(environ: Mapping[str, str]) -> WorkerEnv | None:
    """Return the worker that mpirun has started, or ``None``.

    Raises:
        UsageError: a variable is missing or out of its range; or PMIx alone has started the process.
    """
    for launcher, names in NAMES.items():
        if names.rank in environ and names.num_workers in environ:
            return read_worker(environ, launcher, names)
    if "PMIX_RANK" in environ and "PMIX_NAMESPACE" in environ:
        raise UsageError(
            "PMIx has started this process (PMIX_RANK) and no variable says how many workers there are; "
            "export RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, or unset PMIX_RANK to run alone"
        )
    return None


def mpi_ranks(environ: Environ = None) -> WorkerRanks | None:
    """Return the ranks of this process if mpirun has started it and names the local ones too, or ``None``.

    Raises:
        UsageError: a variable is not a number.
    """
    environ = variables_of(environ)
    for names in NAMES.values():
        if all(name in environ for name in names):
            rank, size, local_rank, local_size = (number(environ, name) for name in names)
            return WorkerRanks(
                rank=rank, num_workers=size, local_rank=local_rank, num_local_workers=local_size
            )
    return None
