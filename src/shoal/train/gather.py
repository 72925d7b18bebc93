"""Rows that workers computed, put in order on the main worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from shoal.train.world import World

Float32Array = npt.NDArray[np.float32]


def gather_rows(
    world: World, own: torch.Tensor, rows_of: Sequence[npt.NDArray[np.int64]]
) -> Float32Array | None:
    """Return all rows ``[num_rows, columns]`` on the main worker, ``None`` on the others.

    Args:
        own: this worker's rows, float32 on the CPU, in the order of ``rows_of[rank]``.
        rows_of: for each worker the numbers of its rows; together every row once. All workers know them, so
            that no sizes need be exchanged.
    """
    own = own.contiguous()
    if not world.is_main:
        if len(own):
            dist.send(own, dst=0, group=world.control)
        return None
    out = np.empty((sum(map(len, rows_of)), own.shape[1]), dtype=np.float32)
    for rank, rows in enumerate(rows_of):
        part = own
        if rank != world.place.rank and len(rows):
            part = torch.empty(len(rows), own.shape[1])
            dist.recv(part, src=rank, group=world.control)
        if len(rows):
            out[rows] = part.numpy()
    return out


def gather_flat(world: World, own: npt.NDArray[Any]) -> list[npt.NDArray[Any]] | None:
    """Return the arrays of all workers by rank on the main worker, ``None`` on the others.

    Args:
        own: one-dimensional, of a type that all workers share; lengths differ at will.
    """
    if world.num_workers == 1:
        return [own]
    sizes = torch.zeros(world.num_workers, dtype=torch.int64)
    sizes[world.place.rank] = len(own)
    dist.all_reduce(sizes, group=world.control)
    tensor = torch.from_numpy(np.ascontiguousarray(own))
    if not world.is_main:
        if len(own):
            dist.send(tensor, dst=0, group=world.control)
        return None
    parts = []
    for rank, size in enumerate(sizes.tolist()):
        part = tensor
        if rank != world.place.rank:
            part = torch.empty(size, dtype=tensor.dtype)
            if size:
                dist.recv(part, src=rank, group=world.control)
        parts.append(part.numpy())
    return parts
