"""Builds the optimizer that the settings name."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.optim.adafactor import Adafactor
from shoal.optim.lamb import Lamb, parameter_groups
from shoal.optim.lans import Lans
from shoal.train.config import OptimizerConfig


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    config: OptimizerConfig,
    learning_rate: float = 0.0,
) -> Optimizer:
    """Return the optimizer over the parameters that are trained; biases and norms do not decay.

    ``learning_rate`` holds until the loop sets that of a step (:func:`set_learning_rate`).

    Clipping is the loop's, since it clips whatever the optimizer is.
    """
    groups = parameter_groups(
        ((name, p) for name, p in named_parameters if p.requires_grad), config.weight_decay
    )
    betas = (config.beta1, config.beta2)
    if config.optimizer == "lamb":
        return Lamb(
            groups,
            lr=learning_rate,
            betas=betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            bias_correction=config.bias_correction,
        )
    plain = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in groups]
    if config.optimizer == "lans":
        return Lans(plain, lr=learning_rate, betas=betas, eps=config.eps, weight_decay=config.weight_decay)
    if config.optimizer == "adafactor":
        return Adafactor(plain, lr=learning_rate)
    return torch.optim.AdamW(plain, lr=learning_rate, betas=betas, eps=config.eps, fused=True)


def set_learning_rate(optimizer: Optimizer, value: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = value
