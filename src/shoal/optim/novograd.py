"""NovoGrad: momentum of gradients that are divided by a running norm of their tensor.

    v = beta2 v + (1 - beta2) |g|^2        v begins as the first |g|^2; one number a tensor
    m = beta1 m + g / (sqrt(v) + eps) + weight_decay w
    w = w - lr m

Source: Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments for Training of Deep
Networks" (arXiv 1905.11286), algorithm 1. NVIDIA's apex adds two variants, which can be combined:
``grad_averaging`` multiplies what is added to m by 1 - beta1, and ``bias_correction`` divides sqrt(v) by
sqrt(1 - beta2^t) and m by 1 - beta1^t. Here the decay is always inside the moment, as in the paper (apex:
``reg_inside_moment=True``), and the norm is the Euclidean one. The large-batch Mask R-CNN runs corrected the
bias and did not average.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from shoal.optim.moments import MomentsOptimizer, check_parameter, indices_by_kind, loss_of, root_of_sum
from shoal.optim.sharded import local_part, whole_squares


class NovoGrad(MomentsOptimizer):
    """NovoGrad on ``_foreach_`` operations: any device, any floating type, FSDP2's shards.

    The state of each parameter is ``step``, ``exp_avg`` and ``exp_avg_sq``, the last one a single number that
    every worker with a shard keeps. Parameters sharded by FSDP2 get the norms of the whole tensors. Gradients
    that are not finite make weights that are not finite: check before the step.

    Args:
        params: parameters or groups; a group may set ``lr``, ``betas``, ``eps``, ``weight_decay``,
            ``bias_correction`` and ``grad_averaging``.
        lr: learning rate.
        betas: decay rates of the momentum and of the squared norm.
        eps: added to the root of the squared norm.
        weight_decay: times the weights, added to the normalised gradient.
        bias_correction: correct both moments for their start, as apex does.
        grad_averaging: take the new gradient into the momentum times 1 - beta1.

    Raises:
        UsageError: a value is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        betas: tuple[float, float] = (0.95, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = False,
        grad_averaging: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(
            params, {**defaults, "bias_correction": bias_correction, "grad_averaging": grad_averaging}
        )

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, grad_scale: float = 1.0
    ) -> float | None:
        """Update all parameters that have a gradient.

        Args:
            closure: evaluates the model again and returns the loss.
            grad_scale: gradients are multiplied by it on the fly (1 / loss scale); they are not changed. Each
                is normalised, so it only tells what is small beside ``eps``.

        Returns:
            What the closure returned.

        Raises:
            UsageError: a gradient is sparse, or a parameter is complex.
        """
        loss = loss_of(closure)
        grad_squares: list[Tensor | float] = []
        weight_squares: list[Tensor | float] = []
        for group in self.param_groups:
            params = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in params:
                check_parameter("NovoGrad", parameter)
            for indices in indices_by_kind(params):
                grad_sq, weight_sq = self._update(group, [params[k] for k in indices], grad_scale)
                grad_squares.append(grad_sq)
                weight_squares.append(weight_sq)
        self._grad_norm = root_of_sum(grad_squares)
        self._weight_norm = root_of_sum(weight_squares)
        return loss

    def _update(self, group: dict[str, Any], params: list[Tensor], scale: float) -> tuple[Tensor, Tensor]:
        """Update parameters of one device and type in place; return the sums of squares of the scaled
        gradients, and of the weights before the update."""
        beta1, beta2 = group["betas"]
        weights = [local_part(parameter) for parameter in params]
        grads = [local_part(parameter.grad) for parameter in params]
        squares, weight_squares = whole_squares(params, grads) * scale**2, whole_squares(params, weights)
        states = [self._next_state(p, square) for p, square in zip(params, squares.unbind(), strict=True)]
        seconds = torch.stack([state["exp_avg_sq"].to(squares) for state in states])
        seconds.lerp_(squares, 1.0 - beta2)
        for state, second in zip(states, seconds.unbind(), strict=True):
            state["exp_avg_sq"].copy_(second)

        share = 1.0 - beta1 if group["grad_averaging"] else 1.0
        rates = [float(group["lr"])] * len(states)
        roots = seconds.sqrt()
        if group["bias_correction"]:
            steps = [float(state["step"]) for state in states]
            roots /= roots.new_tensor([math.sqrt(1.0 - beta2**step) for step in steps])
            rates = [rate / (1.0 - beta1**step) for rate, step in zip(rates, steps, strict=True)]
        factors = (share * scale / (roots + group["eps"])).to(weights[0].dtype)
        momenta = [local_part(state["exp_avg"]) for state in states]
        torch._foreach_mul_(momenta, beta1)
        torch._foreach_addcmul_(momenta, grads, list(factors.unbind()))
        if group["weight_decay"] != 0.0:
            torch._foreach_add_(momenta, weights, alpha=share * group["weight_decay"])
        torch._foreach_addcmul_(weights, momenta, list(weights[0].new_tensor([-r for r in rates]).unbind()))
        return squares.sum(), weight_squares.sum()

    def _next_state(self, parameter: Tensor, square: Tensor) -> dict[str, Any]:
        entry: dict[str, Any] = self.state[parameter]
        if not entry:
            entry["step"] = torch.tensor(0.0)
            entry["exp_avg"] = torch.zeros_like(parameter)
            entry["exp_avg_sq"] = square.clone()
        entry["step"] += 1
        return entry
