"""Updates weights by averaged gradients: clips them and steps the optimizers of each worker."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.optim import Optimizer

from shoal import record
from shoal.errors import UsageError
from shoal.optim.moments import clip_factor, device_norm, norm_of, scale_all


class Update:
    """Clips gradients and updates weights; by default each worker steps its own replica of the model.

    :meth:`shoal.train.run.Run.use` sets another one. Methods with ``optimizers`` get those of one
    :meth:`shoal.train.step.Step.update`.

    Args:
        on_device: leave the norm on the device, which clips and skips by it, where the optimizer can
            (:func:`skips_on_device`): the host queues the update and the next step without waiting.

    Attributes:
        note: a line for the beginning of a run; may be empty.
        is_synchronous: whether each step takes the gradients of all workers. Otherwise workers step apart,
            and :meth:`settle` synchronizes them.
        on_servers: whether servers keep weights or the optimizer's state.
    """

    note = ""
    is_synchronous = True
    on_servers = False

    def __init__(self, *, on_device: bool = False) -> None:
        self.on_device = on_device
        self._is_skipped: Tensor | None = None

    # ---- of a step -------------------------------------------------------------------------------------

    def finish_gradients(
        self, *optimizers: Optimizer, max_norm: float | None, per_worker: bool, loss_scale: float
    ) -> float | Tensor:
        """Divide by the loss scale, average if ``per_worker``, and clip to ``max_norm``.

        Returns:
            The norm before clipping, the same on all workers. If it is not finite, the update is skipped. If
            it is a tensor on the device, the host does not know it yet: :meth:`apply` is called in any case,
            and must skip the update itself.
        """
        gradients = [p.grad for p in parameters_of(*optimizers) if p.grad is not None]
        self._is_skipped = None
        if self.on_device and gradients and all(map(skips_on_device, optimizers)):
            found = device_norm(gradients) / loss_scale
            scale_all(gradients, clip_factor(found, max_norm) / loss_scale)
            if per_worker:
                average_over_workers(gradients)
                found = device_norm(gradients)
            self._is_skipped = found.isfinite().logical_not().float()
            return found
        norm = norm_of(gradients) / loss_scale
        if per_worker or math.isfinite(norm):
            scale_all(gradients, clip_factor(norm, max_norm) / loss_scale)
        if not per_worker:
            return norm
        average_over_workers(gradients)
        return norm_of(gradients)

    def apply(self, *optimizers: Optimizer) -> None:
        """Update the weights. It must not fail midway, since weights are not rolled back."""
        for optimizer in optimizers:
            if self._is_skipped is None:
                optimizer.step()
                continue
            optimizer.found_inf = self._is_skipped  # type: ignore[attr-defined]  # as torch's GradScaler
            try:
                optimizer.step()
            finally:
                del optimizer.found_inf  # type: ignore[attr-defined]

    def weight_norm(self, *optimizers: Optimizer) -> float:
        """Return the norm of all weights. A collective."""
        return norm_of(p.detach() for p in parameters_of(*optimizers))

    def step_after(self, number: int) -> int:
        """Return the last step of the weights, after the step ``number`` that this worker has taken."""
        return number

    # ---- of a run --------------------------------------------------------------------------------------

    def state_of(self, kept: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what checkpoints hold of the objects that the run keeps."""
        return kept

    def open(self, step: int) -> None:
        """Begin after step ``step``, with the weights and the state that are there. A collective."""

    def renew(self, optimizer: Optimizer) -> None:
        """Continue with another optimizer. A collective."""

    def check_synchronized(self, frequencies: Mapping[str, int], steps: Sequence[int]) -> None:
        """Check that workers can be synchronized where a run needs it.

        Args:
            frequencies: of lines, evaluations and checkpoints, in steps, by the names of the settings.
            steps: other steps, such as the last one.

        Raises:
            UsageError: they cannot.
        """

    def runs_ahead(self, *, asks: bool) -> bool:
        """Return whether this worker takes its next step without an agreement with the others.

        Args:
            asks: whether this worker needs an agreement; one of the next calls then returns false on all.
        """
        return False

    def settle(self) -> bool:
        """Wait until all workers have taken the same steps; return whether there was a wait. A collective."""
        return False

    def bring_state(self) -> None:
        """Update the kept objects for a checkpoint, where their state is elsewhere. A collective."""

    def row(self) -> record.Contributions | None:
        """Return a row for the record, beside a line."""
        return None


def parameters_of(*optimizers: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return [parameter for group in groups for parameter in group["params"]]


def require_same(kept: Optimizer, given: Sequence[Optimizer]) -> None:
    """Check that a step is by the one optimizer whose steps are taken elsewhere.

    Raises:
        UsageError: it is by another one, or by several.
    """
    if len(given) != 1 or given[0] is not kept:
        found = "another optimizer" if len(given) == 1 else f"{len(given)} optimizers"
        raise UsageError(
            f"step.update() was given {found}, but servers or exchanges have the state of the one of "
            "run.keep(optimizer=...): give both the same"
        )


def skips_on_device(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer.step()`` takes ``found_inf``, a scalar of the device that is 1 to skip it.

    torch's fused optimizers do, and then leave weights, moments and counts of steps as they are. SGD makes
    its momenta in its first step, and leaves them unset if it skips that one, so the host decides about it.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):  # what torch's GradScaler looks at
        return False
    if not isinstance(optimizer, torch.optim.SGD):
        return True
    moved = [p for group in optimizer.param_groups if group["momentum"] for p in group["params"]]
    return all(optimizer.state[p].get("momentum_buffer") is not None for p in moved if p.grad is not None)


@torch.no_grad()
def average_over_workers(tensors: list[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Replace each of ``tensors``, of one type, by its mean over all workers."""
    if not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors]) / dist.get_world_size(group)
    dist.all_reduce(flat, group=group)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    torch._foreach_copy_(tensors, [part.view_as(t) for part, t in zip(parts, tensors, strict=True)])


def mean_of_workers(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """Average a bucket with the bits of plain DDP and of servers that update weights.

    Each worker multiplies by 1 / workers before the sum. torch's ``allreduce_hook`` divides, which gives
    other bits unless the number of workers is a power of 2.
    """
    share = bucket.buffer().mul_(1.0 / dist.get_world_size(group))
    work = dist.all_reduce(share, group=group, async_op=True)
    assert work is not None
    total: Future[list[Tensor]] = work.get_future()
    return total.then(lambda done: done.value()[0])
