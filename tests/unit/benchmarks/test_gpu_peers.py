"""The peers of the GPU kit: each trains, with tiny sizes on a CPU."""

from __future__ import annotations

import pytest
import torch
from benchmarks.gpu.peers import PEERS, samples_per_s


@pytest.mark.parametrize("name", [name for name in PEERS if name != "bert-128"])
def test_every_peer_trains(name: str) -> None:
    peer = PEERS[name]
    assert samples_per_s(peer, torch.device("cpu"), tiny=True) > 0
