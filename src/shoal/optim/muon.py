"""Muon over matrices that are divided over workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, optim
from torch.distributed.tensor import DTensor

from shoal.optim.moments import local_box, local_part

_OPTIONS = ("ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")


class Muon(optim.Muon):
    """Implements torch's Muon for parameters of which each worker has a shard.

    It has the name of torch's, which checkpoints hold: a run goes on with whole matrices or with shards.

    Momentum is kept in the shards. A worker orthogonalises whole matrices, of ``n`` workers every ``n``-th:
    each is gathered, and its update sent to the others. So a worker holds two whole matrices at a time.
    Updates are those of torch's Muon on whole parameters, but for the rounding of the sum. Takes its
    arguments.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters by their gradients; a collective of the workers that have shards of them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [each for each in group["params"] if each.grad is not None]
            for number, param in enumerate(params):
                state = self.state[param]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(param)
                update = self._change(number, param, state["momentum_buffer"], group)
                local_part(param).mul_(1 - float(group["lr"]) * group["weight_decay"]).add_(update)
        return loss

    def _change(self, number: int, param: Tensor, buffer: Tensor, group: dict[str, Any]) -> Tensor:
        """Return what is added to this worker's part of a parameter; its momentum follows the gradient."""
        momentum, grad = group["momentum"], param.grad
        assert grad is not None
        buffer.lerp_(grad, 1 - momentum)
        update = grad.lerp(buffer, momentum) if group["nesterov"] else buffer
        if not isinstance(update, DTensor):
            return _orthogonalised(update, group)
        mesh, whole = update.device_mesh, update.full_tensor()
        owner = [int(at) for at in np.unravel_index(number % mesh.size(), mesh.shape)]
        if list(mesh.get_coordinate() or ()) == owner:
            whole = _orthogonalised(whole, group)
        for axis, at in enumerate(owner):  # to those beside the owner first, and by them to the others
            others = mesh.get_group(axis)
            dist.broadcast(whole, dist.get_process_group_ranks(others)[at], group=others)
        return whole[local_box(param)]


def _orthogonalised(update: Tensor, group: dict[str, Any]) -> Tensor:
    """Return the change of a parameter without decay, by a step of torch's Muon from zero."""
    change = torch.nn.Parameter(torch.zeros_like(update))
    change.grad = update
    options = {name: group[name] for name in _OPTIONS}
    optimizer: optim.Optimizer = optim.Muon(
        [change], lr=float(group["lr"]), weight_decay=0.0, momentum=0.0, nesterov=False, **options
    )
    optimizer.step()
    return change.detach()
