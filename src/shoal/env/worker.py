"""Defines the ranks of a worker, and the rendezvous of the workers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from shoal.env.variables import number, without_brackets
from shoal.errors import UsageError

STORE_FILE = "SHOAL_STORE_FILE"
"""File of torch's ``FileStore``, by which the workers of one host rendezvous without a port."""
MEMBERS = ".members"
"""End of the name of the folder beside it, the store of workers that come and go."""
DEFAULT_PORT = 29_500
"""torchrun's default of MASTER_PORT."""
_SAFE_IN_URL = re.compile(r"/[^?#\x00-\x1f]*")


@dataclass(frozen=True, kw_only=True)
class WorkerRanks:
    """Rank of this process in the job and on its host."""

    rank: int
    num_workers: int
    local_rank: int
    num_local_workers: int

    @property
    def is_main(self) -> bool:
        """True for the worker that prints, writes the record and owns the run directory."""
        return self.rank == 0


@dataclass(frozen=True, kw_only=True)
class WorkerEnv:
    """Rank of a worker process, and the rendezvous of the workers."""

    ranks: WorkerRanks
    master_addr: str
    master_port: int
    launcher: str
    store_file: Path | None = None
    """File of the rendezvous on one host; address and port are ignored then."""

    @property
    def init_method(self) -> str:
        """URL of the store, for ``init_process_group``."""
        if self.store_file is not None:
            return f"file://{self.store_file}"
        host = f"[{self.master_addr}]" if ":" in self.master_addr else self.master_addr
        return f"tcp://{host}:{self.master_port}"


class RankNames(NamedTuple):
    """A launcher's variables with the ranks of a worker."""

    rank: str
    num_workers: str
    local_rank: str
    num_local_workers: str


def alone(folder: Path) -> WorkerEnv:
    """Return the environment of a process that is the only worker; its store is a file in ``folder``."""
    ranks = WorkerRanks(rank=0, num_workers=1, local_rank=0, num_local_workers=1)
    return WorkerEnv(
        ranks=ranks, master_addr="127.0.0.1", master_port=0, launcher="none", store_file=folder / "store"
    )


def read_worker(
    environ: Mapping[str, str], launcher: str, names: RankNames, *, one_per_host: bool = False
) -> WorkerEnv:
    """Return the worker of a launcher that names its ranks.

    Without the local variables all workers are on this host, or with ``one_per_host`` each is on its own.

    Raises:
        UsageError: a variable is missing or out of its range.
    """
    rank, num_workers = number(environ, names.rank), number(environ, names.num_workers)
    local_rank = number(environ, names.local_rank, default=0 if one_per_host else rank)
    num_local = number(environ, names.num_local_workers, default=1 if one_per_host else num_workers)
    if rank >= num_workers:
        raise UsageError(
            f"{names.rank}={rank} must be below {names.num_workers}={num_workers}; check the launcher"
        )
    address = without_brackets(environ.get("MASTER_ADDR", ""))
    if not address and num_local != num_workers:
        raise UsageError(
            f"{launcher} started {num_workers} workers on several hosts but MASTER_ADDR is not set; "
            "export the address of the host of rank 0 to all of them"
        )
    return WorkerEnv(
        ranks=WorkerRanks(
            rank=rank, num_workers=num_workers, local_rank=local_rank, num_local_workers=num_local
        ),
        master_addr=address or "127.0.0.1",
        master_port=number(environ, "MASTER_PORT", default=DEFAULT_PORT),
        launcher=launcher,
        store_file=_store_file(environ),
    )


def num_training_hosts(num_hosts: int, num_validation_hosts: int) -> int:
    """Return the hosts that train.

    Raises:
        UsageError: none is left.
    """
    if num_validation_hosts >= num_hosts:
        raise UsageError(
            f"run.validation_hosts {num_validation_hosts} leaves none of {num_hosts} hosts to train: start "
            "the command on more, or use --run.validation-beside N, processes on the first host"
        )
    return num_hosts - num_validation_hosts


def part_of_training(worker: WorkerEnv, num_validation_hosts: int) -> WorkerEnv | None:
    """Return this worker of a job whose last hosts evaluate; ``None`` on one of those.

    Raises:
        UsageError: no host is left to train, or ranks are not numbered host by host.
    """
    ranks = worker.ranks
    if ranks.rank % ranks.num_local_workers != ranks.local_rank:
        raise UsageError(
            f"run.validation_hosts needs ranks host by host, and rank {ranks.rank} is worker "
            f"{ranks.local_rank} of its host: see the launcher's mapping, such as mpirun --map-by slot"
        )
    num_hosts = num_training_hosts(ranks.num_workers // ranks.num_local_workers, num_validation_hosts)
    num_workers = num_hosts * ranks.num_local_workers
    if ranks.rank >= num_workers:
        return None
    return replace(worker, ranks=replace(ranks, num_workers=num_workers))


def _store_file(environ: Mapping[str, str]) -> Path | None:
    path = environ.get(STORE_FILE)
    if path and not _SAFE_IN_URL.fullmatch(path):
        raise UsageError(
            f"{STORE_FILE}={path!r} must be an absolute path without ?, # and control characters, which a "
            "URL cannot hold; set TMPDIR to another folder"
        )
    return Path(path) if path else None
