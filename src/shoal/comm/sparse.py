"""Packs sparse tensors of different numbers of elements for an all_gather, and adds up its rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from shoal.comm.collectives import as_bytes
from shoal.errors import UsageError


class SparseParts:
    """A rank's sparse COO tensor on its way into a sum over all ranks.

    Args:
        tensor: takes the sum.
        op: torch's reduction.

    Attributes:
        size: number of the tensor's elements, as a tensor.
        packed: their indices and values as bytes.

    Raises:
        UsageError: the reduction is not a sum.
    """

    def __init__(self, tensor: Tensor, op: ReduceOp | ReduceOp.RedOpType) -> None:
        if getattr(op, "op", op) != ReduceOp.SUM:
            raise UsageError(f"all_reduce of a sparse tensor with {op}: sparse tensors can only be summed")
        self._tensor = tensor
        coalesced = tensor.detach().coalesce()
        self.size = torch.tensor([coalesced.indices().shape[1]])
        self.packed = torch.cat([as_bytes(coalesced.indices()), as_bytes(coalesced.values())])
        self._values, self._index_bytes = coalesced.values(), 8 * coalesced.sparse_dim()
        self._sizes, self._rows = self.size, [self.packed]

    def sizes(self, num_ranks: int) -> Tensor:
        """Return a tensor for the ``size`` of all ranks."""
        self._sizes = self.size.new_empty(num_ranks)
        return self._sizes

    def rows(self) -> list[Tensor]:
        """Return tensors for the ``packed`` of all ranks, once their sizes are known."""
        each = self._index_bytes + math.prod(self._values.shape[1:]) * self._values.element_size()
        self._rows = [self.packed.new_empty(int(size) * each) for size in self._sizes]
        return self._rows

    def add_up(self) -> None:
        """Set the tensor to the sum of all rows."""
        indices, values = [], []
        for size, row in zip(self._sizes.tolist(), self._rows, strict=True):
            border = size * self._index_bytes
            indices.append(row[:border].clone().view(torch.int64).view(self._tensor.sparse_dim(), size))
            values.append(row[border:].clone().view(self._values.dtype).view(size, *self._values.shape[1:]))
        total = torch.sparse_coo_tensor(
            torch.cat(indices, dim=1), torch.cat(values), self._tensor.shape, check_invariants=False
        )
        with torch.no_grad():  # a detached sparse tensor would get indices and values of its own
            self._tensor.copy_(total.coalesce())
