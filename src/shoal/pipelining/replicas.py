"""Sums gradients over the replicas of a pipeline while other stages still compute.

The losses are weighted by the targets of the global batch, so gradients are summed, not averaged. A stage's
parameters are summed when its last backward pass of the step is done; FSDP2 sums those that it shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.decide.server_assignment import DDP_BUCKET_BYTES


class ResidualWire(Protocol):
    """Sums gradients in a coarse format, and keeps what rounding loses for the next step."""

    def sum(self, buffer: Tensor, parameters: Iterable[Tensor]) -> Any:
        """Begin to replace float32 gradients, ``[N]``, by their sum; return a future for its end."""


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """Return this worker's part of a gradient that is there."""
    gradient = parameter.grad
    assert gradient is not None
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


class ReplicaSum:
    """Sums gradients over the replicas in buckets, overlapped with the backward passes of other stages.

    Args:
        group: the replicas; ``None``: there is one.
        wire: dtype in which float32 gradients are sent, or what sends them; default: as they are.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        bucket_bytes: int = DDP_BUCKET_BYTES,
        *,
        wire: torch.dtype | ResidualWire | None = None,
    ) -> None:
        self._group = group
        self._bucket_bytes = bucket_bytes
        self._wire = wire
        self._under_way: list[tuple[Callable[[], object], Tensor, list[Tensor]]] = []

    def start(self, parameters: Iterable[nn.Parameter]) -> None:
        """Begin to sum the gradients of ``parameters``, the same ones in the same order on every replica."""
        if self._group is None:
            return
        bucket: dict[nn.Parameter, Tensor] = {}
        num_bytes = 0
        for parameter in parameters:
            if parameter.grad is None:
                continue
            gradient = local_gradient(parameter)
            if bucket and (
                num_bytes + gradient.nbytes > self._bucket_bytes
                or next(iter(bucket.values())).dtype != gradient.dtype
            ):
                self._send(bucket)
                bucket, num_bytes = {}, 0
            bucket[parameter] = gradient
            num_bytes += gradient.nbytes
        if bucket:
            self._send(bucket)

    def _send(self, bucket: dict[nn.Parameter, Tensor]) -> None:
        gradients = list(bucket.values())
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        wire = self._wire if flat.dtype == torch.float32 else None
        if isinstance(wire, torch.dtype):
            flat = flat.to(wire)
        elif wire is not None:
            self._under_way.append((wire.sum(flat, bucket).wait, flat, gradients))
            return
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        assert work is not None
        self._under_way.append((work.wait, flat, gradients))

    def finish(self) -> None:
        """Wait for all sums and copy them into the gradients."""
        for wait, flat, gradients in self._under_way:
            wait()
            parts = torch.split(flat, [gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        self._under_way.clear()
