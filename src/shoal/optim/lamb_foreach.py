"""LAMB on ``_foreach_`` operations: any device, any floating type, FSDP2's shards."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shoal.optim.sharded import local_part, whole_squares


def lamb_update(
    group: dict[str, Any], params: list[Tensor], states: list[dict[str, Any]], scale: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Update parameters of one device and type in place.

    Args:
        group: the options of :class:`shoal.optim.lamb.Lamb`.
        states: ``step`` (this update counted), ``exp_avg`` and ``exp_avg_sq`` of each parameter.
        scale: the gradients are taken times it.

    Returns:
        The sums of squares of the scaled gradients, and of the weights before the update.
    """
    beta1, beta2 = group["betas"]
    weights = [local_part(parameter) for parameter in params]
    exp_avgs = [local_part(state["exp_avg"]) for state in states]
    exp_avg_sqs = [local_part(state["exp_avg_sq"]) for state in states]
    grads = [local_part(parameter.grad) for parameter in params]
    if isinstance(scale, Tensor) or scale != 1.0:
        grads = list(torch._foreach_mul(grads, scale))
    grad_sq = whole_squares(params, grads).sum()

    torch._foreach_lerp_(exp_avgs, grads, 1.0 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, value=1.0 - beta2)
    del grads

    denominators = torch._foreach_sqrt(exp_avg_sqs)
    if group["bias_correction"]:
        steps = [state["step"].item() for state in states]
        torch._foreach_div_(denominators, [math.sqrt(1.0 - beta2**step) for step in steps])
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_mul_(denominators, [1.0 - beta1**step for step in steps])
    else:
        torch._foreach_add_(denominators, group["eps"])
    updates = torch._foreach_div(exp_avgs, denominators)
    del denominators
    if group["weight_decay"] != 0.0:
        torch._foreach_add_(updates, weights, alpha=group["weight_decay"])

    weight_squares = whole_squares(params, weights)
    if group["trust_ratio"]:
        weight_norms, update_norms = weight_squares.sqrt(), whole_squares(params, updates).sqrt()
        both = (weight_norms > 0) & (update_norms > 0)
        ratios = torch.where(both, weight_norms / update_norms, 1.0).to(weights[0].dtype)
        torch._foreach_mul_(updates, list(ratios.unbind()))
    torch._foreach_add_(weights, updates, alpha=-float(group["lr"]))
    return grad_sq, weight_squares.sum()
