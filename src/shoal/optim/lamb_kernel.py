# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Computes LAMB's update of many tensors on a GPU in two passes over memory, in Triton.

The first pass blends the gradients into both moments and sums squares for the norms; the second computes the
same update again from the moments and applies it. A program takes a chunk of one tensor, whose addresses it
finds in a table, so the number of tensors does not matter. No two programs add to the same element: results
have the same bits in each run.

Only :mod:`shoal.optim.lamb` calls this module, and imports it when the first parameter on a GPU is updated.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from shoal.optim.moments import Batch

CHUNK, BLOCK = tl.constexpr(16_384), tl.constexpr(2_048)
"""Elements of a program, and of those the ones that it has in registers at a time."""
_NUM_SUMS = tl.constexpr(4)


class _Chunks(NamedTuple):
    """Holds the places of the chunks of all tensors."""

    tensors: Tensor
    """int32, the number of each chunk's tensor."""
    first: Tensor
    """int32, the number of each tensor's first chunk, and the number of all."""


@lru_cache(maxsize=16)
def _chunks_of(sizes: tuple[int, ...], device: torch.device) -> _Chunks:
    counts = torch.tensor([math.ceil(size / CHUNK.value) for size in sizes])
    tensors = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), counts)
    first = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    return _Chunks(tensors.to(device), first.to(device))


class LambKernel:
    """Updates dense float32 tensors in two passes, unless the device skips the step.

    Args:
        batch: its gradients (before they are scaled), weights, moments, step numbers and group are read.
    """

    def __init__(self, batch: Batch) -> None:
        lists = (batch.grads, batch.entries("exp_avg"), batch.entries("exp_avg_sq"), batch.weights)
        device, group = batch.weights[0].device, batch.group
        sizes = tuple(weight.numel() for weight in batch.weights)
        rows = [[tensor.data_ptr() for tensor in tensors] for tensors in lists] + [list(sizes)]
        table = torch.tensor(rows, dtype=torch.int64)
        # Pinned memory is kept until the copy from it is done: the host does not wait.
        self._table = table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
        self._chunks = _chunks_of(sizes, device)
        self._num_tensors, self._device = len(sizes), device
        beta1, beta2 = group["betas"]
        assert batch.counts is not None
        self._steps = batch.counts.tensor.to(device, non_blocking=True)
        self._skip = self._steps if batch.skip is None else batch.skip.float()
        self._options: dict[str, Any] = {
            "beta2": beta2,
            "new1": 1.0 - beta1,
            "new2": 1.0 - beta2,
            "log1": math.log(beta1) if beta1 else -math.inf,
            "log2": math.log(beta2) if beta2 else -math.inf,
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "IS_CORRECTED": bool(group["bias_correction"]),
            "MAY_SKIP": batch.skip is not None,
            # gradients may lie at any place of a bucket
            "IS_ALIGNED": all(address % 16 == 0 for row in rows[:4] for address in row),
        }
        self._has_ratio = bool(group["trust_ratio"])

    def blend(self, scale: Tensor | float) -> Tensor:
        """Blend scaled gradients into the moments.

        Args:
            scale: factor on the gradients.

        Returns:
            Sums of squares of the scaled gradients, of the weights, of the updates, and 0: fp32
            ``[tensors, 4]``.
        """
        num_chunks = len(self._chunks.tensors)
        parts = torch.empty(num_chunks, _NUM_SUMS.value, device=self._device)
        sums = torch.empty(self._num_tensors, _NUM_SUMS.value, device=self._device)
        factor = (  # neither waits for the device
            scale.to(self._device, torch.float32)
            if isinstance(scale, Tensor)
            else torch.full((), scale, device=self._device)
        )
        with _on(self._device):
            _blend[(num_chunks,)](
                self._table, *self._chunks, parts, factor, self._steps, self._skip, self._num_tensors,
                **self._options, num_warps=8,
            )  # fmt: skip
            _sum_parts[(self._num_tensors,)](parts, self._chunks.first, sums, num_warps=4)
        return sums

    def apply(self, sums: Tensor, lr: float) -> None:
        """Subtract the updates from the weights, times the learning rate and each tensor's ratio.

        Args:
            sums: of :meth:`blend`, summed over the shards of each tensor.
            lr: learning rate.
        """
        options = {name: self._options[name] for name in self._options if name not in _BLENDED}
        with _on(self._device):
            _apply[(len(self._chunks.tensors),)](
                self._table, *self._chunks, sums.contiguous(), self._steps, self._skip, self._num_tensors, lr,
                **options, HAS_RATIO=self._has_ratio, num_warps=8,
            )  # fmt: skip


_BLENDED = ("beta2", "new1", "new2")
"""Options of the first pass only."""


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device if device.type == "cuda" else -1)


@triton.jit
def _address(table, row, tensor, num_tensors, IS_ALIGNED: tl.constexpr):
    """Return the address of a tensor: 0 its gradient, 1 and 2 its moments, 3 its weights."""
    pointer = tl.load(table + row * num_tensors + tensor).to(tl.pointer_type(tl.float32))
    return tl.multiple_of(pointer, 16) if IS_ALIGNED else pointer


@triton.jit
def _update(m, v, w, correction1, correction2, eps, weight_decay):
    """Return m^ / (sqrt(v^) + eps) + weight_decay w."""
    return m / correction1 / (tl.sqrt_rn(v) / correction2 + eps) + weight_decay * w


