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

With Nesterov's momentum w moves by the increment of m plus ``momentum`` times the new m instead of by m.
Groups without a ratio (biases and norms: :func:`shoal.optim.lamb.parameter_groups`) have the ratio 1.

Sources: You et al., "Large Batch Training of Convolutional Networks" (arXiv 1708.03888), algorithm 1, with
MLPerf's place of the learning rate; LARC as in NVIDIA's OpenSeq2Seq and AWS's TensorFlow scripts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from shoal import native
from shoal.errors import UsageError
from shoal.optim.kernel_optimizer import KernelOptimizer
from shoal.optim.moments import Batch, Implementation, Squares

Form = Literal["lars", "larc"]


class Lars(KernelOptimizer):
    """Implements LARS and LARC: momentum with a learning rate per tensor, relative to the norm of its
    weights.

    Uses one native kernel on the CPU, passes of Triton kernels for float32 on a GPU, and ``_foreach_``
    operations elsewhere. The state of each parameter is
    ``momentum_buffer``, as in torch's SGD. Parameters sharded by FSDP2 get the norms of the whole tensors. On
    the CPU the result is bit-identical for any number of threads. Gradients that are not finite make weights
    that are not finite: check before the step.

    Args:
        params: parameters or groups; a group may set ``lr``, ``momentum``, ``weight_decay``, ``eta``, ``eps``
            and ``trust_ratio`` (whether to scale; default true).
        lr: learning rate.
        momentum: decay of the momentum.
        weight_decay: times the weights, added to the gradient.
        eta: the trust coefficient; AWS's ResNet-50 has 0.013 in the clip form.
        eps: added to the ratio's denominator, in the form ``lars``.
        form: ``"lars"``, or ``"larc"`` for the clip form.
        nesterov: use Nesterov's momentum.
        implementation: ``"native"`` for float32 on the CPU, ``"foreach"`` for any device, ``"auto"`` uses the
            native kernel where it can.

    Raises:
        UsageError: a value is out of its range, or a parameter does not suit the implementation.

    Source: You et al., "Large Batch Training of Convolutional Networks" (arXiv 1708.03888), algorithm 1, with
    MLPerf's place of the learning rate; LARC as in NVIDIA's OpenSeq2Seq.

    Example:
        >>> weights = torch.nn.Parameter(torch.ones(2, 3))
        >>> optimizer = Lars([weights], lr=1.0, momentum=0.9, eta=1e-3)
        >>> weights.square().sum().backward()
        >>> optimizer.step()
        >>> [round(w, 6) for w in weights[0].tolist()]  # moves by lr eta |w| in the direction of the gradient
        [0.999, 0.999, 0.999]
    """

    entries = ("momentum_buffer",)

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
        implementation: Implementation = "auto",
    ) -> None:
        if form not in ("lars", "larc"):
            raise UsageError(f"form={form!r} must be 'lars' or 'larc'")
        self.form = form
        self.nesterov = nesterov
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eta": eta, "eps": eps}
        super().__init__(params, {**defaults, "trust_ratio": True}, implementation=implementation)

    def _new_state(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
        return {"momentum_buffer": torch.zeros_like(parameter)}

    def _update_by_kernels(self, batches: Sequence[Batch]) -> Squares:
        from shoal.optim.pass_kernels import update_lars  # Triton is loaded where it is needed

        return update_lars(batches, clips=self.form == "larc", nesterov=self.nesterov)

    def _update(self, batch: Batch) -> Squares:
        group, lr, weights, momenta = batch.group, batch.lr, batch.weights, batch.entries("momentum_buffer")
        decay = group["weight_decay"]
        changes = list(torch._foreach_mul(batch.grads, batch.scale))
        grad_squares, weight_squares = batch.squares(changes), batch.squares(weights)
        if decay != 0.0:
            torch._foreach_add_(changes, weights, alpha=decay)
        ratios = torch.ones_like(weight_squares)
        if group["trust_ratio"]:
            weight_norms, norms = weight_squares.sqrt(), grad_squares.sqrt()
            bounds = norms + decay * weight_norms + group["eps"]
            if self.form == "larc":
                bounds = norms = batch.squares(changes).sqrt()
            both = (weight_norms > 0) & (norms > 0)
            ratios = torch.where(both, group["eta"] * weight_norms / bounds, 1.0)
            if self.form == "larc":
                ratios = (ratios / lr).clamp(max=1.0)
        inside, outside = (lr, 1.0) if self.form == "lars" else (1.0, lr)
        torch._foreach_mul_(changes, list((ratios * inside).to(weights[0].dtype).unbind()))
        torch._foreach_mul_(momenta, group["momentum"])
        torch._foreach_add_(momenta, changes)
        moves = momenta
        if self.nesterov:
            torch._foreach_add_(changes, momenta, alpha=group["momentum"])
            moves = changes
        torch._foreach_add_(weights, moves, alpha=-outside)
        return grad_squares.sum(), weight_squares.sum()

    def _update_native(self, batch: Batch) -> tuple[float, float]:
        options = ("momentum", "weight_decay", "eta", "eps", "trust_ratio")
        arguments = batch.native_arguments(*options, momenta="momentum_buffer")
        return native.lars_step(clips=self.form == "larc", nesterov=self.nesterov, **arguments)
