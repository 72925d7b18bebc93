"""Averages gradients over workers in the backward pass; compiles models; mixed precision.

A loss is a sum over a micro-batch divided by a count over the *global* batch, so that the gradient does not
depend on how the global batch is divided.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from shoal.decide.server_assignment import MIB, recommended_bucket_bytes
from shoal.env.machine import compiler_problem
from shoal.errors import UsageError
from shoal.train.config import DistributedConfig, auto_precision
from shoal.train.update import average_over_workers, mean_of_workers
from shoal.train.weight_averaging import own_norms, running_statistics
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


class DataParallel(DistributedDataParallel):
    """A model whose gradients are averaged over all workers.

    Attributes:
        wire: communication hook of 8-bit gradients, which has residuals; ``None`` for other formats.
        average: whether backward averages; otherwise the update does, after clipping per worker.
        has_averaged: whether a backward pass has averaged gradients since :class:`~shoal.train.step.Step` set
            it to false.
        served: sends gradients to servers that update the weights (``shoal.train.servers.update``), if any.
        precision: autocast type of the forward pass, whose 16-bit outputs become fp32 (:func:`in_fp32`).
        norms: batch norms with running statistics, of which each worker has its own
            (:func:`~shoal.train.weight_averaging.own_norms`).
    """

    wire: Any = None
    average = True
    has_averaged = False
    served: Any = None
    precision: Precision | None = None
    norms: Sequence[_BatchNorm] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self.precision is None else self.precision.autocast():
            outputs = super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]
        return in_fp32(outputs)

    def average_norms(self) -> None:
        """Replace running means and variances of batch norms by their means over all workers.

        Each worker's norms see its own micro-batches. Averaged in each step (0.2 MB beside ResNet-50's 102 MB
        of gradients), a checkpoint and an evaluation find the same model on every worker, whenever they come
        and however the run was interrupted.
        """
        average_over_workers(running_statistics([norm for norm in self.norms if norm.training]))

    def settle_buckets(self) -> None:
        """Make DDP rebuild its buckets now, by a backward pass with zero gradients.

        DDP rebuilds them after its first backward pass. Otherwise the first step of a resumed run would sum
        in another order than the same step of an uninterrupted run.
        """
        model = self.module
        with nullcontext() if self.wire is None else self.wire.no_error_feedback():
            self.module = _TouchAll([p for p in model.parameters() if p.requires_grad])
            try:
                # on a GPU, DDP's forward fails without an input, which it moves to the device
                super().forward(torch.zeros(())).backward()  # type: ignore[no-untyped-call]
            finally:
                self.module = model
        self.zero_grad()

    def volatile_state(self) -> dict[str, Tensor]:
        """Return copies of the tensors besides gradients that forward and backward change."""
        state = {f"buffer.{name}": value for name, value in self.module.named_buffers()}
        if self.wire is not None:
            state |= {f"wire.{name}": value for name, value in self.wire.residuals().items()}
        return {name: value.clone() for name, value in state.items()}

    def restore_volatile(self, before: dict[str, Tensor]) -> None:
        """Restore the tensors of :meth:`volatile_state`, and drop gradients that servers have."""
        if self.served is not None:
            self.served.abandon()
        for name, value in self.module.named_buffers():
            value.copy_(before[f"buffer.{name}"])
        if self.wire is not None:
            for name, value in self.wire.residuals().items():
                value.copy_(before.get(f"wire.{name}", torch.zeros_like(value)))


class _Touch(torch.autograd.Function):
    """Returns 0. The gradient is 0 with the strides of the parameter; DDP warns about others."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        ctx.save_for_backward(parameter)
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Tensor:
        (parameter,) = ctx.saved_tensors
        return torch.zeros_like(parameter)


