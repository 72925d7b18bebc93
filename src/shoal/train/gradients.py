"""Averages gradients over workers, clips them, updates weights; mixed precision.

A loss is a sum over a micro-batch divided by a count over the *global* batch, so that the gradient does not
depend on how the global batch is divided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from shoal import record
from shoal.data import precedence
from shoal.errors import UsageError
from shoal.optim.moments import clip_factor, device_norm, norm_of, parameters_of, scale_all
from shoal.optim.optimizer_shards import OptimizerShards


class DataParallel(nn.Module):
    """A model whose gradients are those of all workers.

    :class:`ManyWorkers`, :class:`OneWorker` or :class:`ChangingWorkers`.

    Attributes:
        module: the model itself.
        wire: communication hook of 8-bit gradients, which has residuals; ``None`` for other formats.
        average: whether backward averages; otherwise the update does, after clipping per worker.
        has_averaged: whether a backward pass has averaged gradients since :class:`~shoal.train.step.Step` set
            it to false.
        require_backward_grad_sync: false inside of :meth:`no_sync`, and where others take the gradients.
        sends: whether backward sends gradients, and may wait for those of other workers.
        served: sends gradients to servers that update the weights (``shoal.train.servers.update``), if any.
        precision: autocast type of the forward pass, whose 16-bit outputs become fp32 (:func:`in_fp32`).
        norms: batch norms with running statistics, of which each worker has its own (:func:`own_norms`).
    """

    module: Any
    wire: Any = None
    average = True
    has_averaged = False
    require_backward_grad_sync = True
    sends = True
    served: Any = None
    precision: Precision | None = None
    norms: Sequence[_BatchNorm] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self.precision is None else self.precision.autocast():
            outputs = self.run_model(*args, **kwargs)
        return in_fp32(outputs)

    def run_model(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, with its inputs on the device of its weights."""
        raise NotImplementedError

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context for forward and backward passes whose gradients are only added up."""
        raise NotImplementedError

    def average_norms(self) -> None:
        """Replace running means and variances of batch norms by their means over all workers.

        Each worker's norms see its own micro-batches. Averaged in each step (0.2 MB beside ResNet-50's 102 MB
        of gradients), a checkpoint and an evaluation find the same model on every worker, whenever they come
        and however the run was interrupted.
        """
        norms = [norm for norm in self.norms if norm.training]
        counts = [norm.num_batches_tracked for norm in norms if norm.num_batches_tracked is not None]
        mean_counts = [torch.stack(counts).float()] if counts else []  # parts of a batch may differ
        average_over_workers(running_statistics(norms) + mean_counts)
        if counts:
            torch._foreach_copy_(counts, list(mean_counts[0].round().long()))

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


class OneWorker(DataParallel):
    """A model of the only worker, whose gradients are those of all workers as backward leaves them.

    DistributedDataParallel would copy each of them into a bucket, which takes 22 ms of a step of BERT-large
    on an H200, and keep the buckets.
    """

    sends = False

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.module, self._device = module, device

    def run_model(self, *args: Any, **kwargs: Any) -> Any:
        self.has_averaged |= self.require_backward_grad_sync and torch.is_grad_enabled()
        if self._device.type != "cpu":
            args, kwargs = tree_map_only(Tensor, self._moved, (args, kwargs))
        return self.module(*args, **kwargs)

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.device == self._device else tensor.to(self._device, non_blocking=True)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before


class ManyWorkers(DataParallel, DistributedDataParallel):
    """A model whose backward pass averages gradients over all workers, in DistributedDataParallel's buckets.

    Attributes:
        hook: averages a bucket, as DDP's communication hooks do.
        lap: called with ``"backward"`` when the last gradient is ready; the rest of backward is waiting.
    """

    hook: Callable[..., Any]
    lap: Callable[[str], None]

    def run_model(self, *args: Any, **kwargs: Any) -> Any:
        return DistributedDataParallel.forward(self, *args, **kwargs)  # type: ignore[no-untyped-call]

    def no_sync(self) -> Any:
        return DistributedDataParallel.no_sync(self)

    def average_bucket(self, group, bucket):  # type: ignore[no-untyped-def]  # DDP refuses texts as annotations
        """Average a bucket, or send it to servers; DDP's communication hook."""
        precedence.OWN.begin()
        if bucket.is_last():
            self.has_averaged = True
            self.lap("backward")
        return self.hook(group, bucket) if self.served is None else self.served.begin_updates(bucket)

    def settle_buckets(self) -> None:
        """Make DDP rebuild its buckets now, by a backward pass with zero gradients.

        DDP rebuilds them after its first backward pass. Otherwise the first step of a resumed run would sum
        in another order than the same step of an uninterrupted run. If it fails, as where a worker is lost,
        the parameters are without hooks, and another wrapper can average them.
        """
        model = self.module
        with nullcontext() if self.wire is None else self.wire.no_error_feedback():
            self.module = _TouchAll([p for p in model.parameters() if p.requires_grad])
            try:
                # on a GPU, DDP's forward fails without an input, which it moves to the device
                self.run_model(torch.zeros(())).backward()
            except BaseException:
                self._remove_autograd_hooks()  # type: ignore[no-untyped-call]
                raise
            finally:
                self.module = model
                precedence.OWN.end()
        self.zero_grad()


