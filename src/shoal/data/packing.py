"""Packs variable-length sequences into one row of tokens, so that no time goes into padding.

A packed micro-batch of B sequences with T tokens in all has the layout that variable-length attention kernels
take (``torch.nn.attention.varlen``, ``flash_attn_varlen_func``):

- ``input_ids``, ``token_type_ids``, ``position_ids`` int64 ``[T]``: token id, segment, position in its
  sequence (from 0);
- ``cu_seqlens`` int32 ``[B + 1]``: the first token of each sequence, and T;
- ``max_seqlen`` int: tokens of the longest sequence.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Packed = dict[str, Any]
"""A packed micro-batch: the arrays and the number above by their names."""


def pack(
    input_ids: NDArray[np.integer], token_type_ids: NDArray[np.integer], lengths: NDArray[np.integer]
) -> Packed:
    """Return the packed micro-batch of concatenated sequences.

    Args:
        input_ids: ``[T]`` token ids, one sequence after the other.
        token_type_ids: ``[T]`` segments.
        lengths: ``[B]`` tokens per sequence, at least one each; they add up to T.
    """
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return {
        "input_ids": np.asarray(input_ids, dtype=np.int64),
        "token_type_ids": np.asarray(token_type_ids, dtype=np.int64),
        "position_ids": np.arange(len(input_ids)) - np.repeat(cu_seqlens[:-1], lengths),
        "cu_seqlens": cu_seqlens,
        "max_seqlen": int(lengths.max()),
    }


def pack_padded(
    input_ids: NDArray[np.integer],
    token_type_ids: NDArray[np.integer],
    attention_mask: NDArray[np.integer] | NDArray[np.bool_],
) -> Packed:
    """Return the packed form of a padded micro-batch.

    Args:
        input_ids: ``[B, width]`` token ids.
        token_type_ids: ``[B, width]`` segments.
        attention_mask: ``[B, width]`` true at tokens, which precede the padding in each row; one at least.

    Raises:
        ValueError: a row has a token after padding.
    """
    mask = np.asarray(attention_mask, dtype=bool)
    if (mask[:, 1:] > mask[:, :-1]).any():
        row = int((mask[:, 1:] > mask[:, :-1]).any(axis=1).argmax())
        raise ValueError(f"attention_mask, row {row}: a token stands after padding; pad at the end")
    return pack(input_ids[mask], token_type_ids[mask], mask.sum(axis=1))
