"""LARS: momentum with a learning rate for each tensor, relative to the norm of its weights.

As MLPerf's rule has it, the rate is inside the momentum:

    ratio = eta |w| / (|g| + weight_decay |w| + eps)           1 where |w| or |g| is 0
    m = momentum m + lr ratio (g + weight_decay w)
    w = w - m

The clip form, LARC, never exceeds the rate of plain momentum, and the decay is part of the gradient, as it
was in the loss of AWS's ResNet-50:

    d = g + weight_decay w
    ratio = min(eta |w| / |d| / lr, 1)                         min(1 / lr, 1) where |w| or |d| is 0
    m = momentum m + ratio d
    w = w - lr m

With Nesterov's momentum w moves by what is added to m plus ``momentum`` times the new m instead of by m.
Groups without a ratio (biases and norms: :func:`shoal.optim.lamb.parameter_groups`) have the ratio 1.

Sources: You et al., "Large Batch Training of Convolutional Networks" (arXiv 1708.03888), algorithm 1, with
MLPerf's place of the learning rate; LARC as in NVIDIA's OpenSeq2Seq and AWS's TensorFlow scripts.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from shoal.errors import UsageError
from shoal.optim.moments import Group, MomentsOptimizer, Params, Scale, Squares, States
from shoal.optim.sharded import local_part, whole_squares

Form = Literal["lars", "larc"]


class Lars(MomentsOptimizer):
    """LARS and LARC on ``_foreach_`` operations: any device, any floating type, FSDP2's shards.

    The state of each parameter is ``momentum_buffer``, as in torch's SGD. Parameters sharded by FSDP2 get the
    norms of the whole tensors. Gradients that are not finite make weights that are not finite: check before
    the step.

    Args:
        params: parameters or groups; a group may set ``lr``, ``momentum``, ``weight_decay``, ``eta``,
            ``eps`` and ``trust_ratio`` (whether the ratio is used; default true).
        lr: learning rate.
        momentum: decay of the momentum.
        weight_decay: times the weights, added to the gradient.
        eta: the trust coefficient; AWS's ResNet-50 has 0.013 in the clip form.
        eps: added to the ratio's denominator, in the form ``lars``.
        form: ``lars`` or ``larc``.
        nesterov: Nesterov's momentum.

    Raises:
        UsageError: a value is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        eta: float = 1e-3,
        eps: float = 0.0,
        form: Form = "lars",
        nesterov: bool = False,
    ) -> None:
        if form not in ("lars", "larc"):
            raise UsageError(f"form={form!r} must be 'lars' or 'larc'")
        self.form = form
        self.nesterov = nesterov
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eta": eta, "eps": eps}
        super().__init__(params, {**defaults, "trust_ratio": True})

    @property
    def _label(self) -> str:  # type: ignore[override]
        return self.form.upper()

    def _new_state(self, group: Group, parameter: Tensor) -> dict[str, Any]:
        return {"momentum_buffer": torch.zeros_like(parameter)}

    def _update(self, group: Group, params: Params, states: States, scale: Scale) -> Squares:
        lr, decay = float(group["lr"]), group["weight_decay"]
        weights = [local_part(parameter) for parameter in params]
        grads = [local_part(parameter.grad) for parameter in params]
        grad_squares = whole_squares(params, grads) * scale**2
        weight_squares = whole_squares(params, weights)
        if not group["trust_ratio"]:
            ratios = torch.ones_like(weight_squares)
        elif self.form == "lars":
            weight_norms, grad_norms = weight_squares.sqrt(), grad_squares.sqrt()
            bound = grad_norms + decay * weight_norms + group["eps"]
            both = (weight_norms > 0) & (grad_norms > 0)
            ratios = torch.where(both, group["eta"] * weight_norms / bound, 1.0)
        else:
            ratios = _clipped_ratios(group, params, grads, weights, weight_squares, scale)
        rates = ratios * lr if self.form == "lars" else ratios
        dtype = weights[0].dtype
        self._move(
            group, params, list((rates * scale).to(dtype).unbind()), list((rates * decay).to(dtype).unbind())
        )
        return grad_squares.sum(), weight_squares.sum()

    def _move(
        self, group: dict[str, Any], params: list[Tensor], of_grads: list[Tensor], of_weights: list[Tensor]
    ) -> None:
        """Add the gradients and the weights, each times its factor, to the momenta; move the weights."""
        weights = [local_part(parameter) for parameter in params]
        grads = [local_part(parameter.grad) for parameter in params]
        momenta = [local_part(self.state[parameter]["momentum_buffer"]) for parameter in params]
        alpha = -1.0 if self.form == "lars" else -float(group["lr"])

        def add_to(sums: list[Tensor]) -> None:
            torch._foreach_addcmul_(sums, grads, of_grads)
            if group["weight_decay"] != 0.0:
                torch._foreach_addcmul_(sums, weights, of_weights)

        torch._foreach_mul_(momenta, group["momentum"])
        add_to(momenta)
        moves = momenta
        if self.nesterov:
            moves = list(torch._foreach_mul(momenta, group["momentum"]))
            add_to(moves)
        torch._foreach_add_(weights, moves, alpha=alpha)


def _clipped_ratios(
    group: dict[str, Any],
    params: list[Tensor],
    grads: list[Tensor],
    weights: list[Tensor],
    weight_squares: Tensor,
    scale: Tensor | float,
) -> Tensor:
    """Return LARC's ratios: ``eta |w| / |g + weight_decay w|`` in units of ``lr``, at most 1."""
    with_decay = list(torch._foreach_mul(grads, scale))
    torch._foreach_add_(with_decay, weights, alpha=group["weight_decay"])
    weight_norms, norms = weight_squares.sqrt(), whole_squares(params, with_decay).sqrt()
    both = (weight_norms > 0) & (norms > 0)
    rates = torch.where(both, group["eta"] * weight_norms / norms, 1.0)
    return (rates / float(group["lr"])).clamp(max=1.0)
