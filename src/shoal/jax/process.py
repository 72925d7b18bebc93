"""Joins this process to the others, and tells its place among them."""

from __future__ import annotations

import atexit

import jax

from shoal.comm import world as worlds
from shoal.comm.engine import EngineOptions
from shoal.comm.world import World
from shoal.errors import UsageError
from shoal.jax import ffi

_world: World | None = None
_WORLD_GROUP = 1
"""Number of the group of all processes in compiled programs; 0 is that of one process alone."""


def init(*, timeout_s: float = worlds.TIMEOUT_S, options: EngineOptions | None = None) -> None:
    """Join the processes that the launcher has started together; once, before the first collective.

    The launcher (``shoal launch``, ``shoal emulate``, ``mpirun``, ``srun``) sets the rank. A process without
    one is
    alone: its collectives return their operands.

    Args:
        timeout_s: limit for each rank's arrival and for each collective, in seconds.
        options: of the engine, the same on all ranks.

    Raises:
        CommError: a rank did not come in time, or has another secret.
        UsageError: it was called before, an environment variable is wrong, rank 0's port is taken, or
            there is no C++ compiler for the handlers that XLA calls, which are compiled on first use.

    Example:
        >>> import shoal.jax
        >>> shoal.jax.init()
        >>> shoal.jax.rank(), shoal.jax.size()
        (0, 1)
        >>> shoal.jax.shutdown()
    """
    global _world
    if _world is not None:
        raise UsageError("shoal.jax.init() was called before; call it once, at the program's beginning")
    ffi.register()
    _world = worlds.join(timeout_s=timeout_s, options=options)
    if group := _world.c_group():
        ffi.set_group(_WORLD_GROUP, group)
    atexit.register(shutdown)


def shutdown() -> None:
    """Wait for the collectives of this process, and leave the others. A program's end does it too."""
    global _world
    if _world is not None:
        leaving, _world = _world, None
        atexit.unregister(shutdown)
        jax.effects_barrier()
        ffi.set_group(_WORLD_GROUP, 0)
        leaving.close()


def world() -> World:
    """Return the group of all processes.

    Raises:
        UsageError: :func:`init` was not called.
    """
    if _world is None:
        raise UsageError("shoal.jax.init() was not called; call it before the first collective")
    return _world


def group_number() -> int:
    """Return the number by which compiled programs name the group of all processes."""
    return _WORLD_GROUP if world().size > 1 else 0


def rank() -> int:
    """Return the rank of this process, from 0 to :func:`size` - 1.

    Raises:
        UsageError: :func:`init` was not called.
    """
    return world().rank


def size() -> int:
    """Return the number of processes.

    Raises:
        UsageError: :func:`init` was not called.
    """
    return world().size


def local_rank() -> int:
    """Return the rank of this process among those of its host.

    Raises:
        UsageError: :func:`init` was not called.
    """
    return world().local_rank


def local_size() -> int:
    """Return the number of processes on this host.

    Raises:
        UsageError: :func:`init` was not called.
    """
    return world().local_size


def barrier() -> None:
    """Wait until all ranks have called it, after the collectives that each has begun.

    Raises:
        CommError: a rank was lost, or did not come in time.
        UsageError: :func:`init` was not called.
    """
    jax.effects_barrier()
    world().barrier()
