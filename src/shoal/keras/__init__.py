"""Distributes ``model.fit`` of Keras 3, on its backends tensorflow, jax and torch.

One process per host or per group of cores: :func:`init`, then :func:`DistributedOptimizer` around the
optimizer, and callbacks :class:`Broadcast` and :class:`AverageMetrics`. :class:`Shards` divides a dataset.

The names are imported when they are first used, with Keras and its backend.
"""

from typing import Any

_MODULES = {
    "Average": "shoal.comm.horovod",
    "AverageMetrics": "shoal.keras.callbacks",
    "Broadcast": "shoal.keras.callbacks",
    "Compression": "shoal.comm.horovod",
    "DistributedOptimizer": "shoal.keras.optimizer",
    "LearningRateWarmup": "shoal.keras.callbacks",
    "Max": "shoal.comm.horovod",
    "Min": "shoal.comm.horovod",
    "Product": "shoal.comm.horovod",
    "Shards": "shoal.keras.shards",
    "Sum": "shoal.comm.horovod",
    "allgather": "shoal.keras.values",
    "allreduce": "shoal.keras.values",
    "barrier": "shoal.keras.process",
    "broadcast": "shoal.keras.values",
    "broadcast_variables": "shoal.keras.callbacks",
    "callbacks": "shoal.keras.callbacks",
    "init": "shoal.keras.process",
    "is_initialized": "shoal.keras.process",
    "local_rank": "shoal.keras.process",
    "local_size": "shoal.keras.process",
    "rank": "shoal.keras.process",
    "shutdown": "shoal.keras.process",
    "size": "shoal.keras.process",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    from shoal.comm.horovod import load

    return load(__name__, _MODULES, name)


def __dir__() -> list[str]:
    return __all__
