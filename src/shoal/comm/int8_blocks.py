"""Quantizes float32 numbers to 8 bits in blocks of 256 that share a scale, with the rounding error.

A block is 256 signed bytes q and one float32 scale s, 1/127 of the largest magnitude in the block; it
represents the numbers q · s, in 1.016 bytes per number. The rounding error is at most s / 2 per number and is
exact: x - fl(q · s) is representable in float32 (Sterbenz's lemma; for q = 0 it is x itself).

Every device gives the same bits: each step rounds once, by IEEE 754. On a GPU nothing waits for a result.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 256
"""Numbers per scale."""
BLOCK_BYTES = BLOCK + 4
"""Bytes of a block on the wire: its values, and its scale at the end of the row."""
LEVELS = 127
_MIN_SCALE = torch.finfo(torch.float32).tiny
"""Blocks with a smaller scale are sent as zeros: division by a subnormal loses precision."""
_TILE = 256
"""Blocks that a CPU processes at a time: 256 KiB, so that several passes over them hit the cache."""


def values_and_scales(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the values and scales of encoded rows.

    Args:
        rows: uint8 [..., m * BLOCK_BYTES]; a row holds the values of all its blocks, then their scales.

    Returns:
        The values, int8 [..., m, BLOCK], and the scales, float32 [..., m].
    """
    num_blocks = rows.shape[-1] // BLOCK_BYTES
    values = rows[..., : num_blocks * BLOCK].view(torch.int8)
    values = values.view(*rows.shape[:-1], num_blocks, BLOCK)
    return values, rows[..., num_blocks * BLOCK :].view(torch.float32)


def encode(numbers: Tensor, values: Tensor, scales: Tensor) -> None:
    """Quantize numbers and keep the rounding error.

    A block with a number that is not finite becomes all NaN and leaves no error: receivers detect that the
    step must be skipped, and later steps are not affected.

    Args:
        numbers: float32 [m, BLOCK]; overwritten with the rounding error.
        values: int8 [m, BLOCK], written.
        scales: float32 [m], written.
    """
    for piece, rounded, scale in _tiles(numbers, values, scales):
        largest = piece.abs().amax(1)
        scale.copy_(largest.div_(divisor(LEVELS, largest)))
        scale.masked_fill_(scale < _MIN_SCALE, 0.0)
        steps = piece.div(scale.masked_fill(scale == 0.0, 1.0)[:, None]).round_()
        finite = scale.isfinite()
        if not _is_host(piece) or not finite.all():  # to ask a GPU would wait for it
            scale.masked_fill_(~finite, torch.nan)
            steps.masked_fill_(~finite[:, None], 0.0)
            piece.masked_fill_(~finite[:, None], 0.0)
        rounded.copy_(steps)
        piece.sub_(steps.mul_(scale.nan_to_num(0.0)[:, None]))


def decode(values: Tensor, scales: Tensor, out: Tensor) -> None:
    """Dequantize ``values [m, BLOCK]`` with ``scales [m]`` into ``out [m, BLOCK]`` (float32)."""
    for piece, rounded, scale in _tiles(out, values, scales):
        piece.copy_(rounded).mul_(scale[:, None])


def add_in_order(received: Tensor, own: Tensor, rank: int) -> None:
    """Sum the numbers of all ranks into ``own``, in float32 and in rank order.

    Args:
        received: uint8 [n, m * BLOCK_BYTES], row r from rank r. The row of ``rank`` is not read: its numbers
            are ``own``, which were not rounded.
        own: float32 [m, BLOCK], overwritten with the sum.
        rank: of this process.
    """
    values, scales = values_and_scales(received)
    tile = _tile_of(own)
    total, term = (own.new_empty(tile, BLOCK) for _ in range(2))
    for begin in range(0, len(own), tile):
        piece = own[begin : begin + tile]
        end, size = begin + len(piece), len(piece)
        for other in range(len(received)):
            target = total[:size] if other == 0 else term[:size]
            if other == rank:
                target.copy_(piece)
            else:
                target.copy_(values[other, begin:end]).mul_(scales[other, begin:end, None])
            if other:
                total[:size].add_(target)
        piece.copy_(total[:size])


def decode_rows(rows: Tensor, flat: Tensor) -> None:
    """Dequantize ``rows`` (uint8 [n, m * BLOCK_BYTES]) one after the other into ``flat``, without padding."""
    values, scales = values_and_scales(rows)
    for row, part in enumerate(torch.split(flat, values.shape[1] * BLOCK)):
        whole, rest = divmod(len(part), BLOCK)
        decode(values[row, :whole], scales[row, :whole], part[: whole * BLOCK].view(whole, BLOCK))
        if rest:
            part[whole * BLOCK :].copy_(values[row, whole, :rest]).mul_(scales[row, whole])


def divisor(number: int, like: Tensor) -> Tensor:
    """Return a number as a tensor to divide by.

    A GPU divides by a Python number by multiplying with its reciprocal, which rounds once more.
    """
    return like.new_full((), number)


def _tiles(numbers: Tensor, values: Tensor, scales: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    tile = _tile_of(numbers)
    return zip(*(torch.split(each, tile) for each in (numbers, values, scales)), strict=True)


def _tile_of(numbers: Tensor) -> int:
    """Return how many blocks are processed at a time; a GPU takes all of them."""
    return max(min(_TILE, len(numbers)) if _is_host(numbers) else len(numbers), 1)


def _is_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"