class ChangingWorkers(DataParallel):
    """A model whose backward pass averages gradients over the present workers.

    Args:
        module: the model.
        make: wraps it for these workers; the argument says whether they get the first one's weights.
    """

    def __init__(self, module: nn.Module, make: Callable[[bool], ManyWorkers]) -> None:
        super().__init__()
        self.module, self._make = module, make
        self._present = [make(True)]  # as a list it is no submodule

    def renew(self) -> None:
        """Average over other workers from now on. A collective of them.

        It makes a new wrapper, since DistributedDataParallel reorders the buckets of a trained model.
        """
        self._present[0]._remove_autograd_hooks()  # type: ignore[no-untyped-call]
        self._present = [self._make(False)]

    @property
    def has_averaged(self) -> bool:
        return self._present[0].has_averaged

    @has_averaged.setter
    def has_averaged(self, value: bool) -> None:
        self._present[0].has_averaged = value

    @property
    def require_backward_grad_sync(self) -> bool:
        return self._present[0].require_backward_grad_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._present[0].require_backward_grad_sync = value

    def run_model(self, *args: Any, **kwargs: Any) -> Any:
        return self._present[0].run_model(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self._present[0].no_sync()
        return context


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


class Update:
    """Clips gradients and updates weights; by default each worker steps its own replica of the model.

    :meth:`shoal.train.run.Run.use` sets another one. Methods with ``optimizers`` get those of one
    :meth:`shoal.train.step.Step.update`.

    Args:
        on_device: leave the norm on the device, which clips and skips by it, where the optimizer can
            (:func:`skips_on_device`): the host queues the update and the next step without waiting.
        shards: divides the optimizers' state over workers; default: each has all of it.

    Attributes:
        note: a line for the beginning of a run; may be empty.
        is_synchronous: whether each step takes the gradients of all workers. Otherwise workers step apart,
            and :meth:`settle` synchronizes them.
        on_servers: whether servers keep weights or the optimizer's state.
    """

    note = ""
    is_synchronous = True
    on_servers = False

    def __init__(self, *, on_device: bool = False, shards: OptimizerShards | None = None) -> None:
        self.on_device, self.shards = on_device, shards
        if shards is not None:
            self.note = f"optimizer state divided over {shards.num_workers} workers (ZeRO-1)"
            if shards.num_workers == 1:
                self.note = "train.shard_optimizer has no effect: one worker has the whole optimizer state"
        self._is_skipped: Tensor | None = None

    # ---- of a step -------------------------------------------------------------------------------------

    def finish_gradients(
        self, *optimizers: Optimizer, max_norm: float | None, per_worker: bool, loss_scale: float
    ) -> float | Tensor:
        """Divide by the loss scale, average if ``per_worker``, and clip to ``max_norm``.

        Returns:
            The norm before clipping, the same on all workers. If it is not finite, the update is skipped. If
            it is a tensor on the device, the host does not know it yet: :meth:`apply` is called in any case,
            and must skip the update itself.
        """
        gradients = [p.grad for p in parameters_of(*optimizers) if p.grad is not None]
        self._is_skipped = None
        if self.on_device and gradients and all(map(self._skips_on_device, optimizers)):
            total_norm = device_norm(gradients) / loss_scale
            scale_all(gradients, clip_factor(total_norm, max_norm) / loss_scale)
            if per_worker:
                average_over_workers(gradients)
                total_norm = device_norm(gradients)
            self._is_skipped = total_norm.isfinite().logical_not().float()
            return total_norm
        norm = norm_of(gradients) / loss_scale
        if per_worker or math.isfinite(norm):
            scale_all(gradients, clip_factor(norm, max_norm) / loss_scale)
        if not per_worker:
            return norm
        average_over_workers(gradients)
        return norm_of(gradients)

    def apply(self, *optimizers: Optimizer) -> None:
        """Update the weights. It must not fail midway, since weights are not rolled back."""
        for optimizer in optimizers:
            with nullcontext() if self.shards is None else self.shards.restricted(optimizer):
                self._step(optimizer)
        if self.shards is not None:
            self.shards.broadcast(optimizers)

    def _step(self, optimizer: Optimizer) -> None:
        if self._is_skipped is None:
            optimizer.step()
            return
        optimizer.found_inf = self._is_skipped  # type: ignore[attr-defined]  # as torch's GradScaler
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf  # type: ignore[attr-defined]

    def _skips_on_device(self, optimizer: Optimizer) -> bool:
        """Return :func:`skips_on_device`, the same on all workers."""
        if self.shards is not None and isinstance(optimizer, torch.optim.SGD):
            return False  # a worker knows only its own momenta
        return skips_on_device(optimizer)

    def norm_of_gradients(self, parameters: Sequence[nn.Parameter]) -> float:
        """Return the norm of the gradients of some parameters, those of all workers. A collective."""
        return norm_of(p.grad for p in parameters if p.grad is not None)

    def weight_norm(self, *optimizers: Optimizer) -> float:
        """Return the norm of all weights. A collective."""
        return norm_of(p.detach() for p in parameters_of(*optimizers))

    def step_after(self, number: int) -> int:
        """Return the last step of the weights, after the step ``number`` that this worker has taken."""
        return number

    # ---- of a run --------------------------------------------------------------------------------------

    def held(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Return the parameters whose state this worker keeps, and restores from a checkpoint."""
        return parameters_of(optimizer) if self.shards is None else self.shards.owned(optimizer)

    def state_of(self, kept: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what checkpoints hold of the objects that the run keeps."""
        return kept

    def open(self, step: int) -> None:
        """Begin after step ``step``, with the weights and the state that are there. A collective."""

    def renew(self, optimizer: Optimizer) -> None:
        """Continue with another optimizer. A collective."""

    def check_synchronized(self, frequencies: Mapping[str, int], steps: Sequence[int]) -> None:
        """Check that workers can be synchronized where a run needs it.

        Args:
            frequencies: of lines, evaluations and checkpoints, in steps, by the names of the settings.
            steps: other steps, such as the last one.

        Raises:
            UsageError: they cannot.
        """

    def runs_ahead(self, *, asks: bool) -> bool:
        """Return whether this worker takes its next step without an agreement with the others.

        Args:
            asks: whether this worker needs an agreement; one of the next calls then returns false on all.
        """
        return False

    def settle(self) -> bool:
        """Wait until all workers have taken the same steps; return whether there was a wait. A collective."""
        return False

    def bring_state(self) -> None:
        """Update the kept objects for a checkpoint, where their state is elsewhere. A collective."""

    def bring_weights(self) -> None:
        """Bring the weights that are exported, where those of workers are rounded. A collective."""

    def row(self) -> record.Contributions | None:
        """Return a row for the record, beside a line."""
        return None


def require_same(kept: Optimizer, optimizers: Sequence[Optimizer]) -> None:
    """Check that a step is by the one optimizer whose steps are taken elsewhere.

    Raises:
        UsageError: it is by another one, or by several.
    """
    if len(optimizers) != 1 or optimizers[0] is not kept:
        given_name = "another optimizer" if len(optimizers) == 1 else f"{len(optimizers)} optimizers"
        raise UsageError(
            f"step.update() was given {given_name}, but servers or exchanges have the state of the one of "
            "run.keep(optimizer=...): give both the same"
        )


def skips_on_device(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer.step()`` takes ``found_inf``, a scalar of the device that is 1 to skip it.

    torch's fused optimizers do, and then leave weights, moments and counts of steps as they are. SGD makes
    its momenta in its first step, and leaves them unset if it skips that one, so the host decides about it.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):  # what torch's GradScaler looks at
        return False
    if not isinstance(optimizer, torch.optim.SGD):
        return True
    moved = [p for group in optimizer.param_groups if group["momentum"] for p in group["params"]]
    return all(optimizer.state[p].get("momentum_buffer") is not None for p in moved if p.grad is not None)


@torch.no_grad()
def average_over_workers(tensors: list[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Replace each of ``tensors``, of one type, by its mean over all workers."""
    if not tensors or dist.get_world_size(group) == 1:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors]) / dist.get_world_size(group)
    dist.all_reduce(flat, group=group)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    torch._foreach_copy_(tensors, [part.view_as(t) for part, t in zip(parts, tensors, strict=True)])


def mean_of_workers(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """Average a bucket with the bits of plain DDP and of servers that update weights.

    Each worker multiplies by 1 / workers before the sum. torch's ``allreduce_hook`` divides, which gives
    other bits unless the number of workers is a power of 2.
    """
    share = bucket.buffer().mul_(1.0 / dist.get_world_size(group))
    work = dist.all_reduce(share, group=group, async_op=True)
    assert work is not None
    total: Future[list[Tensor]] = work.get_future()
    return total.then(lambda done: done.value()[0])


def own_norms(model: nn.Module) -> list[_BatchNorm]:
    """Return the batch norms whose running statistics are those of a worker's own micro-batches."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    return [norm for norm in norms if norm.running_mean is not None and not isinstance(norm, SyncBatchNorm)]


def running_statistics(norms: Iterable[_BatchNorm]) -> list[Tensor]:
    """Return the running means and variances."""
    pairs = [(norm.running_mean, norm.running_var) for norm in norms]
    return [tensor for pair in pairs for tensor in pair if tensor is not None]


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
