# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Computes Adafactor's update of many tensors on a GPU in three passes over memory, in Triton.

The first pass sums the squares of a matrix's rows and columns, the second one those of the updates, the third
one moves the weights; between them, programs for 128 rows or columns blend the second moments. Updates are
computed again from gradients and moments and are never written, so a step needs memory for the sums alone, a
64th of that of the weights. As in :mod:`shoal.optim.pass_kernels`, one launch serves all tensors, and results
have the same bits in each run.

Only :mod:`shoal.optim.adafactor` calls this module, and imports it when the first parameter on a GPU is
updated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.optim.pass_kernels import (
    _DECAY,
    _FIRST,
    _GRAD,
    _LR,
    _OWN,
    _SECOND,
    _SIZE,
    _WEIGHT,
    BLOCK,
    CHUNK,
    Passes,
    _elements,
    _number,
    _option,
    _place,
    _step_of,
    _store_sums,
    _stored,
    chunks_of,
)

if TYPE_CHECKING:
    from shoal.optim.moments import Batch, Squares

_SIDE, _ROWS = tl.constexpr(128), tl.constexpr(16)
"""Rows and columns of a tile, a chunk of a matrix; and of those the rows in registers at a time."""
_EXPONENT, _LEAST_RMS = tl.constexpr(-0.8), tl.constexpr(1e-3)

# The optimizer's own options: eps1, the sizes of a matrix (0 if it is not factored), where its sums begin.
_EPS1, _NUM_ROWS, _NUM_COLS, _ROW_SUMS, _COL_SUMS = (tl.constexpr(_OWN.value + k) for k in range(5))


class _Layout:
    """Divides matrices into tiles, and places the sums of their rows and columns one after another."""

    def __init__(self) -> None:
        self.num_row_sums = self.num_col_sums = 0
        self.vectors: list[int] = []
        """Blocks of rows and of columns of each tensor."""
        self.chunks: list[int] = []
        """Programs of each tensor."""

    def options(self, group: dict[str, Any], weight: Tensor) -> list[float]:
        rows, cols = sides(weight, group["min_factored_size"])
        begin = self.num_row_sums, self.num_col_sums
        tiles = _blocks(rows) * _blocks(cols)
        self.chunks.append(tiles if rows else math.ceil(weight.numel() / CHUNK.value))
        self.vectors.append(_blocks(rows) + _blocks(cols))
        self.num_row_sums += rows * _blocks(cols)
        self.num_col_sums += cols * _blocks(rows)
        return [group["eps1"], rows, cols, *begin]


