"""One global batch's gradient: accumulation, averaging over workers, norm and clipping.

Every loss is a sum over a micro-batch divided by counts over the *global* batch, so that the gradient is that
of the one big batch however it is divided. DistributedDataParallel averages over workers, hence the factor
``num_workers`` that :func:`loss_weight` puts in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from shoal.train.clock import StepClock
from shoal.train.config import DistributedConfig
from shoal.train.world import World


def data_parallel(
    model: nn.Module, world: World, config: DistributedConfig, clock: StepClock
) -> DistributedDataParallel:
    """Wrap ``model`` so that backward averages its gradients over all workers.

    The communication hook is the default one; it tells ``clock`` when the last gradient of the backward pass
    is ready: what backward takes from there on is waiting for other workers.
    """
    ddp = DistributedDataParallel(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        bucket_cap_mb=config.bucket_mb,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
    )

    def average(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.is_last():
            clock.mark("backward")
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    ddp.register_comm_hook(None, average)
    return ddp


def loss_weight(world: World, count: int) -> float:
    """Return the factor that turns a sum over a micro-batch into its part of the mean over ``count``."""
    return world.num_workers / count if count else 0.0


def accumulate(
    ddp: DistributedDataParallel,
    micro_batches: Sequence[Any],
    compute_loss: Callable[[Any], Tensor],
    clock: StepClock,
    *,
    average: bool = True,
) -> None:
    """Run forward and backward over ``micro_batches``; average with the last one if ``average``.

    Args:
        compute_loss: runs ``ddp`` on a micro-batch and returns its (scaled) part of the loss.
    """
    for number, batch in enumerate(micro_batches, start=1):
        averages = average and number == len(micro_batches)
        with nullcontext() if averages else ddp.no_sync():
            loss = compute_loss(batch)
            clock.mark("forward")
            loss.backward()  # type: ignore[no-untyped-call]
        clock.mark("gradient_wait" if averages else "backward")


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the gradients that there are."""
    return [p.grad for p in parameters if p.grad is not None]


def norm_of(tensors: Sequence[Tensor]) -> float:
    """Return the Euclidean norm over all ``tensors``: the step's one wait for the device."""
    return float(torch.nn.utils.get_total_norm(tensors)) if tensors else 0.0


def scale_(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply all ``tensors`` in place; free when ``factor`` is 1."""
    if factor != 1.0 and tensors:
        torch._foreach_mul_(tensors, factor)


def clip_factor(norm: float, max_norm: float | None) -> float:
    """Return what to multiply gradients of norm ``norm`` with so that it is at most ``max_norm``."""
    if max_norm is None or norm <= max_norm:
        return 1.0
    return max_norm / norm


def average_(tensors: Sequence[Tensor], world: World) -> None:
    """Average ``tensors`` over all workers in place, in one collective."""
    if not tensors:
        return
    flat = _flatten_dense_tensors(tuple(tensors))
    flat /= world.num_workers
    dist.all_reduce(flat)
    for tensor, averaged in zip(tensors, _unflatten_dense_tensors(flat, tuple(tensors)), strict=True):
        tensor.copy_(averaged)
