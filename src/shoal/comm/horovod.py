"""Defines Horovod's names that ``shoal.horovod_torch``, ``shoal.tensorflow`` and ``shoal.keras`` share.

Reductions and formats, keywords that change nothing, names that are not here with their reasons, and values
as JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Literal

import numpy as np

from shoal.errors import ShoalError, UsageError, did_you_mean, missing_extra

Reduction = Literal["mean", "sum", "min", "max", "prod"]
Wire = Literal["bfloat16", "float16"]
Average: Literal["mean"] = "mean"
Sum: Literal["sum"] = "sum"
Min: Reduction = "min"
Max: Reduction = "max"
Product: Reduction = "prod"
REDUCTIONS = ("mean", "sum", "min", "max", "prod")
WIRES = ("bfloat16", "float16")


class Compression:
    """Formats in which float32 and float64 are sent.

    Attributes:
        none: as they are.
        fp16: as float16.
        bf16: as bfloat16, which has the range of float32.
    """

    none: Wire | None = None
    fp16: Wire = "float16"
    bf16: Wire = "bfloat16"


_EVERYWHERE: dict[str, Any] = {
    **dict.fromkeys(("mpi_built", "mpi_enabled", "mpi_threads_supported"), lambda: False),
    **dict.fromkeys(("gloo_built", "gloo_enabled", "nccl_built", "ddl_built", "ccl_built"), lambda: False),
    **dict.fromkeys(("cuda_built", "rocm_built"), lambda: False),
    "global_process_set": None,
}
"""Names of all packages: there is one engine with nothing built into it, and one process set."""

_SETS = "all processes take part in each call; for a part of them use torch.distributed.new_group"
_RESTART = "start the job again: it continues from its checkpoint, or use torchrun's --max-restarts"
_TRACE = "use the framework's profiler, or `shoal bench comm --trace FILE` for collectives alone"
_TF1 = "it is TensorFlow 1's; use broadcast_variables and DistributedOptimizer"
_OF_KERAS = "use keras.callbacks.ModelCheckpoint, and BackupAndRestore on rank 0"
NOT_HERE = {
    "Adasum": "use op=Average with a learning rate for the whole batch",
    "BestModelCheckpoint": _OF_KERAS,
    "BroadcastGlobalVariablesHook": _TF1,
    "CommitStateCallback": _RESTART,
    "HorovodInternalError": "a lost rank raises shoal.comm.engine.CommError; catch that",
    "LearningRateScheduleCallback": "use keras.callbacks.LearningRateScheduler",
    "PartialDistributedOptimizer": "use DistributedOptimizer, which reduces the gradients of all variables",
    "ProcessSet": _SETS,
    "SyncBatchNorm": "use torch.nn.SyncBatchNorm, for CUDA tensors",
    "add_process_set": _SETS,
    "alltoall": "use torch.distributed.all_to_all, or jax.lax.all_to_all over shoal.jax",
    "broadcast_": "use broadcast_variables([variable])",
    "broadcast_global_variables": _TF1,
    "cross_rank": "use rank() // local_size(), where hosts have equal numbers of processes",
    "cross_size": "use size() // local_size(), where hosts have equal numbers of processes",
    "elastic": _RESTART,
    "grouped_reducescatter": "call reducescatter for each tensor",
    "is_homogeneous": "compare local_size() of the ranks",
    "join": "give all ranks the same number of steps, as DistributedSampler and shoal.keras.Shards do",
    "load_model": "use keras.models.load_model, then compile(DistributedOptimizer(model.optimizer))",
    "remove_process_set": _SETS,
    "run": "start the program by `shoal launch --workers 4 -- python train.py`, torchrun or mpirun",
    "start_timeline": _TRACE,
    "stop_timeline": _TRACE,
}
"""Names of Horovod that some or all packages lack, with what to do instead."""

_NEUTRAL = frozenset(
    {
        "device",
        "device_dense",
        "device_sparse",
        "groups",
        "ignore_name_scope",
        "name",
        "num_groups",
        "scale_local_gradients",
    }
)
"""Keywords that are accepted and ignored: devices, groups and names do not affect the result."""
_NOTHING_ELSE = {
    "comm": "the launcher says which processes there are",
    "momentum_correction": "leave it out, or give False",
    "process_set": _SETS,
    "process_sets": _SETS,
}


def load(package: str, modules: Mapping[str, str], name: str) -> Any:
    """Return a name of a package, imported from its module when it is first used.

    Args:
        package: name of the package, as ``"shoal.keras"``.
        modules: module of each of its names.
        name: the name.

    Raises:
        AttributeError: the package lacks it; says why, if it is one of :data:`NOT_HERE`.
        ModuleNotFoundError: a framework is not installed; says what to install.
    """
    if name in _EVERYWHERE:
        return _EVERYWHERE[name]
    if name not in modules:
        reason = f": {NOT_HERE[name]}" if name in NOT_HERE else f".{did_you_mean(name, modules)}"
        raise AttributeError(f"module {package!r} has no attribute {name!r}{reason}")
    try:
        module = import_module(modules[name])
    except ModuleNotFoundError as error:
        if not (needs := missing_extra(error)):
            raise
        raise ModuleNotFoundError(f"{package}.{name} {needs}", name=error.name) from None
    value = module if module.__name__ == f"{package}.{name}" else getattr(module, name)
    setattr(sys.modules[package], name, value)
    return value


def check_keywords(call: str, keywords: Mapping[str, Any]) -> None:
    """Accept Horovod's keywords that change nothing, and refuse others.

    Args:
        call: name of the function, for messages.
        keywords: that it does not have.

    Raises:
        UsageError: a keyword would change something, as a process set does.
        TypeError: it is none of Horovod's.
    """
    for name, value in keywords.items():
        if name in _NOTHING_ELSE:
            if value not in (None, False, [], ()):
                raise UsageError(f"{call}({name}={value!r:.40}) is not there: {_NOTHING_ELSE[name]}")
        elif name not in _NEUTRAL:
            known = (*_NEUTRAL, *_NOTHING_ELSE)
            raise TypeError(f"{call}() has no keyword {name!r}.{did_you_mean(name, known)}")


def check_reduction(op: Any, average: bool | None = None, allowed: tuple[str, ...] = REDUCTIONS) -> Reduction:
    """Return the reduction that is asked for.

    Args:
        op: one of :data:`REDUCTIONS`; ``None``: the average.
        average: the older keyword for ``Average`` and ``Sum``; ``None``: not given.
        allowed: those that the call has.

    Raises:
        UsageError: it is another one.
    """
    if average is not None:
        op = Average if average else Sum
    reduction: Reduction = Average if op is None else op
    if reduction not in allowed:
        raise UsageError(f"op {op!r} is not known; it is one of {', '.join(allowed)}")
    return reduction


def check_wire(compression: Any) -> Wire | None:
    """Return the format of a call.

    Raises:
        UsageError: it is none of :class:`Compression`.
    """
    if compression is not None and compression not in WIRES:
        raise UsageError(f"compression {compression!r} is not known; it is 'bfloat16', 'float16' or None")
    wire: Wire | None = compression
    return wire


# ---- values as JSON -------------------------------------------------------------------------------------


def to_json(value: Any, describe: Callable[[Any], Any] = lambda _: None) -> Any:
    """Return what JSON can hold of a value, from which :func:`from_json` makes an equal one.

    Args:
        value: numbers, strings, ``None``, lists, tuples and dicts, and what ``describe`` knows.
        describe: returns what stands for another value, such as a tensor that is sent beside the JSON, or
            ``None``.

    Raises:
        TypeError: the value is of another type: it would have to be unpickled.
    """
    match value:
        case None | bool() | int() | float() | str():
            return value
        case np.bool_() | np.integer() | np.floating():
            return value.item()
        case list():
            return [to_json(each, describe) for each in value]
        case tuple():
            return {"tuple": [to_json(each, describe) for each in value]}
        case dict():
            pairs = value.items()
            return {"dict": [[to_json(key, describe), to_json(each, describe)] for key, each in pairs]}
    if (described := describe(value)) is None:
        raise TypeError(
            f"an object of type {type(value).__name__} is not sent, as it would have to be unpickled: send "
            "numbers, strings, lists, tuples, dicts, and tensors on torch"
        )
    return {"other": described}


def from_json(encoded: Any, sender: str, restore: Callable[[Any], Any] | None = None) -> Any:
    """Return the value that :func:`to_json` encoded.

    Args:
        encoded: parsed JSON.
        sender: of the JSON, for messages.
        restore: returns the value that ``describe`` described.

    Raises:
        ShoalError: it was not made by :func:`to_json`.
    """
    match encoded:
        case list():
            return [from_json(each, sender, restore) for each in encoded]
        case {"tuple": list(items)}:
            return tuple(from_json(each, sender, restore) for each in items)
        case {"dict": list(pairs)}:
            try:
                return {
                    from_json(key, sender, restore): from_json(each, sender, restore) for key, each in pairs
                }
            except (TypeError, ValueError):
                pass
        case {"other": described} if restore is not None:
            return restore(described)
        case _ if not isinstance(encoded, dict):
            return encoded
    raise ShoalError(f"{sender} sent {encoded!r:.60}, which is no object of broadcast_object")
