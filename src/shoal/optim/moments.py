"""Shares between the optimizers: steps over groups, devices and types, checks of options, and norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim.optimizer import Optimizer, ParamsT

from shoal import native
from shoal.errors import UsageError
from shoal.optim.step_counts import StepCounts

_AT_LEAST_0 = ("lr", "eps", "eps1", "weight_decay", "eta")
_DECAYS = ("beta1", "beta2", "momentum")


Implementation = Literal["auto", "foreach", "native"]
_IMPLEMENTATIONS = ("auto", "foreach", "native")

_UNCORRECTED = 1e9
"""A step after which ``1 - beta ** step`` is 1."""

Scale = Tensor | float
Squares = tuple[Tensor | float, Tensor | float]
"""The sums of squares of the scaled gradients, and of the weights before the update."""


@dataclass(frozen=True)
class Batch:
    """Parameters with a gradient, of one group, device and type, and what their update reads."""

    group: dict[str, Any]
    params: list[Tensor]
    states: list[dict[str, Any]]
    """Of each parameter; their steps count the one that is taken."""
    scale: Scale
    """Factor on the gradients."""
    counts: StepCounts | None = None
    """Of the parameters, this step included; ``None`` where states have no ``step``."""
    chosen_indices: tuple[int, ...] | None = None
    """Of the parameters among those that are counted; ``None``: all, in their order."""
    skip: Tensor | None = None
    """A scalar of the device that is not 0 where all must stay as it is; ``None``: the update is taken."""

    @cached_property
    def weights(self) -> list[Tensor]:
        """This worker's parts of the parameters."""
        return [local_part(parameter) for parameter in self.params]

    @property
    def grads(self) -> list[Tensor]:
        """This worker's parts of the gradients, not scaled."""
        return [local_part(parameter.grad) for parameter in self.params]

    @property
    def steps(self) -> list[float]:
        """Numbers of this step of each parameter, from 1; waits for a device that counts them."""
        assert self.counts is not None
        numbers = self.counts.numbers()
        return numbers if self.chosen_indices is None else [numbers[k] for k in self.chosen_indices]

    @property
    def lr(self) -> float:
        return float(self.group["lr"])

    def chosen(self, indices: Sequence[int]) -> Batch:
        """Return some of the parameters."""
        return replace(
            self,
            params=[self.params[k] for k in indices],
            states=[self.states[k] for k in indices],
            chosen_indices=tuple(
                indices if self.chosen_indices is None else map(self.chosen_indices.__getitem__, indices)
            ),
        )

    def entries(self, name: str) -> list[Tensor]:
        """Return this worker's part of an entry of each state."""
        return [local_part(state[name]) for state in self.states]

    def squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return :func:`whole_squares` of tensors that are sharded as the parameters."""
        return whole_squares(self.params, tensors)

    def update_moments(self, grads: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Blend local gradients into both moments; return the first, and new roots of the second."""
        beta1, beta2 = self.group["betas"]
        exp_avgs, exp_avg_sqs = self.entries("exp_avg"), self.entries("exp_avg_sq")
        torch._foreach_lerp_(exp_avgs, grads, 1.0 - beta1)
        torch._foreach_mul_(exp_avg_sqs, beta2)
        torch._foreach_addcmul_(exp_avg_sqs, grads, grads, value=1.0 - beta2)
        return exp_avgs, list(torch._foreach_sqrt(exp_avg_sqs))

    def adam_updates(self, grads: list[Tensor]) -> list[Tensor]:
        """Blend local gradients into both moments; return new tensors m^ / (sqrt(v^) + eps).

        On a GPU by torch's fused kernel, which reads and writes each tensor once; elsewhere, and for other
        memory layouts, by ``_foreach_`` operations.
        """
        steps = self.steps if self.group["bias_correction"] else []
        moments = self.entries("exp_avg"), self.entries("exp_avg_sq")
        if self.weights[0].is_cuda and same_layout(grads, *moments):
            return fused_adam_updates(grads, *moments, self.group, steps)
        beta1, beta2 = self.group["betas"]
        exp_avgs, denominators = self.update_moments(grads)
        if steps:
            torch._foreach_div_(denominators, [math.sqrt(1.0 - beta2**step) for step in steps])
        torch._foreach_add_(denominators, self.group["eps"])
        if steps:
            torch._foreach_mul_(denominators, [1.0 - beta1**step for step in steps])
        return list(torch._foreach_div(exp_avgs, denominators))

    def trust_ratios(self, weight_squares: Tensor, updates: Sequence[Tensor]) -> Tensor:
        """Return |w| / |u| of each whole tensor, 1 where either norm is 0: shape ``[len(params)]``.

        Args:
            weight_squares: the sums of squares of the weights.
            updates: the updates u, sharded as the parameters.
        """
        weight_norms, update_norms = weight_squares.sqrt(), self.squares(updates).sqrt()
        both = (weight_norms > 0) & (update_norms > 0)
        return torch.where(both, weight_norms / update_norms, 1.0)

    def lay_out(self, name: str) -> None:
        """Replace an entry of the states that was loaded with another memory layout than the parameter's."""
        for parameter, state in zip(self.params, self.states, strict=True):
            state[name] = _laid_out_like(parameter, state[name])

    def native_arguments(self, *options: str, **entries: str) -> dict[str, Any]:
        """Return the arguments of a native kernel: weights, gradients, and what all kernels take.

        Args:
            options: options of the group, passed under their names.
            entries: argument -> the states' entry to pass; one that was loaded with another memory layout is
                replaced by a copy.
        """
        for name in entries.values():
            self.lay_out(name)
        return {
            "weights": self.params,
            "grads": native_grads(self.params),
            **{argument: self.entries(name) for argument, name in entries.items()},
            "learning_rate": self.lr,
            "grad_scale": float(self.scale),
            "num_threads": torch.get_num_threads(),
            **{name: self.group[name] for name in options},
        }


