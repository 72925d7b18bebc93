"""AdamW: Adam with weight decay apart from the gradient.

    w = w (1 - lr weight_decay)
    m = m + (1 - beta1) (g - m)          v = beta2 v + (1 - beta2) g^2
    w = w - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101), algorithm 2, in the
order of operations of ``torch.optim.AdamW``.
"""

from __future__ import annotations

import math

import torch
from torch.optim.optimizer import ParamsT

from shoal import native
from shoal.optim.moments import Batch, Implementation, MomentsOptimizer, Squares


class AdamW(MomentsOptimizer):
    """Implements AdamW with a kernel whose bits do not depend on the processor.

    Uses one native kernel on the CPU, and ``_foreach_`` operations elsewhere. The state of each parameter is
    ``step``, ``exp_avg`` and ``exp_avg_sq``, as in torch's. On the CPU the result is bit-identical for any
    number of threads, any instruction set, and for a tensor that is cut into parts. The moments have the bits
    of ``torch.optim.AdamW``; weights may differ from torch's by an ulp, because torch's square root is not
    correctly rounded on every machine. Gradients that are not finite make weights that are not finite:
    check before the step.

    Args:
        params: parameters or groups; a group may set ``lr``, ``betas``, ``eps`` and ``weight_decay``.
        lr: learning rate.
        betas: decay rates of the first and the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay; each step subtracts ``lr * weight_decay`` times the weights.
        implementation: ``"native"`` for float32 on the CPU, ``"foreach"`` for any device, ``"auto"`` uses the
            native kernel where it can.

    Raises:
        UsageError: a value is out of its range, or a parameter does not suit the implementation.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101), algorithm 2.

    Example:
        >>> weights = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = AdamW([weights], lr=0.1, weight_decay=0.0)
        >>> weights.square().sum().backward()
        >>> optimizer.step()
        >>> weights.detach()  # the first step moves by lr
        tensor([0.9000, 0.9000, 0.9000])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        implementation: Implementation = "auto",
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, implementation=implementation)

    def _update(self, batch: Batch) -> Squares:
        group, weights = batch.group, batch.weights
        beta1, beta2 = group["betas"]
        grads = list(torch._foreach_mul(batch.grads, batch.scale))
        grad_sq, weight_sq = batch.squares(grads).sum(), batch.squares(weights).sum()
        torch._foreach_mul_(weights, 1.0 - batch.lr * group["weight_decay"])
        exp_avgs, denominators = batch.update_moments(grads)
        del grads
        torch._foreach_div_(denominators, [math.sqrt(1.0 - beta2**step) for step in batch.steps])
        torch._foreach_add_(denominators, group["eps"])
        steps = [-batch.lr / (1.0 - beta1**step) for step in batch.steps]
        torch._foreach_addcdiv_(weights, exp_avgs, denominators, steps)
        return grad_sq, weight_sq

    def _update_native(self, batch: Batch) -> tuple[float, float]:
        moments = {"exp_avgs": "exp_avg", "exp_avg_sqs": "exp_avg_sq"}
        arguments = batch.native_arguments("betas", "eps", "weight_decay", **moments)
        return native.adamw_step(steps=batch.steps, **arguments)
