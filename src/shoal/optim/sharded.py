"""Norms over whole tensors of which each worker holds a part (FSDP2's DTensors)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor | None) -> Tensor:
    """Return what this worker holds of a tensor: itself, or its shard."""
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_squares(params: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> Tensor:
    """Return the sum of squares of each whole tensor, in fp32 or (for fp64) fp64: shape ``[len(tensors)]``.

    Args:
        params: say how the tensors are sharded; at least one.
        tensors: of the same shapes as ``params`` (or as their local parts), all of one device and type.
    """
    parts = [local_part(tensor) for tensor in tensors]
    norms = torch._foreach_norm(parts, 2, dtype=torch.promote_types(parts[0].dtype, torch.float32))
    squares = torch.stack(norms).square_()
    shards: dict[tuple[DeviceMesh, tuple[int, ...]], list[int]] = {}
    for index, parameter in enumerate(params):
        if isinstance(parameter, DTensor):
            placed = enumerate(parameter.placements)
            axes = tuple(axis for axis, placement in placed if not placement.is_replicate())
            if axes:
                shards.setdefault((parameter.device_mesh, axes), []).append(index)
    for (mesh, axes), indices in shards.items():
        where = torch.tensor(indices, device=squares.device)
        part = squares[where]
        for axis in axes:
            dist.all_reduce(part, group=mesh.get_group(axis))
        squares[where] = part
    return squares
