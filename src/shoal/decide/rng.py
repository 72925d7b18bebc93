"""Generates random numbers without state: a pure function of a key and a counter, over whole arrays at once.

The generator is splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014), read at any place of its sequence: output ``counter`` of the generator whose state is ``key``.
An output serves as a bit string or as the key of another generator, so a key for (seed, epoch, example)
takes three draws, and the numbers do not depend on the batch, the worker or the process.
"""

from __future__ import annotations

from enum import IntEnum, unique
from typing import cast

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]
Int64Array = npt.NDArray[np.int64]

GOLDEN = 0x9E3779B97F4A7C15
"""The sequence's step."""
ROUNDS = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)
"""(shift, multiplier) of its rounds of mixing."""
DROPOUT_RANGE = 1 << 16
"""Values of the 16 random bits that decide about an element of dropout."""
_LAST_SHIFT = 31
_MASK = (1 << 64) - 1


def signed(bits: int) -> int:
    """Return the int64, the type of tensors, that has the lowest 64 of these bits."""
    return (bits + (1 << 63)) % (1 << 64) - (1 << 63)


def draw(keys: UInt64Array | np.uint64, counters: npt.ArrayLike) -> UInt64Array:
    """Return 64 random bits for each (key, counter); the two broadcast. At least one dimension comes back.

    ``keys`` are uint64, ``counters`` any whole numbers of at least 0.
    """
    x = np.array(counters, dtype=np.uint64, ndmin=1)
    x += np.uint64(1)
    x *= np.uint64(GOLDEN)
    x = x + keys
    for shift, multiplier in ROUNDS:
        x ^= x >> np.uint64(shift)
        x *= np.uint64(multiplier)
    x ^= x >> np.uint64(_LAST_SHIFT)
    return x


def _draw_one(key: int, counter: int) -> int:
    """Draw for Python integers, which for a single number is faster than an array."""
    x = (key + GOLDEN * (counter + 1)) & _MASK
    for shift, multiplier in ROUNDS:
        x = ((x ^ (x >> shift)) * multiplier) & _MASK
    return x ^ (x >> _LAST_SHIFT)


@unique
class Stream(IntEnum):
    """Ids of the random streams that one seed feeds; each use of random numbers has its own.

    A number is part of the definition of a run, so it is never changed or given to another use.
    """

    ORDER = 1
    WINDOW_PHASE = 2
    EXAMPLE = 3
    DROPOUT = 7
    SPAN_PHASE = 9
    SPANS = 10
    BLOCK_ORDER = 12
    IMAGE_REPLACEMENT = 13
    IMAGE_AUGMENTATION = 16
    MIXUP = 17
    GROUP_ORDER = 24
    DETECTION_AUGMENTATION = 25
    ROI_SAMPLING = 26
    STAGE_WEIGHTS = 29
    STAGE_OPERATIONS = 30
    BLOCK_PHASE = 31


def random_keys(seed: int, stream: Stream, *counters: npt.ArrayLike) -> UInt64Array:
    """Return keys of a stream of random numbers.

    Args:
        seed: any whole number; its lowest 64 bits count.
        stream: the use of the numbers.
        counters: whole numbers of at least 0, such as epochs and indices; they broadcast.

    Returns:
        The key of each combination of counters, ``[1]`` if none is an array.
    """
    key = _draw_one(_draw_one(seed & _MASK, 0), stream)
    num_plain = next((i for i, counter in enumerate(counters) if not isinstance(counter, int)), len(counters))
    for counter in counters[:num_plain]:
        key = _draw_one(key, cast(int, counter))
    keys = np.array([key], dtype=np.uint64)
    for counter in counters[num_plain:]:
        keys = draw(keys, counter)
    return keys


def dropout_keys(seed: int, epochs: npt.ArrayLike, indices: npt.ArrayLike) -> Int64Array:
    """Return the dropout keys of samples, int64 ``[B]`` (:mod:`shoal.dropout`).

    A sample that is read again in another epoch has another key, and so has each sample of a step.
    """
    return random_keys(seed, Stream.DROPOUT, epochs, indices).view(np.int64)


def uniform(bits: UInt64Array) -> npt.NDArray[np.float64]:
    """Return numbers uniform in [0, 1), multiples of 2**-53."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def below(bits: UInt64Array, bounds: npt.ArrayLike) -> Int64Array:
    """Return whole numbers uniform in [0, bound); bounds are far below 2**53, so the bias is, too."""
    scaled: npt.NDArray[np.float64] = uniform(bits) * np.asarray(bounds, dtype=np.float64)
    return scaled.astype(np.int64)
