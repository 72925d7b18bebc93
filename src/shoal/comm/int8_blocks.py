"""Numbers in 8 bits: blocks of 256 that share a scale, and what the rounding left over.

A block is 256 signed bytes q and one float32 scale s, a 127th of the largest magnitude in the block; the
numbers are q · s. That is 1.016 bytes a number. What rounding takes away is at most s / 2 for each, and
is known exactly: x - fl(q · s) is representable in float32 (Sterbenz's lemma; for q = 0 it is x itself).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 256
"""Numbers that share a scale."""
BLOCK_BYTES = BLOCK + 4
"""Of one block on the wire: its values, and its share of the scales at the end of the row."""
LEVELS = 127
_LEAST_SCALE = torch.finfo(torch.float32).tiny
"""Blocks whose scale is below the least normal number travel as zeros: there division loses its precision."""
_PIECE = 256
"""Blocks that are worked on at a time: 256 KiB, so that the passes over them find them in the cache."""


def blocks_of(count: int) -> int:
    """Return how many blocks ``count`` numbers take."""
    return -(-count // BLOCK)


def parts(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values, ``int8 [..., m, BLOCK]``, and the scales, ``float32 [..., m]``, of rows of bytes.

    Both are views of ``rows`` (``uint8 [..., m * BLOCK_BYTES]``): a row is the values of all its
    blocks, then their scales.
    """
    num_blocks = rows.shape[-1] // BLOCK_BYTES
    values = rows[..., : num_blocks * BLOCK].view(torch.int8)
    values = values.view(*rows.shape[:-1], num_blocks, BLOCK)
    return values, rows[..., num_blocks * BLOCK :].view(torch.float32)


def encode(numbers: Tensor, values: Tensor, scales: Tensor) -> None:
    """Write ``numbers [m, BLOCK]`` (float32) as ``values`` and ``scales``; leave in ``numbers`` what is lost.

    A block with a number that is not finite becomes NaN as a whole and leaves nothing: who receives it sees
    that the step is to be skipped, and later steps are not spoilt.
    """
    for piece, rounded, scale in _pieces(numbers, values, scales):
        scale.copy_(piece.abs().amax(1).div_(LEVELS))
        scale.masked_fill_(scale < _LEAST_SCALE, 0.0)
        steps = piece.div(scale.masked_fill(scale == 0.0, 1.0)[:, None]).round_()
        if not (finite := scale.isfinite()).all():
            scale.masked_fill_(~finite, torch.nan)
            steps.masked_fill_(~finite[:, None], 0.0)
            piece.masked_fill_(~finite[:, None], 0.0)
        rounded.copy_(steps)
        piece.sub_(steps.mul_(scale.nan_to_num(0.0)[:, None]))


def decode(values: Tensor, scales: Tensor, out: Tensor) -> None:
    """Write what ``values [m, BLOCK]`` and ``scales [m]`` stand for to ``out [m, BLOCK]`` (float32)."""
    for piece, rounded, scale in _pieces(out, values, scales):
        piece.copy_(rounded).mul_(scale[:, None])


def add_in_order(received: Tensor, own: Tensor, rank: int) -> None:
    """Make ``own [m, BLOCK]`` the sum of all ranks' numbers, added in float32 in rank order.

    Args:
        received: ``uint8 [n, m * BLOCK_BYTES]``, row r from rank r; that of ``rank`` is not looked at: its
            numbers are ``own``, which have not been rounded.
    """
    values, scales = parts(received)
    total, term = (torch.empty(min(_PIECE, len(own)), BLOCK) for _ in range(2))
    for begin in range(0, len(own), _PIECE):
        piece = own[begin : begin + _PIECE]
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


def write_out(rows: Tensor, flat: Tensor) -> None:
    """Write the numbers of ``rows`` (``uint8 [n, m * BLOCK_BYTES]``), one row after the other, to ``flat``.

    What ``flat`` has no room for is the padding at the end.
    """
    values, scales = parts(rows)
    for row, part in enumerate(torch.split(flat, values.shape[1] * BLOCK)):
        whole, rest = divmod(len(part), BLOCK)
        decode(values[row, :whole], scales[row, :whole], part[: whole * BLOCK].view(whole, BLOCK))
        if rest:
            part[whole * BLOCK :].copy_(values[row, whole, :rest]).mul_(scales[row, whole])


def _pieces(numbers: Tensor, values: Tensor, scales: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    return zip(*(torch.split(each, _PIECE) for each in (numbers, values, scales)), strict=True)
