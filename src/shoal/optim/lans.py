"""LANS: LAMB with the gradient of each tensor normalised first, and with Nesterov's momentum.

    g = g / (|g| + eps)                    of each tensor, so that no global clip is needed
    m = beta1 m + (1 - beta1) g            v = beta2 v + (1 - beta2) g^2
    u_m = m^ / (sqrt(v^) + eps) + weight_decay w
    u_g = g / (sqrt(v^) + eps) + weight_decay w
    w = w - lr (beta1 |w| / |u_m| u_m + (1 - beta1) |w| / |u_g| u_g)

with m^ = m / (1 - beta1^t) and v^ = v / (1 - beta2^t); a ratio with a norm of 0 is 1. Unlike in LAMB, tensors
without weight decay get the ratios too.

Source: Zheng et al., "Accelerated Large Batch Optimization of BERT Pretraining in 54 minutes"
(arXiv 2006.13484), algorithm 2, with the constants where its authors' kernel has them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from shoal import native
from shoal.errors import UsageError
from shoal.optim.kernel_optimizer import KernelOptimizer
from shoal.optim.moments import Batch, Implementation, Squares


class Lans(KernelOptimizer):
    """Implements LANS: LAMB with normalised gradients and Nesterov's momentum.

    Uses one native kernel on the CPU, passes of Triton kernels for float32 on a GPU, and ``_foreach_``
    operations elsewhere. The state of each parameter is
    ``step``, ``exp_avg`` and ``exp_avg_sq``, as in torch's Adam, so that ``torch.distributed.checkpoint``
    saves and reshards it. Parameters sharded by FSDP2 get the norms of the whole tensors. On the CPU the
    result is bit-identical for any number of threads. Gradients that are not finite make weights that are not
    finite: check before the step.

    Args:
        params: parameters or groups; a group may set ``lr``, ``betas``, ``eps`` and ``weight_decay`` (0 for
            biases and norms).
        lr: learning rate.
        betas: decay rates of the first and the second moment; the first also weights the two updates.
        eps: added to the norm of a gradient and to the root of the second moment.
        weight_decay: added to the updates before their norms are taken.
        implementation: ``"native"`` for float32 on the CPU, ``"foreach"`` for any device, ``"auto"`` uses the
            native kernel where it can.

    Raises:
        UsageError: a value is out of its range, or a parameter does not suit the implementation.

    Source: Zheng et al., "Accelerated Large Batch Optimization of BERT Pretraining in 54 minutes"
    (arXiv 2006.13484), algorithm 2.

    Example:
        >>> weights = torch.nn.Parameter(torch.ones(2, 3))
        >>> optimizer = Lans([weights], lr=0.1, weight_decay=0.0)
        >>> weights.square().sum().backward()
        >>> optimizer.step()
        >>> bool((weights < 1).all())
        True
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        implementation: Implementation = "auto",
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, implementation=implementation)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; missing options are those given at construction.

        Raises:
            UsageError: a value is out of its range, or the group sets LAMB's ``trust_ratio``.
        """
        if "trust_ratio" in param_group:
            raise UsageError("a group sets trust_ratio, but LANS scales every tensor; leave it out")
        super().add_param_group(param_group)

    def _update_by_kernels(self, batches: Sequence[Batch]) -> Squares:
        from shoal.optim.pass_kernels import update_lans  # Triton is loaded where it is needed

        return update_lans(batches)

    def _update(self, batch: Batch) -> Squares:
        group, weights, raw, steps = batch.group, batch.weights, batch.grads, batch.steps
        beta1, beta2 = group["betas"]
        grad_squares = batch.squares(raw) * batch.scale**2
        inverse = (batch.scale / (grad_squares.sqrt() + group["eps"])).to(weights[0].dtype)
        from_gradient = list(torch._foreach_mul(raw, list(inverse.unbind())))
        exp_avgs, denominators = batch.update_moments(from_gradient)
        torch._foreach_div_(denominators, [math.sqrt(1.0 - beta2**step) for step in steps])
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_div_(from_gradient, denominators)
        torch._foreach_mul_(denominators, [1.0 - beta1**step for step in steps])
        from_momentum = list(torch._foreach_div(exp_avgs, denominators))
        del denominators

        weight_squares = batch.squares(weights)
        parts = ((from_momentum, beta1), (from_gradient, 1.0 - beta1))
        for updates, share in parts:  # both before the weights move
            if group["weight_decay"] != 0.0:
                torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
            ratios = batch.trust_ratios(weight_squares, updates) * share
            torch._foreach_mul_(updates, list(ratios.to(weights[0].dtype).unbind()))
        for updates, _ in parts:
            torch._foreach_add_(weights, updates, alpha=-batch.lr)
        return grad_squares.sum(), weight_squares.sum()

    def _update_native(self, batch: Batch) -> tuple[float, float]:
        moments = {"exp_avgs": "exp_avg", "exp_avg_sqs": "exp_avg_sq"}
        arguments = batch.native_arguments("betas", "eps", "weight_decay", **moments)
        return native.lans_step(steps=batch.steps, **arguments)
