"""Runs one stage as torch's pipeline runtime calls it: received tensors in, tensors to send out.

Integers travel as floating-point numbers of the same bits: torch's runtime of version 2.11 only supports
received values that may have a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_unflatten

from shoal.pipelining.loss import loss_of
from shoal.pipelining.stage import StageModule, TensorSpec

_CARRIERS = {8: torch.float64, 4: torch.float32, 2: torch.float16, 1: torch.float16}


class StageRunner(nn.Module):
    """A stage, in training or evaluation mode.

    Args:
        stage: on its device.
        autocast: returns the context of the forward pass; the backward pass runs outside of it.

    Attributes:
        outputs, losses: results of the last stage for each micro-batch of the last evaluation.
    """

    def __init__(
        self, stage: StageModule, autocast: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        super().__init__()
        self.stage, self._autocast = stage, autocast
        self.outputs: list[Any] = []
        self.losses: list[Tensor] = []

    def forward(self, *received: Tensor, **inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the stage; the last one returns its loss alone."""
        stage, specs = self.stage, self.stage.body.relayed_in
        received = tuple(_ResolvedGradient.apply(value) for value in received)
        values = [decode(value, spec.dtype) for value, spec in zip(received, specs, strict=True)]
        with self._autocast():
            outputs = stage(*values, **inputs)
        if stage.index < stage.num_stages - 1:
            return tuple(encode(value) for value in outputs)
        result = tree_unflatten(list(outputs), stage.output_spec)
        loss = loss_of(result)
        if not self.training:
            self.outputs.append(result)
            self.losses.append(loss)
        return (loss,)

    def free(self) -> None:
        """Free the weights that a pass without a backward pass has left gathered."""
        if isinstance(self.stage, FSDPModule):
            self.stage.reshard()

    def received(self) -> list[Tensor]:
        """Return meta tensors of the values that the stage receives in its current mode."""
        return _travelling(self.stage.body.relayed_in)

    def sent(self) -> list[Tensor]:
        """Return meta tensors of the values that it sends; of the last stage, its loss."""
        if self.stage.index == self.stage.num_stages - 1:
            return [torch.empty((), device="meta", requires_grad=True)]
        return _travelling(self.stage.body.relayed_out)


def _travelling(specs: Sequence[TensorSpec]) -> list[Tensor]:
    return [
        torch.empty(spec.shape, dtype=carrier(spec.dtype), device="meta", requires_grad=True)
        for spec in specs
    ]


def carrier(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of ``dtype`` travel: itself, or one that may have a gradient."""
    return dtype if dtype.is_floating_point or dtype.is_complex else _CARRIERS[dtype.itemsize]


def resolved(value: Tensor) -> Tensor:
    """Return ``value`` with its numbers in memory, not conjugated or negated where they are read.

    Process groups send the memory of a tensor, or refuse such views.
    """
    return value.resolve_conj().resolve_neg()


class _ResolvedGradient(torch.autograd.Function):
    """Passes a value on; its gradient, which is sent back, is resolved."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return resolved(gradient)


def encode(value: Tensor) -> Tensor:
    """Return ``value`` as its carrier: the same bits, or for bytes and booleans, the same numbers."""
    dtype = carrier(value.dtype)
    if dtype == value.dtype:
        return resolved(value)
    return value.to(dtype) if value.itemsize == 1 else value.contiguous().view(dtype)


def decode(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo :func:`encode`."""
    if value.dtype == dtype:
        return value
    value = value.detach()
    return value.to(dtype) if dtype.itemsize == 1 else value.view(dtype)
