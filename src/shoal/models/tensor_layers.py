"""Computes linear layers and embeddings of which each worker has a part.

The weights are DTensors, or in an exported graph this worker's parts of them; values are plain tensors. What
crosses between the workers are custom operations, which ``torch.export`` keeps in a graph and whose backward
passes are those of Shoeybi et al. 2019 (arXiv 1909.08053, section 3).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

_groups: dict[str, dist.ProcessGroup] = {}
"""By their names, which graphs hold."""


@torch.library.custom_op("shoal::sum_parts", mutates_args=())
def sum_parts(value: Tensor, group: str) -> Tensor:
    """Return the sum over the workers; each gets the gradient of the sum."""
    total = value.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=_groups[group])
    return total


@torch.library.custom_op("shoal::share_value", mutates_args=())
def share_value(value: Tensor, group: str) -> Tensor:
    """Return a value that all workers have; its gradient is the sum of theirs."""
    return value.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("shoal::join_parts", mutates_args=())
def join_parts(value: Tensor, group: str, sizes: list[int], rank: int) -> Tensor:
    """Return the parts of all workers, joined in the last dimension; each gets the gradient of its own.

    Args:
        sizes: of the parts.
        rank: this worker's among them.
    """
    own = functional.pad(value, (0, max(sizes) - value.shape[-1])).contiguous()
    parts = own.new_empty(len(sizes), *own.shape)
    dist.all_gather_into_tensor(parts.flatten(), own.flatten(), group=_groups[group])
    return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], -1)


@torch.library.custom_op("shoal::take_part", mutates_args=())
def take_part(value: Tensor, group: str, sizes: list[int], rank: int) -> Tensor:
    """Return this worker's part in the last dimension of a value that all have; the gradients are joined."""
    part = value.narrow(-1, sum(sizes[:rank]), sizes[rank])
    return part.clone(memory_format=torch.contiguous_format)


@sum_parts.register_fake
@share_value.register_fake
def _(value: Tensor, group: str) -> Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)


@join_parts.register_fake
def _(value: Tensor, group: str, sizes: list[int], rank: int) -> Tensor:
    return value.new_empty(*value.shape[:-1], sum(sizes))


@take_part.register_fake
def _(value: Tensor, group: str, sizes: list[int], rank: int) -> Tensor:
    return value.new_empty(*value.shape[:-1], sizes[rank])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.arguments = inputs[1:]


sum_parts.register_autograd(lambda ctx, gradient: (gradient, None), setup_context=_keep)
share_value.register_autograd(
    lambda ctx, gradient: (sum_parts(gradient, *ctx.arguments), None), setup_context=_keep
)
join_parts.register_autograd(
    lambda ctx, gradient: (take_part(gradient, *ctx.arguments), None, None, None), setup_context=_keep
)
take_part.register_autograd(
    lambda ctx, gradient: (join_parts(gradient, *ctx.arguments), None, None, None), setup_context=_keep
)


class Workers:
    """The workers that divide the layers of a model.

    Args:
        mesh: one dimension.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        group = mesh.get_group()
        self.group, self.rank, self.size = str(group.group_name), mesh.get_local_rank(), mesh.size()
        self._last: tuple[weakref.ref[Tensor], weakref.ref[Tensor], bool] | None = None
        _groups[self.group] = group

    def sizes(self, size: int) -> list[int]:
        """Return the sizes of the parts of a dimension, as DTensor divides it."""
        most = -(-size // self.size)
        return [min(most, max(0, size - rank * most)) for rank in range(self.size)]

    def sum(self, value: Tensor) -> Tensor:
        total: Tensor = sum_parts(value, self.group)
        return total

    def share(self, value: Tensor) -> Tensor:
        """Return :func:`share_value`: the same tensor to layers that follow with the same value.

        Queries, keys and values have one, so their gradients cross together.
        """
        has_gradient, compiles = torch.is_grad_enabled(), torch.compiler.is_dynamo_compiling()
        if not compiles and self._last is not None:
            known, last, had_gradient = self._last
            before = last() if known() is value and had_gradient == has_gradient else None
            if before is not None:
                return before
        shared: Tensor = share_value(value, self.group)
        if not compiles:
            self._last = weakref.ref(value), weakref.ref(shared), has_gradient
        return shared

    def join(self, value: Tensor, size: int) -> Tensor:
        whole: Tensor = join_parts(value, self.group, self.sizes(size), self.rank)
        return whole

    def part(self, value: Tensor) -> Tensor:
        part: Tensor = take_part(value, self.group, self.sizes(value.shape[-1]), self.rank)
        return part


class CountedWorkers(Workers):
    """Stands for workers whose values are counted and never computed, as the first of them."""

    def __init__(self, size: int) -> None:
        self.group, self.rank, self.size, self._last = "", 0, size, None


class ColumnLinear(nn.Linear):
    """Computes this worker's outputs of a linear layer, or with ``joins`` all of them, from all inputs."""

    workers: Workers
    joins: bool

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs."""
        bias = None if self.bias is None else own_part(self.bias)
        output = functional.linear(self.workers.share(input), own_part(self.weight), bias)
        return self.workers.join(output, self.out_features) if self.joins else output


class RowLinear(nn.Linear):
    """Computes all outputs of a linear layer from this worker's inputs, or with ``takes`` from all."""

    workers: Workers
    takes: bool

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs."""
        own = self.workers.part(input) if self.takes else input
        output = self.workers.sum(functional.linear(own, own_part(self.weight)))
        return output if self.bias is None else output + self.bias


class RowEmbedding(nn.Embedding):
    """Looks up tokens in a table of which this worker has some of the rows."""

    workers: Workers

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of all tokens."""
        sizes, rank = self.workers.sizes(self.num_embeddings), self.workers.rank
        row = input - sum(sizes[:rank])
        elsewhere = (row < 0) | (row >= sizes[rank])
        rows = functional.embedding(row.masked_fill(elsewhere, 0), own_part(self.weight))
        return self.workers.sum(rows.masked_fill(elsewhere[..., None], 0.0))


class SharedWeights(nn.Module):
    """Computes this worker's values with weights that all workers have, as a norm of its heads does.

    Comes before the module's own class; the gradients of the weights are the sums of the workers'.
    """

    workers: Workers

    def forward(self, *inputs: Tensor) -> Any:
        """Return what the module's own class does."""
        own = self._parameters
        group = self.workers.group
        self._parameters = {
            name: None if each is None else share_value(each, group) for name, each in own.items()
        }
        try:
            return super().forward(*inputs)
        finally:
            self._parameters = own


def own_part(tensor: Tensor) -> Tensor:
    """Return this worker's part of a tensor, or a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
