"""Trains with shares of the batch by the speed of the workers, and repeats recorded shares to the bit."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from job_workers import run_script
from torch import Tensor, nn
from torch.utils.data import DataLoader

from shoal.env.worker import WorkerEnv
from shoal.errors import EXIT_OK, EXIT_STOPPED, EXIT_USAGE
from shoal.record import Shares, Step, read_record
from shoal.train.config import DistributedConfig, LoopConfig, RunConfig
from shoal.train.run import Run, Sizes

BATCH, TOTAL = 48, 30
SLOW = {0: 1.5e-3, 1: 4.5e-3}
"""Seconds per sample of each worker: worker 1 has a third of the speed of worker 0."""


class Points:
    """Points of the plane and whether they are in the unit circle."""

    def __init__(self) -> None:
        self.points = torch.randn(200, 2, generator=torch.Generator().manual_seed(3))
        self.inside = (self.points.norm(dim=1) < 1).long()

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.points[index], self.inside[index], index


def script(
    directory: Path,
    worker: WorkerEnv,
    *,
    shares: str = "by-speed",
    slow: Mapping[int, float] = SLOW,
    batch: int = BATCH,
    norm: bool = False,
    loader: bool = False,
    average: bool = True,
    signal_at: int = 0,
) -> int:
    settings = RunConfig(name="test", log_frequency=1, checkpoint_frequency=1_000)
    rank = worker.ranks.rank
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16) if norm else nn.Tanh(), nn.Linear(16, 2))
    with Run.open(
        directory, settings=settings, loop=LoopConfig(seed=5), worker=worker,
        distributed=DistributedConfig(shares=shares),
    ) as run:  # fmt: skip
        model = run.data_parallel(module, average=average)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        run.keep(model=module, optimizer=optimizer)
        data: Any = DataLoader(Points(), batch_size=8) if loader else Points()
        seen = (directory / f"samples-{rank}.txt").open("a")
        for step in run.steps(data, Sizes(global_batch_size=batch, micro_batch_size=8), until=TOTAL):
            with step:
                for points, inside, indices in step:
                    loss = F.cross_entropy(model(points), inside, reduction="sum")
                    time.sleep(slow.get(rank, 0.0) * len(points))
                    step.backward(loss / step.num_samples)
                    print(step.number, *indices.tolist(), file=seen)
                step.update(optimizer)
            if step.number == signal_at:
                os.kill(os.getpid(), signal.SIGTERM)
        seen.close()
        return run.finish(lambda directory: torch.save(module.state_dict(), directory / "model.pt"))


def train(directory: Path, num_workers: int = 2, **options: Any) -> list[int | None]:
    return run_script(script, directory, num_workers, **options)


def losses(directory: Path) -> list[float]:
    return [row.loss for row in read_record(directory) if isinstance(row, Step)]


def changes(directory: Path) -> list[tuple[int, list[int]]]:
    return [(row.step, row.samples) for row in read_record(directory) if isinstance(row, Shares)]


def samples(directory: Path, num_workers: int = 2) -> dict[int, list[list[int]]]:
    """Return, per step, the samples of each worker in order."""
    found: dict[int, list[list[int]]] = {}
    for rank in range(num_workers):
        for line in (directory / f"samples-{rank}.txt").read_text().splitlines():
            step, *indices = map(int, line.split())
            found.setdefault(step, [[] for _ in range(num_workers)])[rank] += indices
    return found


def same_weights(one: Path, other: Path) -> bool:
    a, b = (torch.load(run / "model.pt", weights_only=True) for run in (one, other))
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def by_speed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("by-speed") / "run"
    assert train(directory) == [EXIT_OK, EXIT_OK]
    return directory


@pytest.fixture(scope="module")
def equal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("equal") / "run"
    assert train(directory, shares="equal", slow={}) == [EXIT_OK, EXIT_OK]
    return directory


def test_a_slow_worker_gets_its_part_of_each_batch(by_speed: Path) -> None:
    found = changes(by_speed)
    assert 1 <= len(found) <= 2
    assert all(sum(shares) == BATCH for _, shares in found)
    assert 10 <= found[-1][1][1] <= 15, found  # 12 of 48
    (row, *_) = (row for row in read_record(by_speed) if isinstance(row, Shares))
    slept = [BATCH / 2 * SLOW[rank] for rank in range(2)]  # of equal shares; no sleep is shorter than asked
    assert all(seconds >= least for seconds, least in zip(row.seconds, slept, strict=True)), row.seconds
    assert row.seconds[1] > row.seconds[0]


def test_the_record_has_who_computed_what(by_speed: Path) -> None:
    shares = {1: [BATCH // 2] * 2} | dict(changes(by_speed))
    for step, of_workers in samples(by_speed).items():
        expected = shares[max(first for first in shares if first <= step)]
        assert list(map(len, of_workers)) == expected, step


def test_steps_have_the_same_samples_and_losses_as_with_equal_shares(by_speed: Path, equal: Path) -> None:
    mine, theirs = samples(by_speed), samples(equal)
    assert list(mine) == list(theirs) == list(range(1, TOTAL + 1))
    assert all([*chain(*mine[step])] == [*chain(*theirs[step])] for step in mine)
    assert losses(by_speed) == pytest.approx(losses(equal), rel=1e-6)
    assert changes(equal) == []


def test_recorded_shares_are_repeated_to_the_bit(by_speed: Path, tmp_path: Path) -> None:
    assert train(tmp_path / "run", shares=str(by_speed), slow={}) == [EXIT_OK, EXIT_OK]
    assert changes(tmp_path / "run") == changes(by_speed)
    assert losses(tmp_path / "run") == losses(by_speed)
    assert same_weights(tmp_path / "run", by_speed)


def test_a_run_that_continues_keeps_its_shares(tmp_path: Path) -> None:
    assert train(tmp_path, signal_at=16) == [EXIT_STOPPED] * 2
    before = changes(tmp_path)
    assert before
    assert train(tmp_path) == [EXIT_OK, EXIT_OK]
    assert list(map(len, samples(tmp_path)[17])) == before[-1][1]
    assert train(tmp_path / "again", shares=str(tmp_path), slow={}) == [EXIT_OK, EXIT_OK]
    assert same_weights(tmp_path, tmp_path / "again")


def test_a_run_that_continues_with_other_numbers_of_workers_has_the_same_batches(
    equal: Path, tmp_path: Path
) -> None:
    for num_workers, signal_at in ((3, 7), (1, 13), (2, 0)):
        slow = {0: 1e-3, 1: 3e-3}
        codes = train(tmp_path, num_workers=num_workers, slow=slow, signal_at=signal_at)
        assert codes == [EXIT_STOPPED if signal_at else EXIT_OK] * num_workers
    mine, theirs = samples(tmp_path, 3), samples(equal)
    assert list(mine) == list(theirs) == list(range(1, TOTAL + 1))
    assert all([*chain(*mine[step])] == [*chain(*theirs[step])] for step in mine)
    assert losses(tmp_path) == pytest.approx(losses(equal), rel=1e-6)


def test_workers_of_one_speed_keep_equal_shares(tmp_path: Path) -> None:
    assert train(tmp_path, slow={0: 1e-3, 1: 1e-3}) == [EXIT_OK, EXIT_OK]
    assert all(max(shares) - min(shares) <= 8 for _, shares in changes(tmp_path))


def test_batch_normalization_gets_whole_micro_batches(tmp_path: Path) -> None:
    assert train(tmp_path, norm=True) == [EXIT_OK, EXIT_OK]
    assert changes(tmp_path)[-1][1] in ([40, 8], [32, 16])


def test_three_workers_share_in_the_order_of_their_ranks(tmp_path: Path) -> None:
    assert train(tmp_path, num_workers=3, slow={0: 3e-3, 1: 1e-3, 2: 1e-3}) == [EXIT_OK] * 3
    ends = list(accumulate(changes(tmp_path)[-1][1]))
    last = samples(tmp_path, 3)[TOTAL]
    whole = [*chain(*last)]
    assert [whole[begin:end] for begin, end in zip([0, *ends], ends, strict=False)] == last
    assert len(last[0]) < min(len(last[1]), len(last[2]))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"loader": True}, "needs data whose order the run decides, not a DataLoader"),
        ({"average": False}, "use --optim.clip global"),
        ({"shares": "by_speed"}, "shares by_speed is neither equal nor by-speed nor the directory of a run"),
    ],
)
def test_what_cannot_be_divided_is_one_clear_error(
    options: dict[str, Any], text: str, tmp_path: Path
) -> None:
    assert train(tmp_path, **options) == [EXIT_USAGE] * 2
    assert text in (tmp_path / "worker-0.log").read_text()


def test_shares_of_another_batch_are_refused(by_speed: Path, tmp_path: Path) -> None:
    assert train(tmp_path, shares=str(by_speed), batch=96) == [EXIT_USAGE] * 2
    said = (tmp_path / "worker-0.log").read_text()
    assert "batches of 48 samples among 2 workers, and this one has batches of 96 and 2 workers" in said
