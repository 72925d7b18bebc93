"""Bytes and launches of a compiled layer of BERT-large on a GPU, counted without one."""

from __future__ import annotations

import pytest
from benchmarks.gpu.layer import layer_passes


@pytest.mark.slow
def test_bytes_and_launches_of_a_layer_stay_within_their_budget() -> None:
    """As counted, and a bit: 64 x 512 tokens, without products and attention."""
    forward, backward = layer_passes()
    assert [forward.num_casts, backward.num_casts] == [0, 0]
    assert [forward.num_squares, backward.num_squares] == [0, 0]
    assert forward.num_bytes + backward.num_bytes <= 3.5e9
    assert forward.num_launches <= 11 and backward.num_launches <= 16
