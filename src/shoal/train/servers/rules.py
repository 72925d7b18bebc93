"""Checks which models, optimizers and runs servers can update, and describes the servers' optimizers.

The kernels are those of :mod:`shoal.optim`. What depends on the norm of a whole tensor (LAMB's and LARS's
ratio, NovoGrad's running norm) is decided here, on every worker alike, by the functions that the kernels of
workers use; servers get the result. Rules about options are in
:class:`shoal.train.config.ServersConfig`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoal import native
from shoal.comm.native_group import python_group
from shoal.errors import UsageError
from shoal.optim.adamw import AdamW
from shoal.optim.lamb import Lamb
from shoal.optim.lars import Lars
from shoal.optim.novograd import Novograd
from shoal.optim.sgd import SGD
from shoal.train.config import ServersConfig
from shoal.train.gradients import DataParallel, LossScale, clip_factor, parameters_of

# ---- checks ---------------------------------------------------------------------------------------------

_OFF = ("amsgrad", "maximize", "dampening", "differentiable")
"""Options of torch's optimizers that the kernels do not have."""


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Check that servers can take the optimizer's step for all trained parameters of ``model``."""
    name = type(optimizer).__name__
    if type(optimizer) not in KERNELS:
        raise UsageError(
            f"weights on servers: the servers have no kernel for {type(optimizer).__module__}.{name}; they "
            "have AdamW and SGD of shoal.optim and torch.optim, and shoal.optim's Lamb, Lars and Novograd"
        )
    for group in optimizer.param_groups:
        for option in _OFF:
            if group.get(option):
                raise UsageError(
                    f"weights on servers: the servers' {name} has no {option}={group[option]}; switch it off"
                )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise UsageError(f"weights on servers: {name} has step hooks, which find no gradients; remove them")
    given = {parameter for parameter in parameters_of(optimizer) if parameter.requires_grad}
    wanted = {parameter for _, parameter in _named(model)}
    if given != wanted:
        raise UsageError(
            f"weights on servers: {name} has {len(given - wanted)} parameters that are not the model's, and "
            f"lacks {len(wanted - given)} that are trained; give it the model's"
        )


def check_outer(outer: Optimizer, model: nn.Module) -> None:
    """Check that ``outer`` can run on the servers, for local steps."""
    check_optimizer(outer, model)
    if kernel_of(outer).decide is not None:
        raise UsageError(
            f"local steps: {type(outer).__name__} needs norms; the outer optimizer is SGD or AdamW"
        )


def check_no_momentum(optimizer: Optimizer) -> None:
    """Check that an optimizer has no momentum, for asynchronous steps.

    With momentum, a delay of one step lowers the largest stable learning rate 38-fold.
    """
    for group in optimizer.param_groups:
        name = "momentum" if "momentum" in group else "betas"
        momentum = group["momentum"] if name == "momentum" else group["betas"][0]
        if momentum:
            raise UsageError(
                f"asynchronous steps with {type(optimizer).__name__}({name}={group[name]}): with momentum "
                f"{momentum}, gradients that are late soon make training diverge; set it to 0, or bound the "
                "staleness, which keeps gradients in the order of their batches"
            )


def check_max_norm(optimizer: Optimizer, max_norm: float | None) -> None:
    """Check that ``max_norm`` is above 0, and that the optimizer does not clip too."""
    if max_norm is not None and not max_norm > 0:
        raise UsageError(f"max_norm={max_norm} must be above 0; None clips nothing")
    own_limit = optimizer.max_grad_norm if isinstance(optimizer, Lamb) else None
    if max_norm is not None and max_norm < math.inf and own_limit is not None:
        raise UsageError(
            f"max_norm={max_norm} and the optimizer's max_grad_norm={own_limit}: set one of them"
        )


def check_hooks(model: DistributedDataParallel) -> None:
    """Check that the model has no communication hook."""
    if model._comm_hooks:
        hook = getattr(model._comm_hooks[0][0], "__qualname__", "?")
        raise UsageError(f"weights on servers: the model has the communication hook {hook}; register none")


def check_gradient_hooks(parameters: Iterable[Tensor]) -> None:
    """Check that no parameter has a hook that reads its gradient after the backward pass."""
    if any(parameter._post_accumulate_grad_hooks for parameter in parameters):
        raise UsageError(
            "weights on servers: a parameter has a hook that reads its gradient after the backward pass "
            "(register_post_accumulate_grad_hook), when it belongs to the servers; remove it"
        )


