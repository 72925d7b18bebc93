"""Computes norms of whole tensors from the shards of FSDP2, and the parts of LAMB's update that need them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shoal.optim.moments import indices_by_kind


def local_part(tensor: Tensor | None) -> Tensor:
    """Return this worker's part of a tensor: itself, or its shard."""
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_box(parameter: Tensor) -> tuple[slice, ...]:
    """Return the slices of this worker's part in the whole tensor, one per dimension."""
    if not isinstance(parameter, DTensor):
        return tuple(slice(0, size) for size in parameter.shape)
    sizes, offsets = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def sum_shards(params: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Sum in place the contributions of each parameter's shards to a tensor that all of them hold.

    Args:
        params: define how tensors are sharded; those of unsharded parameters stay as they are.
        tensors: one for each of ``params``, all of one device and type.
    """
    shards: dict[tuple[DeviceMesh, tuple[int, ...]], list[int]] = {}
    for index, parameter in enumerate(params):
        if isinstance(parameter, DTensor):
            placed = enumerate(parameter.placements)
            axes = tuple(axis for axis, placement in placed if not placement.is_replicate())
            if axes:
                shards.setdefault((parameter.device_mesh, axes), []).append(index)
    for (mesh, axes), indices in shards.items():
        flat = torch.cat([tensors[k].flatten() for k in indices])
        for axis in axes:
            dist.all_reduce(flat, group=mesh.get_group(axis))
        parts = torch.split(flat, [tensors[k].numel() for k in indices])
        for k, part in zip(indices, parts, strict=True):
            tensors[k].copy_(part.view_as(tensors[k]))


@torch.no_grad()
def whole_squares(params: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> Tensor:
    """Return the sum of squares of each whole tensor, in fp32 or (for fp64) fp64: shape ``[len(tensors)]``.

    Args:
        params: define how the tensors are sharded; at least one.
        tensors: of the same shapes as ``params`` (or as their local parts), all of one device and type.
    """
    parts = [local_part(tensor) for tensor in tensors]
    norms = torch._foreach_norm(parts, 2, dtype=torch.promote_types(parts[0].dtype, torch.float32))
    squares = torch.stack(norms).square_()
    sum_shards(params, list(squares.unbind()))
    return squares


@torch.no_grad()
def model_norm(
    params: Sequence[Tensor],
    tensors: Sequence[Tensor | None],
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> float:
    """Return the Euclidean norm over tensors that are distributed over the workers of ``group``; equal on
    all.

    It is non-finite on all workers as soon as it is on one, so that all can skip a step together. On a GPU
    this waits for the device.

    Args:
        params: parameters that this worker counts, sharded or not; only one worker counts a tied weight.
        tensors: the parameters' gradients, or the parameters themselves.
        group: the workers that hold the other stages of the same replica; ``None``: there are none.
        device: device that ``group`` can reduce on; default: that of the first parameter, else the CPU.
    """
    if device is None:
        device = params[0].device if params else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for indices in indices_by_kind(params):
        squares = whole_squares([params[k] for k in indices], [tensors[k] for k in indices])
        total += squares.sum(dtype=torch.float64).to(device)
    if group is not None:
        dist.all_reduce(total, group=group)
    return float(total.sqrt())


@torch.no_grad()
def update_moments(
    grads: list[Tensor], states: Sequence[dict[str, Any]], betas: tuple[float, float]
) -> tuple[list[Tensor], list[Tensor]]:
    """Blend local gradients into ``exp_avg`` and ``exp_avg_sq``; return both and the roots of the latter.

    Returns:
        (local ``exp_avg`` of each state, new tensors with the square roots of ``exp_avg_sq``).
    """
    exp_avgs = [local_part(state["exp_avg"]) for state in states]
    exp_avg_sqs = [local_part(state["exp_avg_sq"]) for state in states]
    torch._foreach_lerp_(exp_avgs, grads, 1.0 - betas[0])
    torch._foreach_mul_(exp_avg_sqs, betas[1])
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, value=1.0 - betas[1])
    return exp_avgs, list(torch._foreach_sqrt(exp_avg_sqs))


@torch.no_grad()
def trust_ratios(params: Sequence[Tensor], weight_squares: Tensor, updates: Sequence[Tensor]) -> Tensor:
    """Return |w| / |u| of each whole tensor, 1 where either norm is 0: shape ``[len(params)]``.

    Args:
        weight_squares: the sums of squares of the weights, as :func:`whole_squares` returns them.
        updates: the updates u, sharded as ``params``.
    """
    weight_norms, update_norms = weight_squares.sqrt(), whole_squares(params, updates).sqrt()
    both = (weight_norms > 0) & (update_norms > 0)
    return torch.where(both, weight_norms / update_norms, 1.0)
