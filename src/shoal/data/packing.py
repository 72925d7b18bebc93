"""Packed batches: a micro-batch's tokens one sequence after the other, so that no time goes into padding.

A packed micro-batch of B sequences with T tokens in all, S in the longest, is a dict of int64 arrays:

- ``tokens``, ``types``, ``positions`` ``[T]``: token id, segment, place in its sequence (from 0);
- ``lengths`` ``[B]``: tokens of each sequence; their sum is T, their maximum S;
- ``grid`` ``[B, S]``: which of the T tokens stands at each place of each sequence, 0 where there is none;
- ``places`` ``[T]``: where each token stands in the flattened grid, row * S + position.

Everything but attention works on the T tokens. Attention works on the grid, and ``grid`` and ``places`` lead
there and back. Models take these arrays by these names.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Packed = dict[str, NDArray[np.int64]]
"""A packed micro-batch by the names above."""


def pack(tokens: NDArray[np.integer], types: NDArray[np.integer], lengths: NDArray[np.integer]) -> Packed:
    """Return the packed micro-batch of sequences that already stand one after the other.

    Args:
        tokens: ``[T]`` ids.
        types: ``[T]`` segments.
        lengths: ``[B]`` tokens of each sequence, at least one.

    Raises:
        ValueError: a sequence is empty, or the lengths do not add up to the tokens.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    num_tokens = int(lengths.sum())
    if lengths.size == 0 or lengths.min() < 1:
        raise ValueError(f"lengths {lengths.tolist()} must name at least one sequence, none of them empty")
    if not num_tokens == len(tokens) == len(types):
        raise ValueError(f"{len(tokens)} tokens and {len(types)} types, but lengths add up to {num_tokens}")
    longest = int(lengths.max())
    starts = np.cumsum(lengths) - lengths
    columns = np.arange(longest)
    positions = np.arange(num_tokens) - np.repeat(starts, lengths)
    return {
        "tokens": np.asarray(tokens, dtype=np.int64),
        "types": np.asarray(types, dtype=np.int64),
        "positions": positions,
        "lengths": lengths,
        "grid": np.where(columns < lengths[:, None], starts[:, None] + columns, 0),
        "places": np.repeat(np.arange(len(lengths)) * longest, lengths) + positions,
    }


def pack_padded(
    input_ids: NDArray[np.integer],
    token_type_ids: NDArray[np.integer],
    attention_mask: NDArray[np.integer] | NDArray[np.bool_],
) -> Packed:
    """Return the packed form of a padded micro-batch; places without a token are left out.

    Args:
        input_ids: ``[B, width]`` ids.
        token_type_ids: ``[B, width]`` segments.
        attention_mask: ``[B, width]`` true where there is a token; tokens come first in each row.

    Raises:
        ValueError: a row has no token, or one after a place without.
    """
    mask = np.asarray(attention_mask, dtype=bool)
    if (mask[:, 1:] > mask[:, :-1]).any():
        row = int((mask[:, 1:] > mask[:, :-1]).any(axis=1).argmax())
        raise ValueError(f"attention_mask, row {row}: a token stands after padding; pad at the end")
    return pack(input_ids[mask], token_type_ids[mask], mask.sum(axis=1))
