"""Joins this process to the others, and returns its rank."""

from __future__ import annotations

import jax
import jax.extend.backend
import jax.numpy as jnp

from shoal.comm.engine import EngineOptions
from shoal.comm.job_group import TIMEOUT_S, GlobalGroup, JobGroup
from shoal.comm.store import Store
from shoal.jax import ffi

_WORLD_GROUP = 1
"""Number of the group of all processes in compiled programs; 0 is that of one process alone."""


def _joined(group: JobGroup) -> None:
    if address := group.c_group():
        ffi.set_group(_WORLD_GROUP, address)


def _wait() -> None:
    """Wait for the programs that were dispatched: those with tokens, then this thread's."""
    jax.effects_barrier()
    for backend in jax.extend.backend.backends().values():
        for device in backend.local_devices():
            with jax.default_device(device):
                (jnp.zeros(()) + 1).block_until_ready()  # XLA runs it after them


def _finish() -> None:
    _wait()
    ffi.set_group(_WORLD_GROUP, 0)


_job = GlobalGroup("shoal.jax", prepare=ffi.register, joined=_joined, finish=_finish)
group = _job.group
rank = _job.rank
size = _job.size
local_rank = _job.local_rank
local_size = _job.local_size
is_initialized = _job.is_initialized


def init(
    *, timeout_s: float = TIMEOUT_S, options: EngineOptions | None = None, store: Store | None = None
) -> None:
    """Join the processes that the launcher has started together; again: does nothing.

    The launcher (``shoal launch``, ``shoal emulate``, ``mpirun``, ``srun``) sets the rank. A process without
    one is alone: its collectives return their operands.

    Args:
        timeout_s: limit for each rank's arrival and for each collective, in seconds.
        options: of the engine, the same on all ranks.
        store: that all ranks reach already, such as the one of a ``torch.distributed`` group; ``None``: rank
            0 makes one.

    Raises:
        CommError: a rank did not come in time, or has another secret.
        UsageError: it was called before with other options, an environment variable is wrong,
            rank 0's port is taken, or
            there is no C++ compiler for the handlers that XLA calls, which are compiled on first use.

    Example:
        >>> import shoal.jax
        >>> shoal.jax.init()
        >>> shoal.jax.rank(), shoal.jax.size()
        (0, 1)
        >>> shoal.jax.shutdown()
    """
    _job.init(timeout_s=timeout_s, options=options, store=store)


def shutdown() -> None:
    """Wait for the collectives of this process, and leave the others. A program's end does it too."""
    _job.shutdown()


def group_number() -> int:
    """Return the number by which compiled programs name the group of all processes."""
    return _WORLD_GROUP if size() > 1 else 0


def barrier() -> None:
    """Wait until all ranks have called it, after the collectives that each has begun.

    Raises:
        CommError: a rank was lost, or did not come in time.
        UsageError: :func:`init` was not called.
    """
    _wait()
    group().barrier()
