"""The order of training samples, and who gets which: pure functions, so the state of a loader is one integer.

Samples are numbered 0, 1, 2, … over an endless stream; sample ``s`` is position ``s % n`` of epoch
``s // n``. Each epoch has a permutation of its own, computed at any position without storing it. A global
batch is a run of samples, and workers share it in contiguous parts, so neither the number of workers nor
the size of a micro-batch changes which examples one optimizer step sees.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from shoal.decide.draws import Int64Array, UInt64Array, draw, random_keys

_ODD = np.uint64(0xD6E8FEB86659FD93)  # a multiplier that mixes well with shifts of 29 to 32
_ORDER = 1  # this module's word among the uses of one seed

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
    keys = random_keys(seed, _ORDER, epochs)
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


def samples(
    first_sample: int, num_samples: int, num_examples: int, seed: int
) -> tuple[Int64Array, Int64Array]:
    """Return (epochs, indices), each int64 ``[num_samples]``, of a run of the endless stream.

    A global batch is ``samples(samples_consumed, global_batch_size, …)``; it may cross from one epoch
    into the next, or over several when there are few examples.

    Raises:
        ValueError: ``num_examples`` is not positive.
    """
    return examples_of(np.arange(first_sample, first_sample + num_samples), num_examples, seed)


def examples_of(numbers: npt.ArrayLike, num_examples: int, seed: int) -> tuple[Int64Array, Int64Array]:
    """Return (epochs, indices) of samples with any numbers, int64 like ``numbers``.

    Raises:
        ValueError: ``num_examples`` is not positive.
    """
    if num_examples <= 0:
        raise ValueError(f"num_examples={num_examples} must be positive")
    epochs, positions = np.divmod(np.asarray(numbers, dtype=np.int64), num_examples)
    return epochs, shuffled(positions, num_examples, seed, epochs)


def worker_part(size: int, rank: int, num_workers: int) -> range:
    """Return the contiguous part of ``range(size)`` that is worker ``rank``'s; parts differ by at most 1."""
    return range(size * rank // num_workers, size * (rank + 1) // num_workers)


def micro_batches(part: range, micro_batch_size: int) -> list[range]:
    """Cut a worker's part into micro-batches in order; only the last may be smaller."""
    return [part[i : i + micro_batch_size] for i in range(0, len(part), micro_batch_size)]
