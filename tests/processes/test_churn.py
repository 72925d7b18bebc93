"""Tests a training whose members are killed and started at random: it has the bits of its replay."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch.distributed as dist

from churn import LEAST, MOST, churn

pytestmark = pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"), reason="this torch has no groups whose members change"
)
SECONDS = 10.0


def test_members_that_come_and_go_at_random(tmp_path: Path) -> None:
    seed = int(time.time())
    print(f"seed {seed}")
    result = churn(tmp_path, seconds=SECONDS, seed=seed)
    assert result.num_starts > 0
    assert min(result.sizes.values()) >= LEAST - 1 and max(result.sizes.values()) <= MOST
    assert result.digests == {result.replayed}, "all have the bits of the replay"
