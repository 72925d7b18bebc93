"""Builds the optimizer that the settings name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shoal.optim.adafactor import Adafactor
from shoal.optim.lamb import Lamb, parameter_groups
from shoal.optim.lans import Lans
from shoal.optim.lars import Form, Lars
from shoal.optim.moments import check_options
from shoal.optim.novograd import Novograd
from shoal.train.config import OptimizerConfig, VisionOptimizerConfig

_RATE = "rate"
"""Key of a parameter group whose learning rate is a multiple of the schedule's."""


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    config: OptimizerConfig,
    learning_rate: float = 0.0,
) -> Optimizer:
    """Return the optimizer over the parameters that are trained; biases and norms do not decay.

    With LAMB and LARS they have no trust ratio either, except in LARS's form of the paper, in which all
    parameters are alike. Clipping is the loop's, since it clips whatever the optimizer is.

    Args:
        named_parameters: as ``model.named_parameters()`` gives them.
        config: which optimizer with which options.
        learning_rate: holds until the loop sets that of a step (:func:`set_learning_rate`).
    """
    options = config.options()
    check_options({**options, "weight_decay": config.weight_decay})  # torch's raise ValueError
    trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    groups = parameter_groups(trained, config.weight_decay)
    if options.get("lars_form") == "paper":
        groups = [{**group, "weight_decay": config.weight_decay, "trust_ratio": True} for group in groups]
    if isinstance(config, VisionOptimizerConfig) and config.bias_rate != 1.0:
        biases = {parameter for name, parameter in trained if name.rpartition(".")[2] == "bias"}
        groups = _with_rate_of(biases, config.bias_rate, groups)
    if config.optimizer not in ("lamb", "lars"):
        groups = [{key: value for key, value in g.items() if key != "trust_ratio"} for g in groups]
    optimizer = _made(config.optimizer, groups, options)
    set_learning_rate(optimizer, learning_rate)
    return optimizer


def set_learning_rate(optimizer: Optimizer, value: float) -> None:
    """Set the learning rate of every parameter group; a group of biases may have a multiple of it."""
    for group in optimizer.param_groups:
        group["lr"] = value * group.get(_RATE, 1.0)


def _with_rate_of(
    biases: set[nn.Parameter], rate: float, groups: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the groups, each divided into what is not among ``biases`` and what is and has the rate."""
    divided = []
    for group in groups:
        for inside, extra in ((False, {}), (True, {_RATE: rate})):
            params = [parameter for parameter in group["params"] if (parameter in biases) == inside]
            divided.append({**group, **extra, "params": params})
    return [group for group in divided if group["params"]] or groups


def _made(name: str, groups: list[dict[str, Any]], options: dict[str, Any]) -> Optimizer:
    """Return the optimizer with these options of :class:`OptimizerConfig` and a rate of 0."""
    if name == "adafactor":
        return Adafactor(groups, lr=0.0)
    if "momentum" in options:
        momentum = {"momentum": options["momentum"], "nesterov": options["nesterov"]}
        if name == "sgd":
            momentum["nesterov"] &= options["momentum"] > 0  # without momentum the same, which torch refuses
            whole = not any(isinstance(p, DTensor) for group in groups for p in group["params"])
            return torch.optim.SGD(groups, lr=0.0, fused=whole, **momentum)  # torch fuses no shards
        form: Form = "larc" if options["lars_form"] == "larc" else "lars"
        return Lars(groups, lr=0.0, eta=options["trust_coefficient"], form=form, **momentum)
    betas = options.pop("beta1"), options.pop("beta2")
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=0.0, betas=betas, fused=True, **options)
    made: dict[str, Callable[..., Optimizer]] = {"lamb": Lamb, "lans": Lans, "novograd": Novograd}
    return made[name](groups, lr=0.0, betas=betas, **options)
