"""Checks which models and optimizers servers can update.

Rules about options are in :class:`shoal.train.config.ServersConfig`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoal.comm.native_group import python_group
from shoal.errors import UsageError
from shoal.optim.adafactor import Adafactor, is_factored
from shoal.optim.lamb import Lamb
from shoal.optim.lans import Lans
from shoal.optim.moments import parameters_of
from shoal.train.config import ServersConfig, check_delayed_momentum, check_normalised
from shoal.train.servers.tensors import KERNELS, kernel_of

_OFF = ("amsgrad", "maximize", "dampening", "differentiable")
"""Options of torch's optimizers that the kernels do not have."""


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Check that servers can take the optimizer's step for all trained parameters of ``model``."""
    name = type(optimizer).__name__
    if type(optimizer) not in KERNELS:
        raise UsageError(
            f"weights on servers: the servers have no kernel for {type(optimizer).__module__}.{name}; they "
            "have AdamW and SGD of shoal.optim and torch.optim, and shoal.optim's Lamb, Lans, Lars, Novograd "
            "and Adafactor"
        )
    for group in optimizer.param_groups:
        for option in _OFF:
            if group.get(option):
                raise UsageError(
                    f"weights on servers: the servers' {name} has no {option}={group[option]}; switch it off"
                )
    if isinstance(optimizer, Adafactor):
        _check_factored(optimizer, model)
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise UsageError(f"weights on servers: {name} has step hooks, which find no gradients; remove them")
    stepped = {parameter for parameter in parameters_of(optimizer) if parameter.requires_grad}
    trained = {parameter for _, parameter in _named(model)}
    if stepped != trained:
        raise UsageError(
            f"weights on servers: {name} has {len(stepped - trained)} parameters that are not the model's, "
            f"and lacks {len(trained - stepped)} that are trained; give it the model's"
        )


def _check_factored(optimizer: Adafactor, model: nn.Module) -> None:
    """Check that all tensors whose second moment is factored are matrices."""
    least = {each: group["min_factored_size"] for group in optimizer.param_groups for each in group["params"]}
    for name, parameter in _named(model):
        if is_factored(parameter, least.get(parameter, math.inf)) and parameter.ndim != 2:
            raise UsageError(
                f"weights on servers: servers factor matrices, and Adafactor would factor {name} of "
                f"{parameter.ndim} dims, {list(parameter.shape)}; give its group a larger min_factored_size, "
                "or step on the workers"
            )


def check_outer(outer: Optimizer, model: nn.Module) -> None:
    """Check that ``outer`` can run on the servers, for local steps."""
    check_optimizer(outer, model)
    if kernel_of(outer).decide is not None:
        raise UsageError(
            f"local steps: {type(outer).__name__} needs norms; the outer optimizer is SGD or AdamW"
        )


def check_momentum(optimizer: Optimizer, config: ServersConfig) -> None:
    """Check the momentum of an optimizer by :func:`check_delayed_momentum`."""
    for group in optimizer.param_groups:
        name = "momentum" if "momentum" in group else "betas"
        momentum = group["momentum"] if name == "momentum" else group.get("betas", (0.0,))[0]
        check_delayed_momentum(config, f"{type(optimizer).__name__}({name}={group.get(name)})", momentum)


def check_max_norm(optimizer: Optimizer, max_norm: float | None) -> None:
    """Check that ``max_norm`` is above 0, and that the optimizer neither clips nor normalises."""
    if max_norm is not None and not max_norm > 0:
        raise UsageError(f"max_norm={max_norm} must be above 0; None clips nothing")
    if isinstance(optimizer, Lans):
        check_normalised("max_norm", max_norm)
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
    device = next((each.device for _, each in _named(model)), torch.device("cpu"))
    for name, parameter in _named(model):
        dense = parameter.is_contiguous() or parameter.is_contiguous(memory_format=torch.channels_last)
        if not (parameter.dtype == torch.float32 and dense and parameter.numel()):
            raise UsageError(
                f"weights on servers: parameters are dense float32, and {name} is "
                f"{parameter.dtype}{list(parameter.shape)}; step on the workers"
            )
        if parameter.device != device or not python_group(model.process_group).carries(device):
            raise UsageError(
                f"weights on servers: all parameters are on the CPU or on one GPU, and {name} is on "
                f"{parameter.device}, the first one on {device}; step on the workers"
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


def _named(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return ((name, each) for name, each in model.named_parameters() if each.requires_grad)
