"""Provides shoal's collectives in TensorFlow programs, on CPUs, with Horovod's names.

One process per host or per group of cores: :func:`init`, then :class:`DistributedGradientTape` around the
tape of a loop, or :func:`DistributedOptimizer` around a Keras optimizer, and :func:`broadcast_variables` at
the beginning. Programs of ``model.fit`` find all they need in :mod:`shoal.keras`.

The names are imported when they are first used.
"""

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
    from shoal.comm.horovod import load

    return load(__name__, _MODULES, name)


def __dir__() -> list[str]:
    return __all__