class MomentsOptimizer(Optimizer):
    """Base of the optimizers: updates the tensors of one device and type together, and keeps the last norms.

    A subclass defines the update, on ``_foreach_`` operations and optionally by a native kernel for float32
    on the CPU, and the state of a new parameter where that is not torch's Adam's.
    """

    def __init__(
        self, params: ParamsT, defaults: dict[str, Any], *, implementation: Implementation = "foreach"
    ) -> None:
        if implementation not in _IMPLEMENTATIONS:
            raise UsageError(
                f"implementation={implementation!r} must be one of {', '.join(_IMPLEMENTATIONS)}"
            )
        self.implementation = implementation
        self._grad_norm: Tensor | float = 0.0
        self._weight_norm: Tensor | float = 0.0
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; missing options are those given at construction.

        Raises:
            UsageError: a value is out of its range.
        """
        check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, grad_scale: float = 1.0
    ) -> float | None:
        """Update all parameters that have a gradient.

        Args:
            closure: evaluates the model again and returns the loss.
            grad_scale: gradients are multiplied by it on the fly (1 / loss scale, 1 / target tokens) and stay
                as they are. For an optimizer that normalises them it only matters relative to an epsilon.

        Returns:
            The result of the closure.

        Raises:
            UsageError: a gradient is sparse, or a parameter does not suit the implementation.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        amp_scale: Tensor | None = getattr(self, "grad_scale", None)  # of torch's GradScaler
        self._apply_update(grad_scale if amp_scale is None else grad_scale / amp_scale)
        return loss

    def norms(self) -> tuple[float, float]:
        """Return the global norms of the last step: of the scaled gradients before clipping or normalisation,
        and of the weights that had a gradient, before the update. Waits for the device.
        """
        return float(self._grad_norm), float(self._weight_norm)

    def _apply_update(self, scale: Scale) -> None:
        squares: list[Squares] = []
        others: list[Batch] = []
        for group in self.param_groups:
            for is_native, params in self._batches(group):
                states = self._states_of(group, params)
                counts = self._count_step(states, params) if "step" in states[0] else None
                skip = getattr(self, "found_inf", None)
                batch = Batch(group, params, states, scale, counts, skip=skip)
                if is_native:
                    grad_norm, weight_norm = self._update_native(batch)
                    squares.append((grad_norm**2, weight_norm**2))
                else:
                    others.append(batch)
        squares += self._update_all(others)
        self._grad_norm = root_of_sum([grad_sq for grad_sq, _ in squares])
        self._weight_norm = root_of_sum([weight_sq for _, weight_sq in squares])

    def _new_state(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
        """Return the state of a parameter before its first step; a ``step`` in it is counted from 0."""
        first, second = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return {"step": torch.tensor(0.0), "exp_avg": first, "exp_avg_sq": second}

    def _update_all(self, batches: Sequence[Batch]) -> list[Squares]:
        """Update the parameters of all groups in place, those for the native kernel left out."""
        return [self._update(batch) for batch in batches]

    def _update(self, batch: Batch) -> Squares:
        """Update parameters in place."""
        raise NotImplementedError

    def _update_native(self, batch: Batch) -> tuple[float, float]:
        """Update contiguous float32 tensors on the CPU by a native kernel; return both norms."""
        raise NotImplementedError

    def _batches(self, group: dict[str, Any]) -> list[tuple[bool, list[Tensor]]]:
        """Return the group's parameters with a gradient: those for the native kernel, the others by kind."""
        fused: list[Tensor] = []
        others: list[Tensor] = []
        for parameter in group["params"]:
            if parameter.grad is not None:
                if parameter.grad.is_sparse or parameter.is_complex():
                    name = type(self).__name__
                    raise UsageError(f"{name} takes neither sparse gradients nor complex parameters")
                (fused if self._goes_native(group, parameter) else others).append(parameter)
        by_kind = [(False, [others[k] for k in indices]) for indices in indices_by_kind(others)]
        return [(True, fused), *by_kind] if fused else by_kind

    def _goes_native(self, group: dict[str, Any], parameter: Tensor) -> bool:
        if self.implementation == "foreach":
            return False
        suits = (
            parameter.is_cpu
            and parameter.dtype == torch.float32
            and (parameter.is_contiguous() or parameter.is_contiguous(memory_format=torch.channels_last))
            and not isinstance(parameter, DTensor)
        )
        if self.implementation == "native" and not suits:
            raise UsageError(
                "implementation='native' takes contiguous float32 parameters on the CPU that are not "
                f"sharded, got {type(parameter).__name__} {tuple(parameter.shape)} {parameter.dtype} on "
                f"{parameter.device}; use 'auto'"
            )
        return suits and (self.implementation == "native" or native.is_built())

    def _states_of(self, group: dict[str, Any], params: list[Tensor]) -> list[dict[str, Any]]:
        """Return the parameters' states, created where missing."""
        states = []
        for parameter in params:
            entry: dict[str, Any] = self.state[parameter]
            if not entry:
                entry.update(self._new_state(group, parameter))
            states.append(entry)
        return states

    def _count_step(self, states: list[dict[str, Any]], params: list[Tensor]) -> StepCounts:
        """Count this step of the parameters, unless the device skips it."""
        known: dict[int, StepCounts] = self.__dict__.setdefault("_step_counts", {})
        key = id(states[0])
        if key not in known or not known[key].counts(states):  # new, or loaded
            on_device = self._counts_on_device(params)
            known[key] = StepCounts(states, params[0].device if on_device else torch.device("cpu"))
        known[key].add(getattr(self, "found_inf", None))
        return known[key]

    def _counts_on_device(self, params: Sequence[Tensor]) -> bool:
        """Return whether steps are counted where the parameters are, for updates that the device may skip."""
        return False


def fused_adam_updates(
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    group: Mapping[str, Any],
    steps: Sequence[float],
) -> list[Tensor]:
    """Compute :meth:`Batch.adam_updates` with torch's fused Adam, as its step of rate -1 from 0.

    Args:
        grads: of one device and type, in the memory layout of the moments.
        exp_avgs: first moments, updated in place.
        exp_avg_sqs: second moments, updated in place.
        group: its ``betas`` and ``eps`` are read.
        steps: of each tensor, from 1; none: the bias is not corrected.
    """
    beta1, beta2 = group["betas"]
    updates = [torch.empty_like(grad) for grad in grads]
    torch._foreach_zero_(updates)
    steps = steps or [_UNCORRECTED] * len(grads)
    filled = {step: torch.full((), step, device=grads[0].device) for step in set(steps)}  # no copy, no wait
    torch._fused_adam_(
        updates, grads, exp_avgs, exp_avg_sqs, [], [filled[step] for step in steps],
        lr=-1.0, beta1=beta1, beta2=beta2, weight_decay=0.0, eps=group["eps"], amsgrad=False, maximize=False,
    )  # fmt: skip
    return updates


def same_layout(*lists: Sequence[Tensor]) -> bool:
    """Return whether the tensors at each place have one type and are dense in one order of the elements."""
    tensors_of = [tensor for tensors in lists for tensor in tensors]
    if all(tensor.is_contiguous() for tensor in tensors_of):  # quick
        return all(len({tensor.dtype for tensor in tensors}) == 1 for tensors in zip(*lists, strict=True))
    return all(
        len({(tensor.dtype, tensor.stride()) for tensor in tensors}) == 1
        and torch.empty_like(tensors[0]).stride() == tensors[0].stride()
        for tensors in zip(*lists, strict=True)
    )


def _laid_out_like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor with the parameter's memory layout: itself, or a copy."""
    if tensor.is_contiguous() and parameter.is_contiguous():
        return tensor
    shape, ours, theirs = parameter.shape, parameter.stride(), tensor.stride()
    if ours == theirs or all(size == 1 or a == b for size, a, b in zip(shape, ours, theirs, strict=True)):
        return tensor
    return torch.empty_like(parameter).copy_(tensor)


def native_grads(params: Sequence[Tensor]) -> list[Tensor]:
    """Return the parameters' gradients with the memory layout that native kernels expect."""
    return [_laid_out_like(p, grad) for p in params if (grad := p.grad) is not None]


def check_options(group: Mapping[str, Any]) -> None:
    """Check the numeric options of a parameter group: at least 0, decays also below 1.

    Raises:
        UsageError: a value is out of its range.
    """
    for name in _AT_LEAST_0:
        if name in group and not 0.0 <= group[name] < math.inf:
            raise UsageError(f"{name}={group[name]} must be a number of at least 0")
    for name in _DECAYS:
        if name in group and not 0.0 <= group[name] < 1.0:
            raise UsageError(f"{name}={group[name]} must be at least 0 and below 1")
    if not all(0.0 <= beta < 1.0 for beta in group.get("betas", ())):
        raise UsageError(f"betas={tuple(group['betas'])} must be at least 0 and below 1")


def indices_by_kind(params: Sequence[Tensor]) -> list[list[int]]:
    """Group the indices of parameters by device and type, as ``_foreach_`` operations require."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, parameter in enumerate(params):
        kinds.setdefault((parameter.device, parameter.dtype), []).append(index)
    return list(kinds.values())


def parameters_of(*optimizers: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return [parameter for group in groups for parameter in group["params"]]


def root_of_sum(values: Sequence[Tensor | float]) -> Tensor | float:
    """Return the root of a sum of numbers and scalar tensors of any devices, on that of the first tensor."""
    total: Tensor | float = 0.0
    for value in values:
        both = isinstance(total, Tensor) and isinstance(value, Tensor)
        total = total + (value.to(total.device) if both else value)  # type: ignore[union-attr]
    return total.sqrt() if isinstance(total, Tensor) else math.sqrt(total)


# ---- shards of FSDP2: norms of whole tensors ---------------------------------------------------------------


def local_part(tensor: Tensor | None) -> Tensor:
    """Return this worker's part of a tensor: itself, or its shard."""
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_box(parameter: Tensor) -> tuple[slice, ...]:
    """Return the slices of this worker's part in the whole tensor, one per dimension."""
    if not isinstance(parameter, DTensor):
        return tuple(slice(0, size) for size in parameter.shape)
    sizes, offsets = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def sum_shards(params: Sequence[Tensor], tensors: Sequence[Tensor] | Tensor) -> None:
    """Sum in place the contributions of each parameter's shards to a tensor that all of them hold.

    Args:
        params: define how tensors are sharded; those of unsharded parameters stay as they are.
        tensors: one for each of ``params``, all of one device and type; or a tensor of as many rows.
    """
    shards: dict[tuple[DeviceMesh, tuple[int, ...]], list[int]] = {}
    for index, parameter in enumerate(params):
        if isinstance(parameter, DTensor):
            placed = enumerate(parameter.placements)
            axes = tuple(axis for axis, placement in placed if not placement.is_replicate())
            if axes:
                shards.setdefault((parameter.device_mesh, axes), []).append(index)
    for (mesh, axes), indices in shards.items():
        flat = torch.cat([tensors[k].flatten() for k in indices])
        for axis in axes:
            dist.all_reduce(flat, group=mesh.get_group(axis))
        parts = torch.split(flat, [tensors[k].numel() for k in indices])
        for k, part in zip(indices, parts, strict=True):
            tensors[k].copy_(part.view_as(tensors[k]))


@torch.no_grad()
def whole_squares(params: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> Tensor:
    """Return the sum of squares of each whole tensor, in fp32 or (for fp64) fp64: shape ``[len(tensors)]``.

    Args:
        params: define how the tensors are sharded; at least one.
        tensors: of the same shapes as ``params`` (or as their local parts), all of one device and type.
    """
    parts = [local_part(tensor) for tensor in tensors]
    norms = torch._foreach_norm(parts, 2, dtype=torch.promote_types(parts[0].dtype, torch.float32))
    squares = torch.stack(norms).square_()
    sum_shards(params, squares)
    return squares


@torch.no_grad()
def model_norm(
    params: Sequence[Tensor],
    tensors: Sequence[Tensor | None],
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> float:
    """Return the Euclidean norm over tensors that are distributed over the workers of ``group``; equal on
    all.

    It is non-finite on all workers as soon as it is on one, so that all can skip a step together. On a GPU
    this waits for the device.

    Args:
        params: parameters that this worker counts, sharded or not; only one worker counts a tied weight.
        tensors: the parameters' gradients, or the parameters themselves.
        group: the workers that hold the other stages of the same replica; ``None``: there are none.
        device: device that ``group`` can reduce on; default: that of the first parameter, else the CPU.
    """
    if device is None:
        device = params[0].device if params else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for indices in indices_by_kind(params):
        squares = whole_squares([params[k] for k in indices], [tensors[k] for k in indices])
        total += squares.sum(dtype=torch.float64).to(device)
    if group is not None:
        dist.all_reduce(total, group=group)
    return float(total.sqrt())


def norm_of(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm of all ``tensors`` together; synchronizes with a GPU.

    Those of float32 on the CPU are summed in an order that does not depend on the number of threads, nor on
    whether servers have parts of them.
    """
    values = list(tensors)
    if values and native.is_built() and all(map(_is_flat, values)):
        return native.l2_norm(values, num_threads=torch.get_num_threads())
    return float(device_norm(values))


def device_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the Euclidean norm of all ``tensors`` together as a float64 scalar of their device.

    The host waits for nothing.
    """
    return torch.nn.utils.get_total_norm(tensors).double()


def scale_all(tensors: list[Tensor], factor: float | Tensor) -> None:
    """Multiply ``tensors``, some of which may be shards, by ``factor``, a number or a scalar, in place."""
    parts = list(map(local_part, tensors))
    if isinstance(factor, Tensor):
        torch._foreach_mul_(parts, factor.to(parts[0].dtype))
    elif factor != 1.0:
        torch._foreach_mul_(parts, factor)


@overload
def clip_factor(norm: float, max_norm: float | None) -> float: ...
@overload
def clip_factor(norm: Tensor, max_norm: float | None) -> float | Tensor: ...


def clip_factor(norm: float | Tensor, max_norm: float | None) -> float | Tensor:
    """Return the factor that clips a gradient of norm ``norm`` to ``max_norm``."""
    if max_norm is None:
        return 1.0
    if isinstance(norm, Tensor):
        return torch.where(norm <= max_norm, 1.0, max_norm / norm)
    return 1.0 if norm <= max_norm else max_norm / norm


def _is_flat(tensor: Tensor) -> bool:
    dense = tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor.is_cpu and tensor.dtype == torch.float32 and dense and not isinstance(tensor, DTensor)
