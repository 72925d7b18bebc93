"""Distributes ``model.fit`` of Keras 3, on CPUs, on its backends tensorflow, jax and torch.

One process per host or per group of cores: :func:`init`, then :func:`DistributedOptimizer` around the
optimizer, and callbacks :class:`Broadcast` and :class:`AverageMetrics`. :class:`Shards` divides a dataset.

The names are imported when they are first used, with Keras and its backend.
"""

from importlib import import_module
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
    "init": "shoal.keras.process",
    "is_initialized": "shoal.keras.process",
    "local_rank": "shoal.keras.process",
    "local_size": "shoal.keras.process",
    "rank": "shoal.keras.process",
    "shutdown": "shoal.keras.process",
    "size": "shoal.keras.process",
}

__all__ = sorted([*_MODULES, "callbacks"])


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'shoal.keras' has no attribute {name!r}")
    try:
        if name == "callbacks":
            import shoal.keras.callbacks as callbacks

            return callbacks
        value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        from shoal.errors import missing_extra

        if not (needs := missing_extra(error)):
            raise
        raise ModuleNotFoundError(f"shoal.keras.{name} {needs}", name=error.name) from None
    return value


def __dir__() -> list[str]:
    return __all__