def check_model(model: DistributedDataParallel) -> None:
    """Check that servers can keep the weights of ``model``."""
    if not isinstance(model, DistributedDataParallel):
        raise UsageError(
            f"weights on servers: the model has to be a DistributedDataParallel, not a {type(model).__name__}"
        )
    if model.find_unused_parameters:
        raise UsageError(
            "weights on servers: with find_unused_parameters=True a gradient that no rank has is known only "
            "after the servers' step; make all parameters used, or freeze those that are not"
        )
    if not hasattr(python_group(model.process_group), "engine"):
        raise UsageError(
            'weights on servers need a process group of backend "shoal", not '
            f"{dist.get_backend(model.process_group)!r}"
        )
    if dist.get_world_size(model.process_group) == 1:
        raise UsageError("weights on servers: a single worker has no servers; use the optimizer itself")
    for name, parameter in _named(model):
        dense = parameter.is_contiguous() or parameter.is_contiguous(memory_format=torch.channels_last)
        if not (parameter.is_cpu and parameter.dtype == torch.float32 and dense and parameter.numel()):
            raise UsageError(
                f"weights on servers: parameters are dense float32 on the CPU, since servers keep weights in "
                f"the memory of hosts, and {name} is {parameter.dtype}{list(parameter.shape)} on "
                f"{parameter.device}; step on the workers, or train on CPUs (--distributed.device cpu)"
            )
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UsageError(
                f"weights on servers: no sparse gradients, as {module} makes; give it sparse=False"
            )


def check_buffers(model: DistributedDataParallel) -> None:
    """Check that forward passes do not broadcast buffers, for workers that do not wait for each other."""
    if model.broadcast_buffers and any(True for _ in model.buffers()):
        raise UsageError(
            "workers step apart, and the model has buffers, which DDP broadcasts in each forward pass; give "
            "it broadcast_buffers=False"
        )


def check_run(
    config: ServersConfig, kept: Mapping[str, Any], models: Sequence[DataParallel], scale: LossScale
) -> None:
    """Check that the mode is possible for what a run trains.

    Args:
        config: the mode.
        kept: the objects in checkpoints, by name.
        models: those of :meth:`Run.data_parallel`.
        scale: the loss scale.
    """
    option = config.option
    names = [name for name, each in kept.items() if isinstance(each, Optimizer)]
    if names != ["optimizer"]:
        raise UsageError(
            f"{option} is for one optimizer, run.keep(optimizer=...), and the run keeps "
            f"{', '.join(names) or 'none'}: leave it out"
        )
    if len(models) != 1:
        raise UsageError(
            f"{option} is for one model of run.data_parallel, and the run has {len(models)}: leave it out (a "
            "pipeline's stages update their own weights)"
        )
    if not models[0].average:
        raise UsageError(f"{option} with optim.clip worker: servers clip the mean; use --optim.clip global")
    if scale.dynamic and not config.is_synchronous:
        raise UsageError(
            f"{option} with train.precision fp16: a dynamic loss scale follows each step of all workers; use "
            "bf16, or set --train.loss-scale"
        )


def _named(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return ((name, each) for name, each in model.named_parameters() if each.requires_grad)


# ---- the servers' optimizers ----------------------------------------------------------------------------

Group = Mapping[str, Any]
Totals = tuple[float, float, float]
"""Sums of squares of a tensor: gradients, weights, and what the optimizer also needs."""


@dataclass(frozen=True)
class Kernel:
    """An optimizer as the servers know it.

    Attributes:
        name: of the optimizer in the core (``SERVED_OPTIMIZERS``).
        state: names of the state's tensors, in the slots after the weights.
        counts: whether the state has a ``step``.
        has_norm: whether the state has a squared norm of the gradient, one number, which workers keep.
        options: returns the six numbers of a group that servers need.
        decide: returns the coefficients of a tensor's step from its norms; ``None`` if it needs no norms.
    """

    name: str
    state: tuple[str, ...]
    counts: bool
    options: Callable[[Optimizer, Group], tuple[float, ...]]
    decide: Callable[[Optimizer, Group, Totals, int, float], tuple[list[float], float]] | None = None
    has_norm: bool = False


def kernel_of(optimizer: Optimizer) -> Kernel:
    """Return the kernel of an optimizer that :func:`check_optimizer` has accepted."""
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
    SGD: Kernel("sgd", _MOMENTUM, False, _sgd_options),
    torch.optim.SGD: Kernel("sgd", _MOMENTUM, False, _sgd_options),
    AdamW: Kernel("adamw", _MOMENTS, True, _adam_options),
    torch.optim.AdamW: Kernel("adamw", _MOMENTS, True, _adam_options),
    Lamb: Kernel("lamb", _MOMENTS, True, _adam_options, _decide_lamb),
    Lars: Kernel("lars", _MOMENTUM, False, _lars_options, _decide_lars),
    Novograd: Kernel("novograd", ("exp_avg",), True, _no_options, _decide_novograd, has_norm=True),
}
"""By class: the optimizers that servers can step."""
