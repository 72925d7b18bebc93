"""Tests the threads of a worker whose launcher has not shared out the cores of its host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shoal.env.settings import LAUNCH_DIR
from shoal.env.worker import WorkerRanks
from shoal.errors import ShoalError
from shoal.train import world
from shoal.train.world import THREADS, set_by_torchrun, share_of_cores, share_threads

TORCHRUN = {THREADS: "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
MANY = 1 << 20


@pytest.fixture(autouse=True)
def _same_threads_after() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def cores(host: str, *numbers: int) -> str:
    return f"{host} {sum(1 << number for number in numbers):x}"


@pytest.mark.parametrize(
    ("workers", "quota", "shares"),
    [
        ([cores("a", *range(8))] * 4, MANY, [2, 2, 2, 2]),
        ([cores("a", *range(7))] * 2, MANY, [3, 3]),
        ([cores("a", 0)] * 3, MANY, [1, 1, 1]),
        ([cores("a", 0, 1), cores("a", 2, 3, 4, 5)], MANY, [2, 4]),
        ([cores("a", *range(6)), cores("a", *range(6, 12))] * 3, MANY, [2] * 6),
        ([cores("a", *range(8)), cores("b", *range(8))], MANY, [4, 4]),
        ([cores("a", *range(64))] * 2, 6.0, [3, 3]),
        ([cores("a", *range(64))], 0.5, [1]),
    ],
    ids=["all", "odd", "one-core", "bound", "sockets", "hosts", "quota", "half"],
)
def test_cores_are_shared_by_those_who_may_use_them(
    workers: list[str], quota: float, shares: list[int]
) -> None:
    number = len(workers)
    if len({each.split()[0] for each in workers}) == number == 2:
        shares, number = [8, 8], 1  # a host for each
    assert [
        share_of_cores(rank, workers, num_local_workers=number, quota=quota) for rank in range(len(workers))
    ] == shares


@pytest.mark.parametrize("sent", ["a ff-", "", "host"])
def test_what_is_no_list_of_cores_is_refused(sent: str) -> None:
    with pytest.raises(ShoalError, match=r"a worker sent '.*' as its host and cores"):
        share_of_cores(0, [cores("a", 0), sent], num_local_workers=2, quota=MANY)


def test_torchruns_own_1_is_told_from_the_users(tmp_path: Path) -> None:
    without, given = tmp_path / "without", tmp_path / "given"
    without.write_bytes(b"HOME=/\0MY_OMP_NUM_THREADS=1\0")
    given.write_bytes(b"HOME=/\0OMP_NUM_THREADS=1\0")
    assert set_by_torchrun(TORCHRUN, without)
    assert not set_by_torchrun(TORCHRUN, given)
    assert not set_by_torchrun(TORCHRUN, tmp_path / "missing")
    assert not set_by_torchrun({THREADS: "1"}, without)
    assert not set_by_torchrun(TORCHRUN | {THREADS: "2"}, without)


@pytest.mark.parametrize(
    ("environ", "before", "after"),
    [
        (TORCHRUN, 1, 4),
        ({}, 8, 4),
        ({}, 3, 3),
        ({THREADS: "8"}, 8, 8),
        ({THREADS: "1"}, 1, 1),
        (TORCHRUN | {LAUNCH_DIR: "/run"}, 1, 1),
        (TORCHRUN, 3, 3),
    ],
    ids=["torchrun", "mpirun", "fewer", "chosen-8", "chosen-1", "shoal-launch", "set-before"],
)
def test_threads_are_set_and_said_once(
    environ: dict[str, str],
    before: int,
    after: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(world, "set_by_torchrun", lambda names: "TORCHELASTIC_USE_AGENT_STORE" in names)
    for rank in range(2):
        torch.set_num_threads(before)
        ranks = WorkerRanks(rank=rank, num_workers=2, local_rank=rank, num_local_workers=2)
        share_threads(ranks, 4, environ)
        assert torch.get_num_threads() == after
    reason = "torchrun had set 1" if environ else "torch would start 8"
    line = (
        f"shoal: 4 threads in each of 2 workers, its share of this host's cores ({reason}); "
        "OMP_NUM_THREADS sets another number\n"
    )
    assert capsys.readouterr().err == (line if after != before else "")
