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
    _LR,
    _OWN,
    _SIZE,
    _WIDTH,
    CHUNK,
    Passes,
    _blended,
    _number,
    _option,
    _pointers,
    _read,
    _step_of,
    _store_sums,
    _stored,
    chunks_of,
)

if TYPE_CHECKING:
    from shoal.optim.moments import Batch, Squares

_SIDE, _ROWS = tl.constexpr(128), tl.constexpr(16)
"""Rows and columns of a tile, a chunk of a matrix; and of those the rows in registers at a time.

A chunk of a tensor that is not factored is a tile of its elements in rows of as many.
"""
assert _SIDE.value**2 == CHUNK.value
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
    passes.run(_sum_squares, parts, rows, cols)
    passes.run(_blend, rows, cols, of_blocks, chunks=vectors)
    passes.run_by_tensor(_average_rows, vectors.first, of_blocks, means)
    sums = passes.sums(_square_updates, means, parts=parts)
    passes.run(_apply, sums, means)
    return sums[:, 0].sum(), sums[:, 1].sum()


@triton.jit
def _sides_of(row):
    """Return the rows and columns of a matrix, 0 if it is not factored."""
    return _number(row, _NUM_ROWS).to(tl.int32), _number(row, _NUM_COLS).to(tl.int32)


@triton.jit
def _sums_of(row, sums, column):
    """Return where the sums of a matrix's rows or columns are."""
    return sums + _number(row, column).to(tl.int64)


@triton.jit
def _tile(table, tensors, first):
    """Return this program's tensor and its row of the table, the tile's first row and its columns, how many
    rows, columns and elements the tensor has, and whether it is factored: if not, it has rows of 128.
    """
    chunk = tl.program_id(0)
    tensor = tl.load(tensors + chunk)
    row, number = table + tensor * _WIDTH, chunk - tl.load(first + tensor)
    (num_rows, num_cols), size = _sides_of(row), tl.load(row + _SIZE)
    is_factored = num_rows > 0
    num_rows = tl.where(is_factored, num_rows, tl.cdiv(size, _SIDE).to(tl.int32))
    num_cols = tl.where(is_factored, num_cols, _SIDE)
    num_tiles = tl.cdiv(num_cols, _SIDE)
    across = number % num_tiles * _SIDE + tl.arange(0, _SIDE)
    return tensor, row, number // num_tiles * _SIDE, across, num_rows, num_cols, size, is_factored


@triton.jit
def _places(size, down, across, num_rows, num_cols):
    """Return where the elements of some rows of a tile are in the tensor, and which of them there are."""
    i = down.to(tl.int64)[:, None] * num_cols + across[None, :]
    inside = (down < num_rows)[:, None] & (across < num_cols)[None, :]
    return i, inside & (i < size)


@triton.jit
def _share(row):
    """Return 1 - beta2."""
    return tl.exp(tl.log(_step_of(row).to(tl.float64)) * _EXPONENT).to(tl.float32)


@triton.jit
def _sum_squares(
    table, scale, skip, tensors, first, parts, row_sums, col_sums,
    MAY_SKIP: tl.constexpr, IS_ALIGNED: tl.constexpr,
):  # fmt: skip
    """Sum the squares of scaled gradients and weights, and those of a tile's rows and columns; blend the
    second moments of what is not factored.
    """
    _, row, top, across, num_rows, num_cols, size, is_factored = _tile(table, tensors, first)
    grads, weights, firsts, _ = _pointers(row, 0, IS_ALIGNED)
    to_rows = _sums_of(row, row_sums, _ROW_SUMS) + tl.min(across) // _SIDE * num_rows
    to_cols = _sums_of(row, col_sums, _COL_SUMS) + top // _SIDE * num_cols
    factor, eps1, share = tl.load(scale), _option(row, _EPS1), _share(row)
    row_end = tl.where(is_factored, num_rows, 0)
    blend_end = tl.where(is_factored, 0, _stored(num_rows, skip, MAY_SKIP))
    of_cols = tl.zeros((_SIDE,), tl.float32)
    grad_sq = tl.zeros((_ROWS, _SIDE), tl.float32)
    weight_sq = tl.zeros((_ROWS, _SIDE), tl.float32)
    for at in range(0, _SIDE, _ROWS):
        down = top + at + tl.arange(0, _ROWS)
        i, inside = _places(size, down, across, num_rows, num_cols)
        g, w = _read(grads, i, inside) * factor, _read(weights, i, inside)
        grad_sq += g * g
        weight_sq += w * w
        blends = inside & (down < blend_end)[:, None]
        v = tl.load(firsts + i, mask=blends, other=1.0)
        tl.store(firsts + i, _blended(v, g * g + eps1, share), mask=blends)
        tl.store(to_rows + down, tl.sum(g * g, 1), mask=down < row_end)
        of_cols += tl.sum(g * g, 0)
    tl.store(to_cols + across, of_cols, mask=across < tl.where(is_factored, num_cols, 0))
    nothing = tl.zeros((_ROWS, _SIDE), tl.float32)
    _store_sums(parts, grad_sq, weight_sq, nothing, nothing)


