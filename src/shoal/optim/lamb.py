"""LAMB: Adam's update of each tensor, scaled to the norm of its weights.

    m = beta1 m + (1 - beta1) g          v = beta2 v + (1 - beta2) g^2
    u = m^ / (sqrt(v^) + eps) + weight_decay w
    w = w - lr ratio u                   ratio = |w| / |u| where both are above 0, else 1

Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes"
(arXiv 1904.00962), algorithm 2. Two variants are in use. The paper and NVIDIA's apex correct the bias,
m^ = m / (1 - beta1^t) and v^ = v / (1 - beta2^t), and apex clips the global norm of the averaged gradient
first; the original ALBERT does not correct the bias (``bias_correction=False``). Both leave biases and norms
out of the decay and of the ratio: :func:`parameter_groups`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from shoal import native
from shoal.errors import UsageError
from shoal.optim.kernel_optimizer import KernelOptimizer
from shoal.optim.moments import (
    Batch,
    Implementation,
    Scale,
    Squares,
    native_grads,
    root_of_sum,
    whole_squares,
)


def parameter_groups(
    named_parameters: Iterable[tuple[str, Tensor]], weight_decay: float
) -> list[dict[str, Any]]:
    """Split parameters into those with weight decay and trust ratio, and those without both.

    Biases and the parameters of norms get neither: tensors of at most one dimension, or named ``bias``.
    Parameters that need no gradient are left out, and so is an empty group, unless both are empty: a stage of
    a pipeline may have no parameters, and torch's optimizers need a group.

    Args:
        named_parameters: as returned by ``model.named_parameters()``.
        weight_decay: of the first group.
    """
    decayed: list[Tensor] = []
    plain: list[Tensor] = []
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            excluded = parameter.ndim <= 1 or name.rpartition(".")[2] == "bias"
            (plain if excluded else decayed).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": weight_decay, "trust_ratio": True},
        {"params": plain, "weight_decay": 0.0, "trust_ratio": False},
    ]
    return [group for group in groups if group["params"]] or groups[:1]


class Lamb(KernelOptimizer):
    """Implements LAMB: Adam's update of each tensor, scaled to the norm of its weights.

    Uses one native kernel on the CPU, two passes of Triton kernels for float32 on a GPU, and ``_foreach_``
    operations elsewhere. The state of each parameter is
    ``step``, ``exp_avg`` and ``exp_avg_sq``, as in torch's Adam, so that ``torch.distributed.checkpoint``
    saves and reshards it. Parameters sharded by FSDP2 get the norms of the whole tensors. On the CPU the
    result is bit-identical for any number of threads. Gradients that are not finite make weights that are not
    finite: check before the step.

    Args:
        params: parameters or groups; a group may set ``lr``, ``betas``, ``eps``, ``weight_decay``,
            ``bias_correction`` and ``trust_ratio`` (whether to scale; default true).
            :func:`parameter_groups` makes the usual two.
        lr: learning rate.
        betas: decay rates of the first and the second moment.
        eps: added to the root of the second moment.
        weight_decay: added to the update before its norm is taken.
        bias_correction: true as in the paper and apex, false as in the original ALBERT.
        max_grad_norm: global norm over all groups to which gradients are clipped first, as in apex; ``None``
            clips nothing.
        implementation: ``"native"`` for float32 on the CPU, ``"foreach"`` for any device, ``"auto"`` uses the
            native kernel where it can.

    Raises:
        UsageError: a value is out of its range, or a parameter does not suit the implementation.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes"
    (arXiv 1904.00962), algorithm 2.

    Example:
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = Lamb(parameter_groups(model.named_parameters(), weight_decay=0.01), lr=1e-2)
        >>> model(torch.ones(8, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> grad_norm, weight_norm = optimizer.norms()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
        max_grad_norm: float | None = None,
        implementation: Implementation = "auto",
    ) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise UsageError(f"max_grad_norm={max_grad_norm} must be above 0; None clips nothing")
        self.max_grad_norm = max_grad_norm
        defaults: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"bias_correction": bias_correction, "trust_ratio": True}
        super().__init__(params, defaults, implementation=implementation)

    def _apply_update(self, scale: Scale) -> None:
        if self.max_grad_norm is None:
            super()._apply_update(scale)
            return
        norm = self._gradients_norm() * scale
        # as apex: no epsilon, and gradients below the limit stay as they are
        excess = norm / self.max_grad_norm
        super()._apply_update(
            scale / (excess.clamp(min=1.0) if isinstance(excess, Tensor) else max(1.0, excess))
        )
        self._grad_norm = norm

    def _gradients_norm(self) -> Tensor | float:
        """Return the global norm; a float where the native kernel was used for all, else a tensor."""
        batches = [batch for group in self.param_groups for batch in self._batches(group)]
        local = [parameter for is_native, params in batches if is_native for parameter in params]
        threads = torch.get_num_threads()
        native_norm = native.l2_norm(native_grads(local), num_threads=threads) if local else 0.0
        squares: list[Tensor | float] = [native_norm**2]
        for is_native, params in batches:
            if not is_native:
                squares.append(whole_squares(params, [parameter.grad for parameter in params]).sum())
        return root_of_sum(squares) if len(squares) > 1 else native_norm

    def _update_by_kernels(self, batches: Sequence[Batch]) -> Squares:
        from shoal.optim.pass_kernels import update_lamb  # Triton is loaded where it is needed

        return update_lamb(batches)

    def _update(self, batch: Batch) -> Squares:
        group, weights, grads, scale = batch.group, batch.weights, batch.grads, batch.scale
        if isinstance(scale, Tensor) or scale != 1.0:
            here = scale.to(weights[0].device) if isinstance(scale, Tensor) else scale
            grads = list(torch._foreach_mul(grads, here))
        grad_sq = batch.squares(grads).sum()
        updates = batch.adam_updates(grads)
        del grads
        if group["weight_decay"] != 0.0:
            torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        weight_squares = batch.squares(weights)
        if group["trust_ratio"]:
            ratios = batch.trust_ratios(weight_squares, updates).to(weights[0].dtype)
            torch._foreach_mul_(updates, list(ratios.unbind()))
        torch._foreach_add_(weights, updates, alpha=-batch.lr)
        return grad_sq, weight_squares.sum()

    def _update_native(self, batch: Batch) -> tuple[float, float]:
        options = ("betas", "eps", "weight_decay", "bias_correction", "trust_ratio")
        moments = {"exp_avgs": "exp_avg", "exp_avg_sqs": "exp_avg_sq"}
        return native.lamb_step(steps=batch.steps, **batch.native_arguments(*options, **moments))
