"""Joins this process to the others by torch's default process group, and returns its rank."""

from __future__ import annotations

import atexit
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from shoal.comm import BACKEND_NAME
from shoal.comm.horovod import check_keywords
from shoal.env.launcher import worker_env
from shoal.env.worker import WorkerRanks
from shoal.errors import UsageError


class _Job:
    """Ranks of this process, while it has joined, and whether the group is its own to leave."""

    ranks: WorkerRanks | None = None
    owns_group = False
    timeout_s: float | None = None
    """As :func:`init` had it first."""


def init(comm: None = None, process_sets: None = None, *, timeout_s: float | None = None) -> None:
    """Join the processes that the launcher has started together; again: does nothing.

    It makes backend ``"shoal"`` torch's default process group. A group that exists already is used, whatever
    its backend. The launcher (``shoal launch``, torchrun, ``mpirun``, ``srun``) sets the rank; a process
    without one is alone.

    Args:
        comm: Horovod's; only ``None``.
        process_sets: Horovod's; only ``None``.
        timeout_s: limit for each rank's arrival and each collective, in seconds; ``None``: torch's.

    Raises:
        CommError: a rank did not come in time, or has another secret.
        UsageError: an environment variable is wrong, process sets are asked for, or ``timeout_s`` is for a
            group that exists already.

    Example:
        >>> import shoal.horovod_torch as hvd
        >>> hvd.init()
        >>> hvd.rank(), hvd.size()
        (0, 1)
        >>> hvd.shutdown()
    """
    check_keywords("init", {"comm": comm, "process_sets": process_sets})
    exists = dist.is_initialized()
    if exists and timeout_s not in (None, _Job.timeout_s):
        raise UsageError(
            f"init(timeout_s={timeout_s:g}): the process group exists already; give timeout_s in the first "
            "call of init(), or timeout to torch's init_process_group"
        )
    if _Job.ranks is not None:
        return
    worker = worker_env()
    if not exists:
        options: dict[str, Any] = {"store": HashStore(), "rank": 0, "world_size": 1}
        if worker is not None:
            ranks = worker.ranks
            options = {"init_method": worker.init_method, "rank": ranks.rank, "world_size": ranks.num_workers}
        limit = None if timeout_s is None else timedelta(seconds=timeout_s)
        dist.init_process_group(BACKEND_NAME, timeout=limit, **options)
        _Job.owns_group, _Job.timeout_s = True, timeout_s
        atexit.register(shutdown)
    rank, size = dist.get_rank(), dist.get_world_size()
    local = (worker.ranks.local_rank, worker.ranks.num_local_workers) if worker else (rank, size)
    _Job.ranks = WorkerRanks(rank=rank, num_workers=size, local_rank=local[0], num_local_workers=local[1])


def shutdown() -> None:
    """Leave the other processes, if :func:`init` has joined them. A program's end does it too."""
    _Job.ranks = _Job.timeout_s = None
    if _Job.owns_group:
        _Job.owns_group = False
        atexit.unregister(shutdown)
        if dist.is_initialized():
            dist.destroy_process_group()


def is_initialized() -> bool:
    """Return whether :func:`init` was called."""
    return _Job.ranks is not None


def _ranks() -> WorkerRanks:
    if _Job.ranks is None:
        raise UsageError("shoal.horovod_torch.init() was not called; call it before the first collective")
    return _Job.ranks


def rank() -> int:
    """Return the rank of this process, from 0 to :func:`size` - 1.

    Raises:
        UsageError: :func:`init` was not called; as of all functions here.
    """
    return _ranks().rank


def size() -> int:
    """Return the number of processes."""
    return _ranks().num_workers


def local_rank() -> int:
    """Return the rank of this process among those of its host."""
    return _ranks().local_rank


def local_size() -> int:
    """Return the number of processes on this host."""
    return _ranks().num_local_workers


def cross_rank() -> int:
    """Return the number of this process's host, where hosts have equal numbers of processes."""
    return rank() // local_size()


def cross_size() -> int:
    """Return the number of hosts, where they have equal numbers of processes."""
    return -(-size() // local_size())


def barrier(process_set: None = None) -> None:
    """Wait until all ranks have called it.

    Raises:
        CommError: a rank was lost, or did not come in time.
    """
    check_keywords("barrier", {"process_set": process_set})
    _ranks()
    dist.barrier()
