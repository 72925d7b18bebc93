"""What the optimizers share: the checks of their options, their norms, the state of Adam's two moments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from shoal.errors import UsageError

_AT_LEAST_0 = ("lr", "eps", "eps1", "eps2", "weight_decay", "decay_rate", "eta")
_DECAYS = ("beta1", "momentum")


class MomentsOptimizer(Optimizer):
    """An optimizer that checks the options of its groups and knows the norms of its last step."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._grad_norm: Tensor | float = 0.0
        self._weight_norm: Tensor | float = 0.0
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; what it does not set is as given at construction.

        Raises:
            UsageError: a value is out of its range.
        """
        check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def norms(self) -> tuple[float, float]:
        """Return the global norms of the last step: of the scaled gradients before they were clipped or
        normalised, and of the weights that had a gradient, before the update. Waits for the device."""
        return float(self._grad_norm), float(self._weight_norm)


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """Return what the closure of a step returns, evaluated with gradients; ``None`` without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def check_options(group: Mapping[str, Any]) -> None:
    """Check those options of a parameter group that are numbers of at least 0, or decays of a moment.

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


def next_states(state: Mapping[Tensor, dict[str, Any]], params: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Return the parameters' states, made where missing, each with its step counted up.

    Args:
        state: ``optimizer.state``, which makes an empty entry for a new parameter.
    """
    states = []
    for parameter in params:
        entry = state[parameter]
        if not entry:
            entry["step"] = torch.tensor(0.0)
            entry["exp_avg"] = torch.zeros_like(parameter)
            entry["exp_avg_sq"] = torch.zeros_like(parameter)
        entry["step"] += 1
        states.append(entry)
    return states


def indices_by_kind(params: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of parameters by device and type, as ``_foreach_`` operations want them."""
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