@triton.jit
def _corrections(step, log1, log2, IS_CORRECTED: tl.constexpr):
    """Return the corrections of both moments, for a step from 1 and logarithms of the decay rates."""
    correction1, correction2 = 1.0, 1.0
    if IS_CORRECTED:
        number = step.to(tl.float64)
        correction1 = (1.0 - tl.exp(number * log1)).to(tl.float32)
        correction2 = tl.sqrt((1.0 - tl.exp(number * log2)).to(tl.float32))
    return correction1, correction2


@triton.jit
def _stored(count, skip, MAY_SKIP: tl.constexpr):
    """Return how many of a chunk's elements are written: none if the step is skipped."""
    return tl.where(tl.load(skip) == 0.0, count, 0) if MAY_SKIP else count


@triton.jit
def _blend(
    table, tensors, first, parts, scale, steps, skip, num_tensors, beta2, new1, new2, log1, log2, eps,
    weight_decay, IS_CORRECTED: tl.constexpr, MAY_SKIP: tl.constexpr, IS_ALIGNED: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    tensor = tl.load(tensors + chunk)
    begin = (chunk - tl.load(first + tensor)).to(tl.int64) * CHUNK
    size = tl.load(table + 4 * num_tensors + tensor)
    grads = _address(table, 0, tensor, num_tensors, IS_ALIGNED) + begin
    firsts = _address(table, 1, tensor, num_tensors, IS_ALIGNED) + begin
    seconds = _address(table, 2, tensor, num_tensors, IS_ALIGNED) + begin
    weights = _address(table, 3, tensor, num_tensors, IS_ALIGNED) + begin
    factor = tl.load(scale)
    correction1, correction2 = _corrections(tl.load(steps + tensor), log1, log2, IS_CORRECTED)
    left = tl.minimum(size - begin, CHUNK).to(tl.int32)
    stored = _stored(left, skip, MAY_SKIP)
    grad_sq = tl.zeros((BLOCK,), tl.float32)
    weight_sq = tl.zeros((BLOCK,), tl.float32)
    update_sq = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, CHUNK, BLOCK):
        i = at + tl.arange(0, BLOCK)
        inside = i < left
        g = tl.load(grads + i, mask=inside, other=0.0) * factor
        m = tl.load(firsts + i, mask=inside, other=0.0)
        v = tl.load(seconds + i, mask=inside, other=0.0)
        w = tl.load(weights + i, mask=inside, other=0.0)
        m += (g - m) * new1
        v = v * beta2 + g * g * new2
        tl.store(firsts + i, m, mask=i < stored)
        tl.store(seconds + i, v, mask=i < stored)
        u = tl.where(inside, _update(m, v, w, correction1, correction2, eps, weight_decay), 0.0)
        grad_sq += g * g
        weight_sq += w * w
        update_sq += u * u
    sums = parts + chunk * 4
    tl.store(sums, tl.sum(grad_sq))
    tl.store(sums + 1, tl.sum(weight_sq))
    tl.store(sums + 2, tl.sum(update_sq))
    tl.store(sums + 3, 0.0)


@triton.jit
def _sum_parts(parts, first, sums):
    """Sum the chunks of one tensor, in their order by place."""
    tensor = tl.program_id(0)
    begin, end = tl.load(first + tensor), tl.load(first + tensor + 1)
    columns = tl.arange(0, 4)
    total = tl.zeros((256, 4), tl.float32)
    for at in range(begin, end, 256):
        rows = at + tl.arange(0, 256)
        total += tl.load(parts + rows[:, None] * 4 + columns[None, :], mask=(rows < end)[:, None], other=0.0)
    tl.store(sums + tensor * 4 + columns, tl.sum(total, axis=0))


@triton.jit
def _apply(
    table, tensors, first, sums, steps, skip, num_tensors, lr, log1, log2, eps, weight_decay,
    IS_CORRECTED: tl.constexpr, MAY_SKIP: tl.constexpr, IS_ALIGNED: tl.constexpr, HAS_RATIO: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    tensor = tl.load(tensors + chunk)
    begin = (chunk - tl.load(first + tensor)).to(tl.int64) * CHUNK
    size = tl.load(table + 4 * num_tensors + tensor)
    firsts = _address(table, 1, tensor, num_tensors, IS_ALIGNED) + begin
    seconds = _address(table, 2, tensor, num_tensors, IS_ALIGNED) + begin
    weights = _address(table, 3, tensor, num_tensors, IS_ALIGNED) + begin
    rate = lr
    if HAS_RATIO:
        weight_norm = tl.sqrt_rn(tl.load(sums + tensor * 4 + 1))
        update_norm = tl.sqrt_rn(tl.load(sums + tensor * 4 + 2))
        is_zero = (weight_norm == 0.0) | (update_norm == 0.0)
        rate = lr * tl.where(is_zero, 1.0, weight_norm / tl.where(is_zero, 1.0, update_norm))
    correction1, correction2 = _corrections(tl.load(steps + tensor), log1, log2, IS_CORRECTED)
    left = _stored(tl.minimum(size - begin, CHUNK).to(tl.int32), skip, MAY_SKIP)
    for at in range(0, CHUNK, BLOCK):
        i = at + tl.arange(0, BLOCK)
        inside = i < left
        m = tl.load(firsts + i, mask=inside, other=0.0)
        v = tl.load(seconds + i, mask=inside, other=0.0)
        w = tl.load(weights + i, mask=inside, other=0.0)
        tl.store(
            weights + i, w - rate * _update(m, v, w, correction1, correction2, eps, weight_decay), mask=inside
        )
