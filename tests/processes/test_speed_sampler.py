"""Trains a loop without ``Run`` whose DataLoader takes its batches from a sampler by speed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shoal_workers import run_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from shoal.errors import UsageError
from shoal.train.shares import SpeedSampler

NUM_EXAMPLES, BATCH = 200, 48
SLOW = (0.5e-3, 1.5e-3)
"""Seconds per sample of each worker."""


def dataset() -> TensorDataset:
    points = torch.randn(NUM_EXAMPLES, 2, generator=torch.Generator().manual_seed(3))
    return TensorDataset(points, (points.norm(dim=1) < 1).long(), torch.arange(NUM_EXAMPLES))


def loop(rank: int, folder: Path, passes: int, ahead: int, processes: int, slow: tuple[float, float]) -> None:
    """Train ``passes`` passes; write the indices of each step, the weights and the sampler's state."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = SpeedSampler(NUM_EXAMPLES, global_batch_size=BATCH, model=ddp, seed=5, ahead=ahead)
    if (folder / "state.json").exists():
        sampler.load_state_dict(json.loads((folder / "state.json").read_text()))
    loader = DataLoader(dataset(), batch_sampler=sampler, num_workers=processes)
    seen = []
    for _ in range(passes):
        for points, inside, indices in loader:
            loss = F.cross_entropy(ddp(points), inside, reduction="sum")
            time.sleep(slow[rank] * len(points))
            (loss * sampler.weight).backward()
            optimizer.step()
            optimizer.zero_grad()
            sampler.step()
            seen.append(indices.tolist())
    out: dict[str, Any] = {"seen": seen, "weights": [p.tolist() for p in model.parameters()]}
    (folder / f"out-{rank}.json").write_text(json.dumps(out | {"changes": sampler.changes}))
    if rank == 0:
        (folder / "next.json").write_text(json.dumps(sampler.state_dict()))


def train(
    folder: Path, *, passes: int = 8, ahead: int = 0, processes: int = 0, slow: tuple[float, float] = SLOW
) -> list[dict[str, Any]]:
    run_group(loop, 2, folder, folder, passes, ahead, processes, slow, backend="gloo")
    return [json.loads((folder / f"out-{rank}.json").read_text()) for rank in range(2)]


def wholes(outs: list[dict[str, Any]]) -> list[list[int]]:
    return [one + other for one, other in zip(outs[0]["seen"], outs[1]["seen"], strict=True)]


@pytest.mark.parametrize(("ahead", "processes"), [(0, 0), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_a_slow_worker_gets_its_part_and_batches_stay_the_same(
    tmp_path: Path, ahead: int, processes: int
) -> None:
    by_speed = train(tmp_path / "by-speed", ahead=ahead, processes=processes)
    equal = train(tmp_path / "equal", slow=(0.0, 0.0), passes=2)
    assert by_speed[0]["changes"] == by_speed[1]["changes"]
    first, shares = by_speed[0]["changes"][0]
    assert first == 17 + ahead and sum(shares) == BATCH
    assert 8 <= shares[1] <= 16
    assert [len(indices) for indices in by_speed[1]["seen"]][: first - 1] == [BATCH // 2] * (first - 1)
    assert len(by_speed[1]["seen"][first - 1]) == shares[1]
    assert wholes(by_speed)[: len(wholes(equal))] == wholes(equal)
    assert by_speed[0]["weights"] == by_speed[1]["weights"]


@pytest.mark.slow
def test_a_loop_that_continues_goes_on_with_its_batches_and_shares(tmp_path: Path) -> None:
    before = train(tmp_path, passes=6)
    (tmp_path / "next.json").rename(tmp_path / "state.json")
    after = train(tmp_path, passes=1)
    assert len(after[1]["seen"][0]) == before[0]["changes"][-1][1][1]
    numbers = [*range(6 * 4 * BATCH, 7 * 4 * BATCH)]
    sampler = SpeedSampler(NUM_EXAMPLES, global_batch_size=BATCH, model=nn.Linear(1, 1), seed=5)
    expected = sampler._order.examples_of(numbers)[1].tolist()
    assert [index for whole in wholes(after) for index in whole] == expected


def test_one_process_takes_whole_batches() -> None:
    model = nn.Linear(2, 2)
    sampler = SpeedSampler(NUM_EXAMPLES, global_batch_size=BATCH, model=model)
    for batch in sampler:
        assert len(batch) == BATCH
        model(torch.zeros(1, 2)).sum().backward()
        sampler.step()
    assert len(sampler) == NUM_EXAMPLES // BATCH and sampler.changes == []
    assert sampler.weight == 1 / BATCH


def test_a_loader_that_draws_further_ahead_is_refused() -> None:
    model = nn.Linear(2, 2)
    sampler = SpeedSampler(NUM_EXAMPLES, global_batch_size=BATCH, model=model, ahead=1)
    batches = iter(sampler)
    next(batches), next(batches), next(batches)
    model(torch.zeros(1, 2)).sum().backward()
    with pytest.raises(UsageError, match=r"drawn 2 batches ahead: give the sampler ahead="):
        sampler.step()


@pytest.mark.parametrize("batch", [0, 201])
def test_batches_that_cannot_be_are_refused(batch: int) -> None:
    with pytest.raises(UsageError, match="must lie between the number of workers, 1, and the number of ex"):
        SpeedSampler(NUM_EXAMPLES, global_batch_size=batch, model=nn.Linear(1, 1))
