"""Computes the order of training samples and each worker's part: pure functions, whose state is one integer.

Samples are numbered 0, 1, 2, … over an endless stream; sample ``s`` is position ``s % n`` of epoch
``s // n``. Each epoch has a permutation of its own, computed at any position without storing it. A global
batch is a run of samples, and workers share it in contiguous parts, so neither the number of workers nor
the size of a micro-batch changes which examples one optimizer step sees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shoal.decide.rng import Int64Array, Stream, UInt64Array, below, draw, random_keys
from shoal.errors import require_positive

_ODD = np.uint64(0xD6E8FEB86659FD93)  # a multiplier that mixes well with shifts of 29 to 32
_ROTATION, _BLOCKS, _WINDOWS = range(3)  # streams of an epoch that is shuffled by blocks

# With few examples, few different round functions exist: over the 120 orders of 5 examples, chi-square
# (119 degrees of freedom) is 1232 after 6 rounds, 186 after 10, 106 after 16.
_NUM_ROUNDS, _NUM_ROUNDS_FEW, _FEW = 6, 16, 1 << 12


def shuffled(positions: npt.ArrayLike, num_examples: int, seed: int, epochs: npt.ArrayLike) -> Int64Array:
    """Return the example at each position of an epoch's permutation, int64 like ``positions``.

    Positions are in [0, num_examples) and broadcast with ``epochs``. Time and memory depend on how many
    positions are asked for, not on ``num_examples``. The permutation is a Feistel network on Z_a × Z_b
    (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002) with a·b just above ``num_examples``;
    the fewer than one in √n results beyond the end are sent through again until they fall inside.
    """
    return _permuted(positions, num_examples, random_keys(seed, Stream.ORDER, epochs))


def _permuted(positions: npt.ArrayLike, num_examples: int, keys: UInt64Array) -> Int64Array:
    """Return each position's place in the permutation of [0, num_examples) that its key names."""
    values = np.asarray(positions, dtype=np.int64) + np.zeros(keys.shape, dtype=np.int64)
    columns = max(1, math.isqrt(max(num_examples - 1, 0)) + 1)
    rows = -(-num_examples // columns)
    values = _feistel(values, keys, rows, columns)
    while (outside := values >= num_examples).any():
        again = np.broadcast_to(keys, values.shape)[outside]
        values[outside] = _feistel(values[outside], again, rows, columns)
    return values


def _feistel(values: Int64Array, keys: UInt64Array, rows: int, columns: int) -> Int64Array:
    """Permute [0, rows·columns): each round adds a keyed function of one coordinate to the other."""
    num_rounds = _NUM_ROUNDS if rows * columns > _FEW else _NUM_ROUNDS_FEW
    round_keys = draw(keys, np.arange(num_rounds).reshape(-1, *[1] * keys.ndim))
    fixed, moved = (part.astype(np.uint64) for part in divmod(values, columns))
    for number in range(num_rounds):
        # Coordinates are below 2**32, so that the upper half of `mixed` scales to either range.
        size = np.uint64(columns if number % 2 == 0 else rows)
        mixed = (fixed ^ round_keys[number]) * _ODD
        mixed ^= mixed >> np.uint64(29)
        mixed *= _ODD
        moved += (mixed >> np.uint64(32)) * size >> np.uint64(32)
        moved %= size
        fixed, moved = moved, fixed
    return (fixed * np.uint64(columns) + moved).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class BlockShuffle:
    """Shuffles by blocks, for storage with slow random reads: adjacent examples are read together.

    An epoch visits blocks of ``block_size`` consecutive examples in random order, and shuffles examples
    within windows of ``blocks_in_window`` such blocks, so that a reader needs only one window at a time
    (two around its border). The price against the full shuffle: two examples of one block are always
    within a window of each other, so a data set that is sorted by class must have been shuffled when it was
    prepared, and a global batch holds whole groups of neighbours once it is as large as a window. Blocks
    begin elsewhere in each epoch (the examples are rotated by a random number), so neighbours change.
    """

    block_size: int
    """Consecutive examples in a block: the images of a shard are a good choice."""
    blocks_in_window: int = 16
    """Blocks that are mixed with each other; their bytes should fit a cache of shards."""

    def __post_init__(self) -> None:
        require_positive("", self, "block_size", "blocks_in_window")


def block_shuffled(
    positions: npt.ArrayLike, num_examples: int, seed: int, epochs: npt.ArrayLike, blocks: BlockShuffle
) -> Int64Array:
    """Return the example at each position of an epoch that is shuffled by blocks, int64.

    As in ``shuffled``, positions are in [0, num_examples) and broadcast with ``epochs``, and each is computed
    independently: the position within its window is permuted; the block there is looked up in the epoch's
    permutation of blocks; the example is rotated. The examples that fill no block (fewer than ``block_size``,
    others in each epoch) come last.
    """
    keys = random_keys(seed, Stream.BLOCK_ORDER, epochs)
    at = np.asarray(positions, dtype=np.int64) + np.zeros(keys.shape, dtype=np.int64)
    keys = np.broadcast_to(keys, at.shape)
    at = _mixed_in_windows(at, num_examples, draw(keys, _WINDOWS), blocks)
    num_blocks = num_examples // blocks.block_size
    whole = at < num_blocks * blocks.block_size
    number, within = np.divmod(at[whole], blocks.block_size)
    permuted = _permuted(number, num_blocks, draw(keys[whole], _BLOCKS))
    at[whole] = permuted * blocks.block_size + within
    return (at + below(draw(keys, _ROTATION), num_examples)) % num_examples


def _mixed_in_windows(
    at: Int64Array, num_examples: int, keys: UInt64Array, blocks: BlockShuffle
) -> Int64Array:
    """Permute positions within each window; the last window may be shorter."""
    size = blocks.block_size * blocks.blocks_in_window
    windows, within = np.divmod(at, size)
    keys = draw(keys, windows)
    last = windows == num_examples // size
    mixed = np.empty_like(at)
    for chosen, length in ((~last, size), (last, num_examples % size)):
        mixed[chosen] = _permuted(within[chosen], length, keys[chosen])
    return windows * size + mixed


class Order(Protocol):
    """Maps the number of a sample in the endless stream to its example. Picklable."""

    def examples_of(self, numbers: npt.ArrayLike) -> tuple[Int64Array, Int64Array]:
        """Return (epochs, indices) of samples with any numbers, int64 like ``numbers``."""


@dataclass(frozen=True, kw_only=True)
class ShuffledOrder:
    """The full shuffle of each epoch, or one by blocks (:class:`Order`)."""

    num_examples: int
    seed: int
    blocks: BlockShuffle | None = None

    def examples_of(self, numbers: npt.ArrayLike) -> tuple[Int64Array, Int64Array]:
        """Return (epochs, indices) of samples with any numbers, int64 like ``numbers``.

        Raises:
            ValueError: ``num_examples`` is not positive.
        """
        if self.num_examples <= 0:
            raise ValueError(f"num_examples={self.num_examples} must be positive")
        epochs, positions = np.divmod(np.asarray(numbers, dtype=np.int64), self.num_examples)
        if self.blocks is None:
            return epochs, shuffled(positions, self.num_examples, self.seed, epochs)
        return epochs, block_shuffled(positions, self.num_examples, self.seed, epochs, self.blocks)


def worker_part(size: int, rank: int, num_workers: int, shares: Sequence[int] = ()) -> range:
    """Return the contiguous part of ``range(size)`` that is worker ``rank``'s.

    Args:
        size: samples of the global batch.
        rank: of the worker.
        num_workers: that share the batch.
        shares: samples of each worker, by rank; default: parts that differ by at most 1.
    """
    if shares:
        begin = sum(shares[:rank])
        return range(begin, begin + shares[rank])
    return range(size * rank // num_workers, size * (rank + 1) // num_workers)


def micro_batches(part: range, micro_batch_size: int) -> list[range]:
    """Cut a worker's part into micro-batches in order; only the last may be smaller."""
    return [part[i : i + micro_batch_size] for i in range(0, len(part), micro_batch_size)]