@triton.jit
def _blend(
    table, scale, skip, tensors, first, row_sums, col_sums, of_blocks,
    MAY_SKIP: tl.constexpr, IS_ALIGNED: tl.constexpr,
):  # fmt: skip
    """Blend the mean squares of 128 rows or columns into the second moments; sum the new ones."""
    chunk = tl.program_id(0)
    tensor = tl.load(tensors + chunk)
    row, number = table + tensor * _WIDTH, chunk - tl.load(first + tensor)
    _, _, of_rows, of_cols = _pointers(row, 0, IS_ALIGNED)
    num_rows, num_cols = _sides_of(row)
    down = tl.cdiv(num_rows, _SIDE)
    is_row = number < down
    size, other = tl.where(is_row, num_rows, num_cols), tl.where(is_row, num_cols, num_rows)
    sums = _sums_of(row, row_sums, _ROW_SUMS) if is_row else _sums_of(row, col_sums, _COL_SUMS)
    moments = of_rows if is_row else of_cols
    at = tl.where(is_row, number, number - down) * _SIDE + tl.arange(0, _SIDE)
    inside = at < size
    total = tl.zeros((_SIDE,), tl.float32)
    for k in range(0, tl.cdiv(other, _SIDE)):
        total += _read(sums + k * size.to(tl.int64), at, inside)
    mean_sq = total / other.to(tl.float32) + _option(row, _EPS1)
    blended = _blended(_read(moments, at, inside), mean_sq, _share(row))
    tl.store(moments + at, blended, mask=at < _stored(size, skip, MAY_SKIP))
    tl.store(of_blocks + chunk, tl.sum(tl.where(inside, blended, 0.0)))


@triton.jit
def _average_rows(table, scale, skip, first, of_blocks, means, MAY_SKIP: tl.constexpr):
    """Write the mean of a matrix's moments of rows."""
    tensor = tl.program_id(0)
    num_rows, _ = _sides_of(table + tensor * _WIDTH)
    begin, count = tl.load(first + tensor), tl.cdiv(num_rows, _SIDE)
    total = tl.zeros((256,), tl.float32)
    for at in range(0, count, 256):
        i = at + tl.arange(0, 256)
        total += _read(of_blocks + begin, i, i < count)
    tl.store(means + tensor, tl.sum(total) / tl.maximum(num_rows, 1).to(tl.float32))


@triton.jit
def _col_factors(moments, across, num_cols, is_factored):
    of_cols = tl.load(moments + across, mask=across < tl.where(is_factored, num_cols, 0), other=1.0)
    return 1.0 / tl.sqrt_rn(of_cols)


@triton.jit
def _updates(g, moments, i, inside, down, num_rows, mean, of_cols, is_factored):
    """Return gradients over the roots of their second moments."""
    if is_factored:
        of_rows = 1.0 / tl.sqrt_rn(tl.load(moments + down, mask=down < num_rows, other=1.0) / mean)
        u = g * of_rows[:, None] * of_cols[None, :]
    else:
        u = g / tl.sqrt_rn(tl.load(moments + i, mask=inside, other=1.0))
    return u


@triton.jit
def _square_updates(
    table, scale, skip, tensors, first, parts, means, MAY_SKIP: tl.constexpr, IS_ALIGNED: tl.constexpr
):
    """Sum the squares of the updates."""
    tensor, row, top, across, num_rows, num_cols, size, is_factored = _tile(table, tensors, first)
    grads, _, firsts, seconds = _pointers(row, 0, IS_ALIGNED)
    factor, mean = tl.load(scale), tl.load(means + tensor)
    of_cols = _col_factors(seconds, across, num_cols, is_factored)
    update_sq = tl.zeros((_ROWS, _SIDE), tl.float32)
    for at in range(0, _SIDE, _ROWS):
        down = top + at + tl.arange(0, _ROWS)
        i, inside = _places(size, down, across, num_rows, num_cols)
        g = _read(grads, i, inside) * factor
        u = _updates(g, firsts, i, inside, down, num_rows, mean, of_cols, is_factored)
        update_sq += u * u
    tl.store(parts + tl.program_id(0) * 4 + 2, tl.sum(update_sq))


@triton.jit
def _apply(table, scale, skip, tensors, first, sums, means, MAY_SKIP: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """Subtract the clipped updates, times the learning rate and the size of the weights."""
    tensor, row, top, across, num_rows, num_cols, size, is_factored = _tile(table, tensors, first)
    grads, weights, firsts, seconds = _pointers(row, 0, IS_ALIGNED)
    weight_rms = tl.maximum(tl.sqrt_rn(tl.load(sums + tensor * 4 + 1) / size.to(tl.float32)), _LEAST_RMS)
    update_rms = tl.maximum(tl.sqrt_rn(tl.load(sums + tensor * 4 + 2) / size.to(tl.float32)), 1.0)
    lr = _option(row, _LR)
    rate, kept = lr * weight_rms / update_rms, 1.0 - lr * _option(row, _DECAY)
    factor, mean = tl.load(scale), tl.load(means + tensor)
    of_cols = _col_factors(seconds, across, num_cols, is_factored)
    end = _stored(num_rows, skip, MAY_SKIP)
    for at in range(0, _SIDE, _ROWS):
        down = top + at + tl.arange(0, _ROWS)
        i, inside = _places(size, down, across, end, num_cols)
        g = _read(grads, i, inside) * factor
        u = _updates(g, firsts, i, inside, down, num_rows, mean, of_cols, is_factored)
        w = _read(weights, i, inside)
        tl.store(weights + i, w * kept - rate * u, mask=inside)
