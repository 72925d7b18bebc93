"""Provides shoal's collectives in JAX programs, on CPUs and CUDA devices.

Two ways, for one process per host or per group of cores:

- Each process has a JAX of its own, and ``shoal.jax`` moves what crosses between them, inside ``jit`` and
  outside: :func:`init`, then :func:`distributed` around an optimizer of optax, or :func:`all_reduce` and the
  others on pytrees.
- ``jax.distributed`` joins the processes, as before, and :func:`use_collectives` makes shoal what jaxlib's
  own collectives run on: ``psum``, shardings and all that is built on them stay as they are.

The names are imported when they are first used: :func:`use_collectives` has to be called before JAX is
imported.
"""

from importlib import import_module
from typing import Any

_MODULES = {
    "all_gather": "shoal.jax.collectives",
    "all_reduce": "shoal.jax.collectives",
    "barrier": "shoal.jax.process",
    "broadcast": "shoal.jax.collectives",
    "distributed": "shoal.jax.optimizer",
    "init": "shoal.jax.process",
    "jit": "shoal.jax.program",
    "local_rank": "shoal.jax.process",
    "local_size": "shoal.jax.process",
    "rank": "shoal.jax.process",
    "reduce_scatter": "shoal.jax.collectives",
    "shutdown": "shoal.jax.process",
    "size": "shoal.jax.process",
    "use_collectives": "shoal.jax.mpi",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'shoal.jax' has no attribute {name!r}")
    try:
        value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        from shoal.errors import missing_extra

        if not (needs := missing_extra(error)):
            raise
        raise ModuleNotFoundError(f"shoal.jax.{name} {needs}", name=error.name) from None
    return value


def __dir__() -> list[str]:
    return __all__
