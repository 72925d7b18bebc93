"""Packed batches against loops that place one token at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.packing import pack, pack_padded


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_every_array_by_its_definition(lengths: list[int]) -> None:
    total, longest = sum(lengths), max(lengths)
    tokens, types = np.arange(100, 100 + total), np.arange(total) % 2
    packed = pack(tokens, types, np.array(lengths))
    for name in ("input_ids", "token_type_ids", "position_ids"):
        assert packed[name].dtype == np.int64
    assert packed["input_ids"].tolist() == tokens.tolist()
    assert packed["token_type_ids"].tolist() == types.tolist()
    assert packed["max_seqlen"] == longest and type(packed["max_seqlen"]) is int
    assert packed["cu_seqlens"].dtype == np.int32 and len(packed["cu_seqlens"]) == len(lengths) + 1
    token = 0
    for row, length in enumerate(lengths):
        assert packed["cu_seqlens"][row] == token
        for position in range(length):
            assert packed["position_ids"][token] == position
            token += 1
    assert packed["cu_seqlens"][-1] == token


def test_padded_batch_loses_only_its_padding() -> None:
    ids = np.array([[7, 8, 9, 0], [5, 0, 0, 0], [1, 2, 0, 0]], dtype=np.int32)
    types = np.array([[0, 0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 0]], dtype=np.uint8)
    packed = pack_padded(ids, types, np.array([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]]))
    expected = pack(np.array([7, 8, 9, 5, 1, 2]), np.array([0, 0, 1, 0, 0, 1]), np.array([3, 1, 2]))
    assert packed.keys() == expected.keys()
    for name, array in expected.items():
        assert np.array_equal(packed[name], array), name
    assert packed["max_seqlen"] == 3  # the longest sequence, not the padded width


def test_padding_before_a_token_is_refused() -> None:
    ids = np.ones((2, 3), dtype=np.int64)
    with pytest.raises(ValueError, match="row 1: a token stands after padding"):
        pack_padded(ids, ids, np.array([[1, 1, 0], [1, 0, 1]]))