class _TouchAll(nn.Module):
    """A model whose gradient is zero for each of ``parameters``, computed from last to first."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.touched = parameters

    def forward(self, total: Tensor) -> Tensor:
        for parameter in self.touched:
            total = total.to(parameter.device) + _Touch.apply(parameter)
        return total


def wrap_model(
    model: nn.Module,
    world: World,
    config: DistributedConfig,
    precision: Precision,
    lap: Callable[[str], None],
) -> DataParallel:
    """Wrap ``model`` so that backward averages its gradients over all workers.

    Args:
        model: on the device of the worker.
        world: the workers.
        config: bucket size and wire format.
        precision: autocast type of the forward pass.
        lap: called with ``"backward"`` when the last gradient is ready; the rest of backward is waiting.

    Raises:
        UsageError: 8-bit gradients on a GPU, or a model that is sharded, wrapped already or has nothing to
            train.
    """
    _require_replica(model)
    recommended = recommended_bucket_bytes(
        world.num_hosts,
        ranks_per_host=world.place.num_local_workers,
        gradient_bytes=sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad),
    )
    ddp = DataParallel(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        bucket_cap_mb=config.bucket_mb or recommended / MIB,
        gradient_as_bucket_view=True,
        **{_SYNC_BUFFERS: False},  # type: ignore[arg-type]
    )
    ddp.precision, ddp.norms = precision, own_norms(model)
    hook: Callable[..., Any] = mean_of_workers
    if config.wire == "bf16":
        from shoal.comm.hooks import bf16_wire

        hook = bf16_wire
    elif config.wire == "int8":
        if world.device.type != "cpu":
            raise UsageError(
                "distributed.wire int8 supports CPU tensors only, and this run uses GPUs: use bf16 or fp32"
            )
        from shoal.comm.hooks import EightBitWire

        timeout = timedelta(seconds=config.timeout_s)
        ddp.wire = hook = EightBitWire(model.named_parameters(), timeout=timeout)

    def average(group, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        if bucket.is_last():
            ddp.has_averaged = True
            lap("backward")
        return hook(group, bucket) if ddp.served is None else ddp.served.begin_updates(bucket)

    ddp.register_comm_hook(dist.group.WORLD, average)
    return ddp


def _require_replica(model: nn.Module) -> None:
    """Check that each worker has the whole model, with weights to train."""
    if isinstance(model, DistributedDataParallel):
        raise UsageError(
            "run.data_parallel was given a model that DistributedDataParallel has wrapped already"
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


def compile_model(module: nn.Module, world: World, wanted: bool | None, *, dynamic: bool | None) -> list[str]:
    """Compile ``module`` in place with ``torch.compile``.

    Args:
        module: a wrapped model, or a part of one.
        world: the workers.
        wanted: whether to compile; ``None``: on a GPU, if there is a C compiler.
        dynamic: whether shapes vary; ``None``: torch detects it.

    Returns:
        Lines to print: the reason if a model on a GPU is not compiled by default.
    """
    if wanted is None and world.device.type == "cuda":
        if problem := compiler_problem():
            return [f"not compiled: {problem}"]
        wanted = True
    if not wanted:
        return []
    # Dynamo cuts a graph at DDP's buckets, so that sums begin early. One worker sums nothing, and of a
    # model that compiles its layers one by one they begin early anyway.
    if world.num_workers == 1 or type(module).compile is not nn.Module.compile:
        torch._dynamo.config.optimize_ddp = False
    # The layers of a text model share one function, with a graph for each kind of layer and of batch.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_GRAPHS)
    module.compile(dynamic=dynamic)
    return []


# ---- mixed precision --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The autocast type of a device; ``dtype`` is ``None`` for fp32, without autocast."""

    name: str
    device_type: str
    dtype: torch.dtype | None
    note: str = ""
    """Why it is not the type that the device is for, in a line; mostly empty."""

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of the forward pass."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype)


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
        found = "; ".join(f"{each} on {', '.join(names)}" for each, names in hosts.items())
        raise UsageError(
            f"train.precision differs between the workers: {found}; give all the same one, such as "
            "--train.precision fp32 (auto is bf16, fp16 or fp32 by the kind of the device)"
        )
    return choose()


def in_fp32(value: Any) -> Any:
    """Return ``value`` with its 16-bit floating tensors in fp32.

    They may be in tuples, lists, mappings and dataclasses, such as those of transformers, which are copied
    and keep their types. The gradient goes back in the type that the tensor had.
    """
    if isinstance(value, Tensor):
        return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
    if isinstance(value, list | tuple):
        make = getattr(value, "_make", type(value))  # of named tuples
        return make([in_fp32(each) for each in value])
    if isinstance(value, MutableMapping):
        copied = copy(value)
        for key, each in value.items():
            copied[key] = in_fp32(each)
        return copied
    if is_dataclass(value) and not isinstance(value, type):
        made = copy(value)
        for field in fields(value):
            object.__setattr__(made, field.name, in_fp32(getattr(value, field.name)))  # frozen or not
        return made
    return value


class LossScale:
    """Static or dynamic loss scale (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2).

    The dynamic scale doubles after ``growth_interval`` finite steps in a row and halves at each overflow.

    Args:
        enabled: ``False`` for fp32 and bf16, which have enough range; the scale is then 1.
        static: a fixed scale; ``None`` for a dynamic one.
        growth_interval: finite steps before the scale doubles.

    Raises:
        UsageError: ``static`` is not above 0.
    """

    def __init__(self, *, enabled: bool, static: float | None = None, growth_interval: int = 2_000) -> None:
        if static is not None and not static > 0:
            raise UsageError(f"train.loss_scale {static} must be above 0")
        self.dynamic = enabled and static is None
        self.value = (65_536.0 if static is None else static) if enabled else 1.0
        self.growth_interval = growth_interval
        self.num_finite = 0

    def update(self, *, finite: bool) -> None:
        """Adjust the scale after a step whose gradients were ``finite`` or not."""
        if not self.dynamic:
            return
        if not finite:
            self.value, self.num_finite = max(self.value / 2, 1.0), 0
        else:
            self.num_finite += 1
            if self.num_finite == self.growth_interval:
                self.value, self.num_finite = self.value * 2, 0

    def state_dict(self) -> dict[str, float]:
        """Return the scale and the number of finite steps since it changed."""
        return {"value": self.value, "num_finite": self.num_finite, "dynamic": self.dynamic}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore a dynamic scale, if the state is of one; a static one is that of the settings."""
        if self.dynamic and state.get("dynamic", True):
            self.value, self.num_finite = float(state["value"]), int(state["num_finite"])
