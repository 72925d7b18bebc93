"""Shares between the optimizers: steps over groups, devices and types, checks of options, and norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, ParamsT

from shoal import native
from shoal.errors import UsageError

_AT_LEAST_0 = ("lr", "eps", "eps1", "eps2", "weight_decay", "decay_rate", "eta")
_DECAYS = ("beta1", "beta2", "momentum")


Implementation = Literal["auto", "foreach", "native"]
_IMPLEMENTATIONS = ("auto", "foreach", "native")

Group = dict[str, Any]
Params = list[Tensor]
States = list[dict[str, Any]]
Scale = Tensor | float
Squares = tuple[Tensor | float, Tensor | float]
"""The sums of squares of the scaled gradients, and of the weights before the update."""


class MomentsOptimizer(Optimizer):
    """Base of the optimizers: updates the tensors of one device and type together, and keeps the last norms.

    A subclass defines the state of a new parameter and its update, on ``_foreach_`` operations and optionally
    by a native kernel for float32 on the CPU.
    """

    _label: str
    """The optimizer's name in messages."""

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
            as
                they are. For an optimizer that normalises them it only matters relative to an epsilon.

        Returns:
            The result of the closure.

        Raises:
            UsageError: a gradient is sparse, or a parameter does not suit the implementation.
        """
        loss = loss_of(closure)
        self._take_step(grad_scale)
        return loss

    def norms(self) -> tuple[float, float]:
        """Return the global norms of the last step: of the scaled gradients before clipping or normalisation,
        and of the weights that had a gradient, before the update. Waits for the device.
        """
        return float(self._grad_norm), float(self._weight_norm)

    def _take_step(self, scale: Scale) -> None:
        squares: list[Squares] = []
        for group in self.param_groups:
            for is_native, params in self._batches(group):
                update = self._update_native if is_native else self._update
                squares.append(update(group, params, self._next_states(group, params), scale))
        self._grad_norm = root_of_sum([grad_sq for grad_sq, _ in squares])
        self._weight_norm = root_of_sum([weight_sq for _, weight_sq in squares])

    def _new_state(self, group: Group, parameter: Tensor) -> dict[str, Any]:
        """Return the state of a parameter before its first step; a ``step`` in it is counted from 0."""
        raise NotImplementedError

    def _update(self, group: Group, params: Params, states: States, scale: Scale) -> Squares:
        """Update parameters of one device and type in place; their steps have been counted."""
        raise NotImplementedError

    def _update_native(self, group: Group, params: Params, states: States, scale: Scale) -> Squares:
        """Update contiguous float32 tensors on the CPU by a native kernel."""
        raise NotImplementedError

    def _batches(self, group: Group) -> list[tuple[bool, list[Tensor]]]:
        """Return the group's parameters with a gradient: those for the native kernel, the others by kind."""
        fused: list[Tensor] = []
        others: list[Tensor] = []
        for parameter in group["params"]:
            if parameter.grad is not None:
                check_parameter(self._label, parameter)
                (fused if self._goes_native(parameter) else others).append(parameter)
        by_kind = [(False, [others[k] for k in indices]) for indices in indices_by_kind(others)]
        return [(True, fused), *by_kind] if fused else by_kind

    def _goes_native(self, parameter: Tensor) -> bool:
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

    def _next_states(self, group: Group, params: Params) -> States:
        """Return the parameters' states, created where missing, each with its step incremented."""
        states = []
        for parameter in params:
            entry: dict[str, Any] = self.state[parameter]
            if not entry:
                entry.update(self._new_state(group, parameter))
            states.append(entry)
        steps = [entry["step"] for entry in states if "step" in entry]
        if steps:
            torch._foreach_add_(steps, 1.0)
        return states


def adam_state(parameter: Tensor) -> dict[str, Any]:
    """Return a new parameter's state as torch's Adam has it."""
    return {
        "step": torch.tensor(0.0),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def laid_out_like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor with the parameter's memory layout: itself, or a copy."""
    if tensor.is_contiguous() and parameter.is_contiguous():
        return tensor
    shape, ours, theirs = parameter.shape, parameter.stride(), tensor.stride()
    if ours == theirs or all(size == 1 or a == b for size, a, b in zip(shape, ours, theirs, strict=True)):
        return tensor
    return torch.empty_like(parameter).copy_(tensor)


def native_grads(params: Params) -> list[Tensor]:
    """Return the parameters' gradients with the memory layout that native kernels expect."""
    return [laid_out_like(p, grad) for p in params if (grad := p.grad) is not None]


def native_entries(params: Params, states: States, name: str) -> list[Tensor]:
    """Return an entry of the states with the layout that native kernels expect; a loaded one may differ."""
    for parameter, state in zip(params, states, strict=True):
        state[name] = laid_out_like(parameter, state[name])
    return [state[name] for state in states]


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """Evaluate the closure of a step with gradients enabled; return its loss, or ``None`` without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


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


def check_parameter(optimizer: str, parameter: Tensor) -> None:
    """Check a parameter that has a gradient; ``optimizer`` is the name in the message.

    Raises:
        UsageError: its gradient is sparse, or it is complex.
    """
    assert parameter.grad is not None, "parameters without a gradient are left out before"
    if parameter.grad.is_sparse or parameter.is_complex():
        raise UsageError(f"{optimizer} takes neither sparse gradients nor complex parameters")


def indices_by_kind(params: Sequence[Tensor]) -> list[list[int]]:
    """Group the indices of parameters by device and type, as ``_foreach_`` operations require."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, parameter in enumerate(params):
        kinds.setdefault((parameter.device, parameter.dtype), []).append(index)
    return list(kinds.values())


def sum_of(values: Sequence[Tensor | float]) -> Tensor | float:
    """Add numbers and scalar tensors of any devices, on the device of the first tensor."""
    total: Tensor | float = 0.0
    for value in values:
        both = isinstance(total, Tensor) and isinstance(value, Tensor)
        total = total + (value.to(total.device) if both else value)  # type: ignore[union-attr]
    return total


def root_of_sum(squares: Sequence[Tensor | float]) -> Tensor | float:
    """Return the root of :func:`sum_of`."""
    total = sum_of(squares)
    return total.sqrt() if isinstance(total, Tensor) else math.sqrt(total)
