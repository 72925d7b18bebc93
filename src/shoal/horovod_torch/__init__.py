"""Provides Horovod's names for PyTorch programs: ``import shoal.horovod_torch as hvd``.

:func:`init` makes backend ``"shoal"`` torch's default process group, so that ``torch.distributed`` works
beside it. :func:`DistributedOptimizer` averages gradients while the backward pass runs, in buckets of a fixed
order; :func:`broadcast_parameters` and :func:`broadcast_optimizer_state` begin.

New programs are shorter with ``torch.distributed`` and DistributedDataParallel. The names are imported when
they are first used.
"""

from typing import Any

_MODULES = {
    "Average": "shoal.comm.horovod",
    "Compression": "shoal.comm.horovod",
    "DistributedOptimizer": "shoal.horovod_torch.optimizer",
    "Max": "shoal.comm.horovod",
    "Min": "shoal.comm.horovod",
    "Product": "shoal.comm.horovod",
    "Sum": "shoal.comm.horovod",
    "allgather": "shoal.horovod_torch.ops",
    "allgather_async": "shoal.horovod_torch.ops",
    "allgather_object": "shoal.horovod_torch.state",
    "allreduce": "shoal.horovod_torch.ops",
    "allreduce_": "shoal.horovod_torch.ops",
    "allreduce_async": "shoal.horovod_torch.ops",
    "allreduce_async_": "shoal.horovod_torch.ops",
    "alltoall": "shoal.horovod_torch.ops",
    "alltoall_async": "shoal.horovod_torch.ops",
    "barrier": "shoal.horovod_torch.process",
    "broadcast": "shoal.horovod_torch.ops",
    "broadcast_": "shoal.horovod_torch.ops",
    "broadcast_async": "shoal.horovod_torch.ops",
    "broadcast_async_": "shoal.horovod_torch.ops",
    "broadcast_object": "shoal.horovod_torch.state",
    "broadcast_optimizer_state": "shoal.horovod_torch.state",
    "broadcast_parameters": "shoal.horovod_torch.state",
    "cross_rank": "shoal.horovod_torch.process",
    "cross_size": "shoal.horovod_torch.process",
    "grouped_allgather": "shoal.horovod_torch.ops",
    "grouped_allgather_async": "shoal.horovod_torch.ops",
    "grouped_allreduce": "shoal.horovod_torch.ops",
    "grouped_allreduce_": "shoal.horovod_torch.ops",
    "grouped_allreduce_async": "shoal.horovod_torch.ops",
    "grouped_allreduce_async_": "shoal.horovod_torch.ops",
    "grouped_reducescatter": "shoal.horovod_torch.ops",
    "grouped_reducescatter_async": "shoal.horovod_torch.ops",
    "init": "shoal.horovod_torch.process",
    "is_initialized": "shoal.horovod_torch.process",
    "local_rank": "shoal.horovod_torch.process",
    "local_size": "shoal.horovod_torch.process",
    "poll": "shoal.horovod_torch.ops",
    "rank": "shoal.horovod_torch.process",
    "reducescatter": "shoal.horovod_torch.ops",
    "reducescatter_async": "shoal.horovod_torch.ops",
    "shutdown": "shoal.horovod_torch.process",
    "size": "shoal.horovod_torch.process",
    "sparse_allreduce_async": "shoal.horovod_torch.ops",
    "synchronize": "shoal.horovod_torch.ops",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    from shoal.comm.horovod import load

    return load(__name__, _MODULES, name)


def __dir__() -> list[str]:
    return __all__
