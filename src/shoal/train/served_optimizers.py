"""Describes the optimizers whose step servers can take: state, options, and what norms decide.

The kernels are those of :mod:`shoal.optim`. What depends on the norm of a whole tensor (LAMB's and LARS's
ratio, NovoGrad's running norm) is decided here, on every worker alike, by the functions that the kernels of
workers use; servers get the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal import native
from shoal.optim.adamw import AdamW
from shoal.optim.lamb import Lamb
from shoal.optim.lars import Lars
from shoal.optim.novograd import Novograd
from shoal.optim.sgd import SGD
from shoal.train.gradients import clip_factor

Group = Mapping[str, Any]
Totals = tuple[float, float, float]
"""Sums of squares of a tensor: gradients, weights, and what the optimizer also needs."""


@dataclass(frozen=True)
class Kernel:
    """An optimizer as the servers know it.

    Attributes:
        number: of the optimizer, as in csrc/engine/served_weights.h.
        state: names of the state's tensors, in the slots after the weights.
        counts: whether the state has a ``step``.
        has_norm: whether the state has a squared norm of the gradient, one number, which workers keep.
        options: returns the six numbers of a group that servers need.
        decide: returns the coefficients of a tensor's step from its norms; ``None`` if it needs no norms.
    """

    number: int
    state: tuple[str, ...]
    counts: bool
    options: Callable[[Optimizer, Group], tuple[float, ...]]
    decide: Callable[[Optimizer, Group, Totals, int, float], tuple[list[float], float]] | None = None
    has_norm: bool = False


def kernel_of(optimizer: Optimizer) -> Kernel:
    """Return the kernel of an optimizer that :mod:`shoal.train.served_checks` has accepted."""
    return KERNELS[type(optimizer)]


def options_of(optimizer: Optimizer) -> list[tuple[float, ...]]:
    """Return six numbers for each group, as csrc/engine/served_weights.h describes them."""
    options = KERNELS[type(optimizer)].options
    return [tuple(map(float, options(optimizer, group))) for group in optimizer.param_groups]


def factor_of(optimizer: Optimizer, norm: float, max_norm: float | None) -> float:
    """Return the factor that clips gradients of this norm to the optimizer's own limit or ``max_norm``."""
    own = optimizer.max_grad_norm if isinstance(optimizer, Lamb) else None
    return 1.0 / max(1.0, norm / own) if own is not None else clip_factor(norm, max_norm)


def values_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of all groups by name, as JSON can hold them."""
    return [
        {name: _as_json(group[name]) for name in _NAMES if group.get(name) is not None}
        for group in optimizer.param_groups
    ]


def _as_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return float(value) if isinstance(value, Tensor) else value


def set_values(optimizer: Optimizer, values: list[dict[str, Any]]) -> None:
    """Set the options that :func:`values_of` has returned on another rank."""
    for group, given in zip(optimizer.param_groups, values, strict=True):
        for name, value in given.items():
            group[name] = tuple(value) if isinstance(value, list) else value


def describe(optimizer: Optimizer, num_tensors: int) -> str:
    """Return the options of all groups, which must be equal on all ranks, for messages."""
    own = {name: value for name in _NAMES if (value := getattr(optimizer, name, None)) is not None}
    every = [{**own, **group} for group in optimizer.param_groups]
    groups = (", ".join(f"{name}={each[name]}" for name in _NAMES if name in each) for each in every)
    return f"{type(optimizer).__name__}({'; '.join(groups)}) of {num_tensors} tensors"


_NAMES = (
    *("lr", "betas", "eps", "momentum", "nesterov", "weight_decay", "eta", "trust_ratio", "form"),
    *("bias_correction", "grad_averaging", "init_zero", "reg_inside_moment", "max_grad_norm"),
)


# ---- the optimizers -------------------------------------------------------------------------------------


def _sgd_options(optimizer: Optimizer, group: Group) -> tuple[float, ...]:
    nesterov = group.get("nesterov", getattr(optimizer, "nesterov", False))
    return group["lr"], group["momentum"], group["weight_decay"], nesterov, 0.0, 0.0


def _adam_options(optimizer: Optimizer, group: Group) -> tuple[float, ...]:
    corrects = group.get("bias_correction", False)  # LAMB's
    return group["lr"], *group["betas"], group["eps"], group["weight_decay"], corrects


def _lars_options(optimizer: Optimizer, group: Group) -> tuple[float, ...]:
    return group["weight_decay"], 0.0, 0.0, 0.0, 0.0, 0.0


def _no_options(optimizer: Optimizer, group: Group) -> tuple[float, ...]:
    return (0.0,) * 6


def _decide_lamb(
    optimizer: Optimizer, group: Group, totals: Totals, step: int, norm_sq: float
) -> tuple[list[float], float]:
    decided = native.core().lamb_coefficients(
        totals, learning_rate=group["lr"], trust_ratio=group["trust_ratio"]
    )
    return decided, norm_sq


def _decide_lars(
    optimizer: Optimizer, group: Group, totals: Totals, step: int, norm_sq: float
) -> tuple[list[float], float]:
    assert isinstance(optimizer, Lars)
    decided = native.core().lars_coefficients(
        totals, learning_rate=group["lr"], momentum=group["momentum"], weight_decay=group["weight_decay"],
        eta=group["eta"], eps=group["eps"], clips=optimizer.form == "larc", nesterov=optimizer.nesterov,
        trust_ratio=group["trust_ratio"],
    )  # fmt: skip
    return decided, norm_sq


def _decide_novograd(
    optimizer: Optimizer, group: Group, totals: Totals, step: int, norm_sq: float
) -> tuple[list[float], float]:
    beta1, beta2 = group["betas"]
    names = ("eps", "weight_decay", "bias_correction", "grad_averaging", "init_zero", "reg_inside_moment")
    decided: tuple[list[float], float] = native.core().novograd_coefficients(
        totals, norm_sq, float(step), learning_rate=group["lr"], beta1=beta1, beta2=beta2,
        **{name: group[name] for name in names},
    )  # fmt: skip
    return decided


_MOMENTS = ("exp_avg", "exp_avg_sq")
_MOMENTUM = ("momentum_buffer",)
KERNELS: dict[type[Optimizer], Kernel] = {
    SGD: Kernel(0, _MOMENTUM, False, _sgd_options),
    torch.optim.SGD: Kernel(0, _MOMENTUM, False, _sgd_options),
    AdamW: Kernel(1, _MOMENTS, True, _adam_options),
    torch.optim.AdamW: Kernel(1, _MOMENTS, True, _adam_options),
    Lamb: Kernel(2, _MOMENTS, True, _adam_options, _decide_lamb),
    Lars: Kernel(3, _MOMENTUM, False, _lars_options, _decide_lars),
    Novograd: Kernel(4, ("exp_avg",), True, _no_options, _decide_novograd, has_norm=True),
}
"""By class: the optimizers that servers can step."""
