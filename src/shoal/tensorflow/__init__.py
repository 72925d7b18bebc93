"""Provides shoal's collectives in TensorFlow programs, on CPUs, with Horovod's names.

One process per host or per group of cores: :func:`init`, then :class:`DistributedGradientTape` around the
tape of a loop, or :func:`DistributedOptimizer` around a Keras optimizer, and :func:`broadcast_variables` at
the beginning. Programs of ``model.fit`` find all they need in :mod:`shoal.keras`.

The names are imported when they are first used.
"""

from importlib import import_module
from typing import Any

_MODULES = {
    "Average": "shoal.comm.horovod",
    "Compression": "shoal.comm.horovod",
    "DistributedGradientTape": "shoal.tensorflow.tape",
    "DistributedOptimizer": "shoal.keras.optimizer",
    "Max": "shoal.comm.horovod",
    "Min": "shoal.comm.horovod",
    "Product": "shoal.comm.horovod",
    "Sum": "shoal.comm.horovod",
    "allgather": "shoal.tensorflow.ops",
    "allgather_object": "shoal.tensorflow.ops",
    "allreduce": "shoal.tensorflow.ops",
    "barrier": "shoal.tensorflow.process",
    "broadcast": "shoal.tensorflow.ops",
    "broadcast_object": "shoal.tensorflow.ops",
    "broadcast_variables": "shoal.tensorflow.ops",
    "grouped_allgather": "shoal.tensorflow.ops",
    "grouped_allreduce": "shoal.tensorflow.ops",
    "init": "shoal.tensorflow.process",
    "is_initialized": "shoal.tensorflow.process",
    "local_rank": "shoal.tensorflow.process",
    "local_size": "shoal.tensorflow.process",
    "rank": "shoal.tensorflow.process",
    "reducescatter": "shoal.tensorflow.ops",
    "shutdown": "shoal.tensorflow.process",
    "size": "shoal.tensorflow.process",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'shoal.tensorflow' has no attribute {name!r}")
    try:
        value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        from shoal.errors import missing_extra

        if not (needs := missing_extra(error)):
            raise
        raise ModuleNotFoundError(f"shoal.tensorflow.{name} {needs}", name=error.name) from None
    return value


def __dir__() -> list[str]:
    return __all__
