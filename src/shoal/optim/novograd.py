"""NovoGrad: momentum of gradients that are divided by a running norm of their tensor.

    v = beta2 v + (1 - beta2) |g|^2        one number per tensor, starts as the first |g|^2
    m = beta1 m + g / (sqrt(v) + eps) + weight_decay w
    w = w - lr m

Source: Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments for Training of Deep
Networks" (arXiv 1905.11286), algorithm 1. NVIDIA's apex adds variants, which can be combined:

- ``grad_averaging`` multiplies the new term of m by 1 - beta1;
- ``bias_correction`` divides sqrt(v) by sqrt(1 - beta2^t) and m by 1 - beta1^t;
- ``init_zero`` starts with v = 0;
- without ``reg_inside_moment`` m is that of the bare gradients, and norm and decay are applied outside of it:
  w = w - lr (m / (sqrt(v) + eps) + weight_decay w).

apex keeps sqrt(v), and also has an infinity norm, which is not implemented here. The large-batch Mask R-CNN
runs corrected the bias, kept the decay inside, and used neither averaging nor a start at 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from shoal import native
from shoal.optim.kernel_optimizer import KernelOptimizer
from shoal.optim.moments import Batch, Implementation, Squares, local_part

_VARIANTS = ("bias_correction", "grad_averaging", "init_zero", "reg_inside_moment")


class Novograd(KernelOptimizer):
    """Implements NovoGrad: one native kernel on the CPU, Triton kernels for float32 on a GPU.

    Elsewhere it uses ``_foreach_`` operations.

    The state of each parameter is ``step``, ``exp_avg`` and ``exp_avg_sq``, the last one a single number that
    every worker with a shard keeps. Parameters sharded by FSDP2 get the norms of the whole tensors. Gradients
    that are not finite make weights that are not finite: check before the step. On the CPU the result is
    bit-identical for any number of threads.

    Args:
        params: parameters or groups; a group may set ``lr``, ``betas``, ``eps``, ``weight_decay``,
            ``bias_correction``, ``grad_averaging``, ``init_zero`` and ``reg_inside_moment``.
        lr: learning rate.
        betas: decay rates of the momentum and of the squared norm.
        eps: added to the root of the squared norm.
        weight_decay: times the weights, added to the normalised gradient.
        bias_correction: correct both moments for their start, as apex does.
        grad_averaging: multiply the new gradient's part of the momentum by 1 - beta1.
        init_zero: start with a squared norm of 0 instead of the first one.
        reg_inside_moment: divide by the norm and decay inside the momentum, as in the paper.
        implementation: ``"native"`` for float32 on the CPU, ``"foreach"`` for any device, ``"auto"`` uses the
            native kernel where it can.

    Raises:
        UsageError: a value is out of its range, or a parameter does not suit the implementation.

    Source: Ginsburg et al. (arXiv 1905.11286), algorithm 1.

    Example:
        >>> weights = torch.nn.Parameter(torch.ones(4))
        >>> optimizer = Novograd([weights], lr=0.5, eps=0.0)
        >>> weights.square().sum().backward()  # the gradient is (2, 2, 2, 2), its norm 4
        >>> optimizer.step()
        >>> weights.tolist()
        [0.75, 0.75, 0.75, 0.75]
    """

    entries = ("exp_avg",)

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
        init_zero: bool = False,
        reg_inside_moment: bool = True,
        implementation: Implementation = "auto",
    ) -> None:
        variants = (bias_correction, grad_averaging, init_zero, reg_inside_moment)
        defaults: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= zip(_VARIANTS, variants, strict=True)
        super().__init__(params, defaults, implementation=implementation)

    def _new_state(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
        local = local_part(parameter)
        norms_dtype = torch.promote_types(local.dtype, torch.float32)
        return {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": local.new_zeros((), dtype=norms_dtype),
        }

    def _update_by_kernels(self, batches: Sequence[Batch]) -> Squares:
        from shoal.optim.pass_kernels import update_novograd  # Triton is loaded where it is needed

        return update_novograd(batches)

    def _update(self, batch: Batch) -> Squares:
        group, weights, steps = batch.group, batch.weights, batch.steps
        squares, weight_squares = batch.squares(batch.grads) * batch.scale**2, batch.squares(weights)
        roots, rates = _blended(batch, squares).sqrt(), [batch.lr] * len(steps)
        if group["bias_correction"]:
            beta1, beta2 = group["betas"]
            roots /= roots.new_tensor([math.sqrt(1.0 - beta2**step) for step in steps])
            rates = [rate / (1.0 - beta1**step) for rate, step in zip(rates, steps, strict=True)]
        _move(batch, roots + group["eps"], roots.new_tensor(rates))
        return squares.sum(), weight_squares.sum()

    def _update_native(self, batch: Batch) -> tuple[float, float]:
        options = ("betas", "eps", "weight_decay", *_VARIANTS)
        arguments = batch.native_arguments(*options, momenta="exp_avg")
        return native.novograd_step(norm_sqs=batch.entries("exp_avg_sq"), steps=batch.steps, **arguments)


def _blended(batch: Batch, squares: Tensor) -> Tensor:
    """Update the squared norms of the gradients; return the running ones."""
    share = 1.0 - batch.group["betas"][1]
    first = share if batch.group["init_zero"] else 1.0
    seconds = torch.stack([state["exp_avg_sq"].to(squares) for state in batch.states])
    seconds.lerp_(squares, squares.new_tensor([first if step == 1.0 else share for step in batch.steps]))
    torch._foreach_copy_(batch.entries("exp_avg_sq"), list(seconds.unbind()))
    return seconds


def _move(batch: Batch, denominators: Tensor, rates: Tensor) -> None:
    """Add the gradients to the momenta and move the weights by these."""
    group, weights, momenta = batch.group, batch.weights, batch.entries("exp_avg")

    def parts(values: Tensor) -> list[Tensor]:
        return list(values.to(weights[0].dtype).unbind())

    inside, decay = group["reg_inside_moment"], group["weight_decay"]
    share = 1.0 - group["betas"][0] if group["grad_averaging"] else 1.0
    torch._foreach_mul_(momenta, group["betas"][0])
    of_grads = share * batch.scale / (denominators if inside else torch.ones_like(denominators))
    torch._foreach_addcmul_(momenta, batch.grads, parts(of_grads))
    if inside and decay != 0.0:
        torch._foreach_add_(momenta, weights, alpha=share * decay)
    if not inside and decay != 0.0:  # of the weights before the step
        torch._foreach_mul_(weights, 1.0 - batch.lr * decay)
    torch._foreach_addcmul_(weights, momenta, parts(-rates / (1.0 if inside else denominators)))
