"""SGD with momentum.

    d = g + weight_decay w
    m = momentum m + d
    w = w - lr m                         with Nesterov's momentum w - lr (d + momentum m)

Source: Sutskever et al., "On the importance of initialization and momentum in deep learning" (ICML 2013),
with the learning rate outside of the momentum, as in ``torch.optim.SGD``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from shoal import native
from shoal.errors import UsageError
from shoal.optim.moments import Batch, Implementation, MomentsOptimizer, Squares


class SGD(MomentsOptimizer):
    """Implements SGD with momentum by a kernel that has the bits of ``torch.optim.SGD``.

    Uses one native kernel on the CPU, and ``_foreach_`` operations elsewhere. The state of each parameter is
    ``momentum_buffer``, as in torch's; without momentum there is none. The kernel's bits are those of torch
    on a processor with fused multiply-add, for any number of threads, any instruction set, and for a tensor
    that is cut into parts.

    Args:
        params: parameters or groups; a group may set ``lr``, ``momentum`` and ``weight_decay``.
        lr: learning rate.
        momentum: decay of the momentum; 0 for none.
        weight_decay: times the weights, added to the gradient.
        nesterov: use Nesterov's momentum.
        implementation: ``"native"`` for float32 on the CPU, ``"foreach"`` for any device, ``"auto"`` uses the
            native kernel where it can.

    Raises:
        UsageError: a value is out of its range, Nesterov's momentum without momentum, or a parameter does not
            suit the implementation.

    Source: Sutskever et al., "On the importance of initialization and momentum in deep learning" (ICML 2013).

    Example:
        >>> weights = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = SGD([weights], lr=0.1, momentum=0.9)
        >>> weights.sum().backward()
        >>> optimizer.step()
        >>> weights.detach()
        tensor([0.9000, 0.9000, 0.9000])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = False,
        implementation: Implementation = "auto",
    ) -> None:
        if nesterov and momentum <= 0:
            raise UsageError(f"nesterov needs a momentum above 0, not {momentum}")
        self.nesterov = nesterov
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults, implementation=implementation)

    def _new_state(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
        return {"momentum_buffer": torch.zeros_like(parameter)} if group["momentum"] else {}

    def _update(self, batch: Batch) -> Squares:
        group, weights = batch.group, batch.weights
        changes = list(torch._foreach_mul(batch.grads, batch.scale))
        grad_sq, weight_sq = batch.squares(changes).sum(), batch.squares(weights).sum()
        if group["weight_decay"] != 0.0:
            torch._foreach_add_(changes, weights, alpha=group["weight_decay"])
        if group["momentum"]:
            momenta = batch.entries("momentum_buffer")
            torch._foreach_mul_(momenta, group["momentum"])
            torch._foreach_add_(momenta, changes)
            if self.nesterov:
                torch._foreach_add_(changes, momenta, alpha=group["momentum"])
            else:
                changes = momenta
        torch._foreach_add_(weights, changes, alpha=-batch.lr)
        return grad_sq, weight_sq

    def _update_native(self, batch: Batch) -> tuple[float, float]:
        entries = {"momenta": "momentum_buffer"} if batch.group["momentum"] else {}
        arguments = batch.native_arguments("momentum", "weight_decay", **entries)
        return native.sgd_step(nesterov=self.nesterov, **{"momenta": batch.weights, **arguments})
