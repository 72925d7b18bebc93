"""Rows of several workers on the main one, in order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked_workers import run_workers

from shoal.env.worker import WorkerRanks
from shoal.train.world import World, gather_rows


def gather(rank: int, rows_of: list[list[int]]) -> None:
    """Gather the rows of a table; a worker without rows does not know the number of columns."""
    num_workers = len(rows_of)
    control = dist.new_group(backend="gloo") if num_workers > 1 else None
    ranks = WorkerRanks(rank=rank, num_workers=num_workers, local_rank=rank, num_local_workers=num_workers)
    world = World(ranks=ranks, device=torch.device("cpu"), backend="gloo", control=control)  # type: ignore[arg-type]
    table = torch.arange(10.0).reshape(5, 2)
    own = table[rows_of[rank]] if rows_of[rank] else torch.empty(0, 1)
    gathered = gather_rows(world, own, [np.array(rows, dtype=np.int64) for rows in rows_of])
    if rank == 0:
        assert gathered is not None and np.array_equal(gathered, table.numpy())
    else:
        assert gathered is None


@pytest.mark.parametrize("rows_of", [[[3, 1, 0, 2, 4]], [[4, 0], [1, 3, 2]], [[], [1, 0], [4, 2, 3]]])
def test_rows_are_in_order_on_the_main_worker(tmp_path: Path, rows_of: list[list[int]]) -> None:
    assert run_workers(gather, len(rows_of), tmp_path / "meet", rows_of) == [0] * len(rows_of)