def _blocks(size: int) -> int:
    return -(-size // int(_SIDE.value))


def sides(weight: Tensor, min_size: int) -> tuple[int, int]:
    """Return rows and columns of a matrix that is factored, else 0."""
    is_factored = weight.ndim == 2 and min(weight.shape) >= min_size
    return (weight.shape[0], weight.shape[1]) if is_factored else (0, 0)


def _entries(state: dict[str, Any]) -> tuple[Tensor, Tensor]:
    if "variance" in state:
        return state["variance"], state["variance"]
    return state["row_var"], state["col_var"]


def update_adafactor(batches: Sequence[Batch]) -> Squares:
    """Update parameters of one device, none of them sharded, of which matrices alone are factored."""
    layout = _Layout()
    passes = Passes(batches, _entries, layout.options, lambda _: layout.chunks)
    vectors = chunks_of(tuple(layout.vectors), passes.device)
    rows, cols, of_blocks, means = (
        torch.empty(size, device=passes.device)
        for size in (layout.num_row_sums, layout.num_col_sums, len(vectors.tensors), passes.num_tensors)
    )
    parts = passes.new_parts()
    passes.run(_sum_sides, parts, rows, cols)
    passes.run(_blend, rows, cols, of_blocks, chunks=vectors)
    passes.run_by_tensor(_average_rows, vectors.first, of_blocks, means)
    sums = passes.sums(_square_updates, means, parts=parts)
    passes.run(_apply, sums, means)
    return sums[:, 0].sum(), sums[:, 1].sum()


@triton.jit
def _tile(table, tensors, first, num_tensors, num_rows, num_cols):
    """Return this program's first row and column."""
    chunk = tl.program_id(0)
    number = chunk - tl.load(first + tl.load(tensors + chunk))
    across = tl.cdiv(num_cols, _SIDE)
    return number // across * _SIDE, number % across * _SIDE


@triton.jit
def _sides_of(table, tensor, num_tensors):
    rows = _number(table, _NUM_ROWS, tensor, num_tensors).to(tl.int32)
    return rows, _number(table, _NUM_COLS, tensor, num_tensors).to(tl.int32)


@triton.jit
def _share(table, tensor, num_tensors):
    """Return 1 - beta2."""
    step = _step_of(table, tensor, num_tensors).to(tl.float64)
    return tl.exp(tl.log(step) * _EXPONENT).to(tl.float32)


@triton.jit
def _blended(before, now, share):
    return tl.where(share == 1.0, now, before + (now - before) * share)


@triton.jit
def _sum_sides(
    table, num_tensors, scale, skip, tensors, first, parts, row_sums, col_sums,
    MAY_SKIP: tl.constexpr, IS_ALIGNED: tl.constexpr,
):  # fmt: skip
    """Sum the squares of a tile's rows and columns; of all tensors those of scaled gradients and weights."""
    tensor, begin, left = _place(table, tensors, first, num_tensors)
    grads = _elements(table, _GRAD, tensor, num_tensors, 0, IS_ALIGNED)
    weights = _elements(table, _WEIGHT, tensor, num_tensors, 0, IS_ALIGNED)
    num_rows, num_cols = _sides_of(table, tensor, num_tensors)
    factor = tl.load(scale)
    grad_sq = tl.zeros((BLOCK,), tl.float32)
    weight_sq = tl.zeros((BLOCK,), tl.float32)
    if num_rows > 0:
        row, col = _tile(table, tensors, first, num_tensors, num_rows, num_cols)
        across = col + tl.arange(0, _SIDE)
        to_rows = (
            row_sums + _number(table, _ROW_SUMS, tensor, num_tensors).to(tl.int64) + col // _SIDE * num_rows
        )
        to_cols = (
            col_sums + _number(table, _COL_SUMS, tensor, num_tensors).to(tl.int64) + row // _SIDE * num_cols
        )
        of_cols = tl.zeros((_SIDE,), tl.float32)
        for at in range(0, _SIDE, _ROWS):
            down = row + at + tl.arange(0, _ROWS)
            inside = (down < num_rows)[:, None] & (across < num_cols)[None, :]
            i = down.to(tl.int64)[:, None] * num_cols + across[None, :]
            g = tl.load(grads + i, mask=inside, other=0.0) * factor
            w = tl.load(weights + i, mask=inside, other=0.0)
            tl.store(to_rows + down, tl.sum(g * g, 1), mask=down < num_rows)
            of_cols += tl.sum(g * g, 0)
            weight_sq += tl.reshape(w * w, (BLOCK,))
            grad_sq += tl.reshape(g * g, (BLOCK,))
        tl.store(to_cols + across, of_cols, mask=across < num_cols)
    else:
        for at in range(0, CHUNK, BLOCK):
            i = at + tl.arange(0, BLOCK)
            g = tl.load(grads + begin + i, mask=i < left, other=0.0) * factor
            w = tl.load(weights + begin + i, mask=i < left, other=0.0)
            grad_sq += g * g
            weight_sq += w * w
    nothing = tl.zeros((BLOCK,), tl.float32)
    _store_sums(parts, grad_sq, weight_sq, nothing, nothing)


@triton.jit
def _blend_block(
    sums, num_sums, stride, moments, at, size, divisor, eps1, share, skip, MAY_SKIP: tl.constexpr
):
    """Blend sums over tiles, divided, into a block of moments; return the new ones."""
    inside = at < size
    total = tl.zeros((_SIDE,), tl.float32)
    for k in range(0, num_sums):
        total += tl.load(sums + k * stride.to(tl.int64) + at, mask=inside, other=0.0)
    before = tl.load(moments + at, mask=inside, other=0.0)
    blended = _blended(before, total / divisor + eps1, share)
    tl.store(moments + at, blended, mask=at < _stored(size, skip, MAY_SKIP))
    return tl.where(inside, blended, 0.0)


@triton.jit
def _blend(
    table, num_tensors, scale, skip, tensors, first, row_sums, col_sums, of_blocks,
    MAY_SKIP: tl.constexpr, IS_ALIGNED: tl.constexpr,
):  # fmt: skip
    """Blend the mean squares of 128 rows or columns into the second moments; sum the new ones."""
    chunk = tl.program_id(0)
    tensor = tl.load(tensors + chunk)
    number = chunk - tl.load(first + tensor)
    num_rows, num_cols = _sides_of(table, tensor, num_tensors)
    down, across = tl.cdiv(num_rows, _SIDE), tl.cdiv(num_cols, _SIDE)
    eps1, share = _option(table, _EPS1, tensor, num_tensors), _share(table, tensor, num_tensors)
    is_row = number < down
    if is_row:
        at = number * _SIDE + tl.arange(0, _SIDE)
        sums = row_sums + _number(table, _ROW_SUMS, tensor, num_tensors).to(tl.int64)
        moments = _elements(table, _FIRST, tensor, num_tensors, 0, IS_ALIGNED)
        new = _blend_block(
            sums,
            across,
            num_rows,
            moments,
            at,
            num_rows,
            num_cols.to(tl.float32),
            eps1,
            share,
            skip,
            MAY_SKIP,
        )
        tl.store(of_blocks + chunk, tl.sum(new))
    else:
        at = (number - down) * _SIDE + tl.arange(0, _SIDE)
        sums = col_sums + _number(table, _COL_SUMS, tensor, num_tensors).to(tl.int64)
        moments = _elements(table, _SECOND, tensor, num_tensors, 0, IS_ALIGNED)
        _blend_block(
            sums, down, num_cols, moments, at, num_cols, num_rows.to(tl.float32), eps1, share, skip, MAY_SKIP
        )


@triton.jit
def _average_rows(table, num_tensors, scale, skip, first, of_blocks, means, MAY_SKIP: tl.constexpr):
    """Write the mean of a matrix's moments of rows."""
    tensor = tl.program_id(0)
    num_rows, _ = _sides_of(table, tensor, num_tensors)
    begin, count = tl.load(first + tensor), tl.cdiv(num_rows, _SIDE)
    total = tl.zeros((256,), tl.float32)
    for at in range(0, count, 256):
        i = at + tl.arange(0, 256)
        total += tl.load(of_blocks + begin + i, mask=i < count, other=0.0)
    tl.store(means + tensor, tl.sum(total) / tl.maximum(num_rows, 1).to(tl.float32))


@triton.jit
def _row_factors(moments, down, num_rows, mean):
    of_rows = tl.load(moments + down, mask=down < num_rows, other=1.0)
    return 1.0 / tl.sqrt_rn(of_rows / mean)


@triton.jit
def _col_factors(moments, across, num_cols):
    return 1.0 / tl.sqrt_rn(tl.load(moments + across, mask=across < num_cols, other=1.0))


@triton.jit
def _square_updates(
    table, num_tensors, scale, skip, tensors, first, parts, means,
    MAY_SKIP: tl.constexpr, IS_ALIGNED: tl.constexpr,
):  # fmt: skip
    """Sum the squares of the updates; blend the second moments of what is not factored."""
    tensor, begin, left = _place(table, tensors, first, num_tensors)
    grads = _elements(table, _GRAD, tensor, num_tensors, 0, IS_ALIGNED)
    firsts = _elements(table, _FIRST, tensor, num_tensors, 0, IS_ALIGNED)
    seconds = _elements(table, _SECOND, tensor, num_tensors, 0, IS_ALIGNED)
    num_rows, num_cols = _sides_of(table, tensor, num_tensors)
    factor = tl.load(scale)
    update_sq = tl.zeros((BLOCK,), tl.float32)
    if num_rows > 0:
        row, col = _tile(table, tensors, first, num_tensors, num_rows, num_cols)
        across, mean = col + tl.arange(0, _SIDE), tl.load(means + tensor)
        of_cols = _col_factors(seconds, across, num_cols)
        for at in range(0, _SIDE, _ROWS):
            down = row + at + tl.arange(0, _ROWS)
            inside = (down < num_rows)[:, None] & (across < num_cols)[None, :]
            i = down.to(tl.int64)[:, None] * num_cols + across[None, :]
            g = tl.load(grads + i, mask=inside, other=0.0) * factor
            u = g * _row_factors(firsts, down, num_rows, mean)[:, None] * of_cols[None, :]
            update_sq += tl.reshape(u * u, (BLOCK,))
    else:
        eps1, share = _option(table, _EPS1, tensor, num_tensors), _share(table, tensor, num_tensors)
        stored = _stored(left, skip, MAY_SKIP)
        for at in range(0, CHUNK, BLOCK):
            i = at + tl.arange(0, BLOCK)
            inside = i < left
            g = tl.load(grads + begin + i, mask=inside, other=0.0) * factor
            v = _blended(tl.load(firsts + begin + i, mask=inside, other=1.0), g * g + eps1, share)
            tl.store(firsts + begin + i, v, mask=i < stored)
            u = tl.where(inside, g / tl.sqrt_rn(v), 0.0)
            update_sq += u * u
    tl.store(parts + tl.program_id(0) * 4 + 2, tl.sum(update_sq))


@triton.jit
def _apply(
    table, num_tensors, scale, skip, tensors, first, sums, means,
    MAY_SKIP: tl.constexpr, IS_ALIGNED: tl.constexpr,
):  # fmt: skip
    """Subtract the clipped updates, times the learning rate and the size of the weights."""
    tensor, begin, left = _place(table, tensors, first, num_tensors)
    grads = _elements(table, _GRAD, tensor, num_tensors, 0, IS_ALIGNED)
    weights = _elements(table, _WEIGHT, tensor, num_tensors, 0, IS_ALIGNED)
    firsts = _elements(table, _FIRST, tensor, num_tensors, 0, IS_ALIGNED)
    seconds = _elements(table, _SECOND, tensor, num_tensors, 0, IS_ALIGNED)
    num_rows, num_cols = _sides_of(table, tensor, num_tensors)
    size = tl.load(table + _SIZE * num_tensors + tensor).to(tl.float32)
    lr, decay = _option(table, _LR, tensor, num_tensors), _option(table, _DECAY, tensor, num_tensors)
    weight_rms = tl.maximum(tl.sqrt_rn(tl.load(sums + tensor * 4 + 1) / size), _LEAST_RMS)
    update_rms = tl.maximum(tl.sqrt_rn(tl.load(sums + tensor * 4 + 2) / size), 1.0)
    rate, kept, factor = lr * weight_rms / update_rms, 1.0 - lr * decay, tl.load(scale)
    if num_rows > 0:
        row, col = _tile(table, tensors, first, num_tensors, num_rows, num_cols)
        across, mean = col + tl.arange(0, _SIDE), tl.load(means + tensor)
        of_cols = _col_factors(seconds, across, num_cols)
        end = _stored(num_rows, skip, MAY_SKIP)
        for at in range(0, _SIDE, _ROWS):
            down = row + at + tl.arange(0, _ROWS)
            inside = (down < end)[:, None] & (across < num_cols)[None, :]
            i = down.to(tl.int64)[:, None] * num_cols + across[None, :]
            g = tl.load(grads + i, mask=inside, other=0.0) * factor
            u = g * _row_factors(firsts, down, num_rows, mean)[:, None] * of_cols[None, :]
            w = tl.load(weights + i, mask=inside, other=0.0)
            tl.store(weights + i, w * kept - rate * u, mask=inside)
    else:
        stored = _stored(left, skip, MAY_SKIP)
        for at in range(0, CHUNK, BLOCK):
            i = at + tl.arange(0, BLOCK)
            inside = i < stored
            g = tl.load(grads + begin + i, mask=inside, other=0.0) * factor
            v = tl.load(firsts + begin + i, mask=inside, other=1.0)
            w = tl.load(weights + begin + i, mask=inside, other=0.0)
            tl.store(weights + begin + i, w * kept - rate * (g / tl.sqrt_rn(v)), mask=inside)
