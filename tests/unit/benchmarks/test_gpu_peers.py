"""The peers of the GPU kit: each trains, with tiny sizes on a CPU."""

from __future__ import annotations

import pytest
import torch
from benchmarks.gpu.peers import PEERS, by_attention


@pytest.mark.parametrize("name", [name for name in PEERS if name != "bert-128"])
def test_every_peer_trains(name: str) -> None:
    peer = PEERS[name]
    found = by_attention(peer, torch.device("cpu"), tiny=True)
    assert len(found) == (2 if peer.is_text else 1) and min(found.values()) > 0
    assert torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
