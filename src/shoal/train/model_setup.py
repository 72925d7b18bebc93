"""Prepares models for training: wraps them for averaged gradients, compiles them, chooses the precision."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shoal.decide.server_assignment import MIB, recommended_bucket_bytes
from shoal.env.machine import compiler_problem
from shoal.errors import UsageError
from shoal.train.config import DistributedConfig, auto_precision
from shoal.train.gradients import (
    ChangingWorkers,
    DataParallel,
    ManyWorkers,
    OneWorker,
    Precision,
    mean_of_workers,
    own_norms,
)
from shoal.train.world import World, run_on_all

# renamed in torch 2.15, which warns about the old name
_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)

_MOST_GRAPHS = 64
"""Graphs of one compiled function."""

_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def wrap_model(
    model: nn.Module,
    world: World,
    config: DistributedConfig,
    precision: Precision,
    lap: Callable[[str], None],
    *,
    on_servers: bool = False,
) -> DataParallel:
    """Wrap ``model`` so that backward averages its gradients over all workers.

    One worker has nothing to average, so DistributedDataParallel is for several, and for servers and wire
    formats, which take gradients from it.

    Args:
        model: on the device of the worker.
        world: the workers.
        config: bucket size and wire format.
        precision: autocast type of the forward pass.
        lap: called with ``"backward"`` when the last gradient is ready; the rest of backward is waiting.
        on_servers: whether servers take the gradients.

    Raises:
        UsageError: the model is sharded, wrapped already or has nothing to train.
    """
    _require_replica(model)
    wrapped: DataParallel
    if world.members is not None:
        wrapped = ChangingWorkers(
            model, lambda is_first: _distributed(model, world, config, lap, init_sync=is_first)
        )
    elif world.num_workers == 1 and config.wire == "fp32" and not on_servers:
        wrapped = OneWorker(model, world.device)
    else:
        wrapped = _distributed(model, world, config, lap)
    wrapped.precision, wrapped.norms = precision, own_norms(model)
    return wrapped


def _distributed(
    model: nn.Module,
    world: World,
    config: DistributedConfig,
    lap: Callable[[str], None],
    *,
    init_sync: bool = True,
) -> ManyWorkers:
    """Return the model in DistributedDataParallel, with its final buckets.

    Args:
        init_sync: give all workers the first one's weights.
    """
    recommended = recommended_bucket_bytes(
        world.num_hosts,
        ranks_per_host=world.ranks.num_local_workers,
        gradient_bytes=sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad),
    )
    ddp = ManyWorkers(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        bucket_cap_mb=config.bucket_mb or recommended / MIB,
        gradient_as_bucket_view=True,
        init_sync=init_sync,
        **{_SYNC_BUFFERS: False},  # type: ignore[arg-type]
    )
    hook: Callable[..., Any] = mean_of_workers
    if config.wire == "bf16":
        from shoal.comm.hooks import bf16_wire

        hook = bf16_wire
    elif config.wire == "int8":
        from shoal.comm.hooks import EightBitWire

        timeout = timedelta(seconds=config.timeout_s)
        ddp.wire = hook = EightBitWire(model.named_parameters(), timeout=timeout)

    ddp.hook, ddp.lap = hook, lap
    ddp.register_comm_hook(dist.group.WORLD, ddp.average_bucket)
    ddp.settle_buckets()
    return ddp


def _require_replica(model: nn.Module) -> None:
    """Check that each worker has the whole model, with weights to train."""
    if isinstance(model, DistributedDataParallel | DataParallel):
        raise UsageError(
            "run.data_parallel was given a model that it or DistributedDataParallel has wrapped already"
        )
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise UsageError(
            "run.data_parallel was given a model whose parameters are sharded (DTensor): FSDP2 and tensor "
            "parallelism average gradients themselves, so use the model as it is, without run.data_parallel"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(
            f"run.data_parallel was given a {type(model).__name__} without parameters that require "
            "gradients: only models that are trained need it"
        )


def compile_model(
    module: nn.Module, world: World, compiles: bool | None, *, dynamic: bool | None
) -> list[str]:
    """Compile ``module`` in place with ``torch.compile``.

    Args:
        module: a wrapped model, or a part of one.
        world: the workers.
        compiles: whether to compile; ``None``: on a GPU, if there is a C compiler.
        dynamic: whether shapes vary; ``None``: torch detects it.

    Returns:
        Lines to print: the reason if a model on a GPU is not compiled by default.
    """
    if compiles is None and world.device.type == "cuda":
        if problem := compiler_problem():
            return [f"not compiled: {problem}"]
        compiles = True
    if not compiles:
        return []
    # Dynamo cuts a graph at DDP's buckets, so that sums begin early. One worker sums nothing, and of a
    # model that compiles its layers one by one they begin early anyway.
    if world.num_workers == 1 or type(module).compile is not nn.Module.compile:
        torch._dynamo.config.optimize_ddp = False
    # The layers of a text model share one function, with a graph for each kind of layer and of batch.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_GRAPHS)
    module.compile(dynamic=dynamic)
    return []


def choose_precision(name: str, device: torch.device, *, no_fp16: str = "") -> Precision:
    """Return the precision of this name.

    ``auto`` is bf16 on GPUs that have it (compute capability 8.0), fp16 on other GPUs, and fp32 on CPUs,
    whatever units for bf16 a processor has: the numbers of a run do not depend on it.

    Args:
        no_fp16: the recipe or the option that cannot take fp16 with a dynamic loss scale; may be empty.
            ``auto`` is then fp32 on GPUs without bf16.

    Raises:
        UsageError: ``name`` is not one of auto, fp32, bf16, fp16.
    """
    note = ""
    if name == "auto":
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        name = auto_precision(capability, no_fp16)
        if name == "fp32" and capability is not None:
            note = f"precision fp32: this GPU has no bf16, and {no_fp16} cannot take fp16"
    if name not in _DTYPES:
        raise UsageError(f"train.precision {name!r} must be one of auto, {', '.join(_DTYPES)}")
    return Precision(name=name, device_type=device.type, dtype=_DTYPES[name], note=note)


def agree_on_precision(name: str, world: World, *, no_fp16: str = "") -> Precision:
    """Return the precision of this name, the same on all workers, who all call this.

    Args:
        no_fp16: see :func:`choose_precision`.

    Raises:
        UsageError: workers have different ones, or ``name`` is none.
    """

    def choose() -> Precision:
        return choose_precision(name, world.device, no_fp16=no_fp16)

    hosts: dict[str, dict[str, None]] = {}
    for each, host in run_on_all(world.control, lambda: [choose().name, os.uname().nodename]):
        hosts.setdefault(each, {})[host] = None
    if len(hosts) > 1:
        differences = "; ".join(f"{each} on {', '.join(names)}" for each, names in hosts.items())
        raise UsageError(
            f"train.precision differs between the workers: {differences}; give all the same one, such as "
            "--train.precision fp32 (auto is bf16, fp16 or fp32 by the kind of the device)"
        )
    return choose()
