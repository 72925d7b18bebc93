"""Tests recipes whose workers come and go: their losses are those of a run whose workers stay."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import job_workers
import pytest
import torch.distributed as dist
from pretrain_jobs import (
    losses,
    prepare_small,
    run,
    small_bert_config,
    small_config,
    wait,
    wait_for_step,
)

from forked import fork_process
from shoal import record
from shoal.env.worker import MEMBERS, WorkerEnv, WorkerRanks
from shoal.errors import EXIT_LOST, EXIT_STOPPED
from shoal.recipes.albert import AlbertConfig
from shoal.train.run import Run
from shoal.train.step import Step

pytestmark = pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"), reason="this torch has no groups whose members change"
)
NUM_WORKERS = 3
KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_small(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def expected(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Return the losses of a run whose workers stay."""
    config = small_config(text, tmp_path_factory.mktemp("fixed") / "run")
    assert run(config, NUM_WORKERS) == [0, 0, 0]
    return losses(config.run.dir)


def elastic_config(text: Path, run_dir: Path, **distributed: Any) -> AlbertConfig:
    return small_config(text, run_dir, distributed={"elastic": "1:3", "worker_patience_s": 30, **distributed})


def start(
    config: Any,
    rank: int,
    *,
    dies: tuple[int, str] = (0, ""),
    by: signal.Signals = signal.SIGKILL,
    awaits: tuple[int, int] = (0, 0),
) -> BaseProcess:
    """Start a worker.

    Args:
        dies: step and place, a method of ``Step`` or ``Run``, in which it sends itself a signal.
        by: the signal.
        awaits: step before which it waits until so many processes have asked to take part.
    """
    return fork_process(_work, config, rank, dies, by, awaits)


def _work(config: Any, rank: int, dies: tuple[int, str], by: signal.Signals, awaits: tuple[int, int]) -> None:

    def before(step: Step, *_: Any) -> None:
        members = step._training.world.members
        assert members is not None
        while step.number == awaits[0] and members.is_first and members.num_waiting() < awaits[1]:
            time.sleep(0.01)

    def die(at: Step | Run, *_: Any) -> None:
        if dies[0] == (at.number if isinstance(at, Step) else at.step):
            os.kill(os.getpid(), by)

    _before(Step, "__enter__", before)
    if dies[1]:
        _before(Step if hasattr(Step, dies[1]) else Run, dies[1], die)
    ranks = WorkerRanks(rank=rank, num_workers=NUM_WORKERS, local_rank=rank, num_local_workers=NUM_WORKERS)
    store = config.run.dir.parent / "store"
    worker = WorkerEnv(ranks=ranks, master_addr="127.0.0.1", master_port=0, launcher="test", store_file=store)
    job_workers._work(partial(job_workers._run_recipe, config), config.run.dir, worker)


def _before(kind: type, name: str, action: Callable[..., None]) -> None:
    """Call an action before a method."""
    method = getattr(kind, name)

    def both(*args: Any, **kwargs: Any) -> Any:
        action(*args)
        return method(*args, **kwargs)

    setattr(kind, name, both)


def logs(config: Any) -> str:
    return "\n".join(path.read_text()[-3000:] for path in sorted(config.run.dir.glob("*.log")))


def changes(config: Any) -> list[tuple[int, int]]:
    rows = record.read_record(config.run.dir)
    return [(row.num_before, row.num_workers) for row in rows if isinstance(row, record.Members)]


def slow(*values: Any) -> Any:
    """Return a case whose quick equal is that with the other worker, which is lost at the same place."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("place", "lost"),
    [
        ("backward", 0), ("update", 1), ("sum_figures", 0),
        slow("backward", 1), slow("update", 0), slow("sum_figures", 1),
    ],
)  # fmt: skip
def test_a_lost_worker_costs_no_sample(
    place: str, lost: int, text: Path, expected: dict[int, float], tmp_path: Path
) -> None:
    config = elastic_config(text, tmp_path / "run")
    workers = [
        start(config, rank, dies=(4, place) if rank == lost else (0, "")) for rank in range(NUM_WORKERS)
    ]
    codes = wait(workers)
    assert codes == [KILLED if rank == lost else 0 for rank in range(NUM_WORKERS)], logs(config)
    assert losses(config.run.dir) == pytest.approx(expected, rel=1e-6)
    assert changes(config) == [(3, 2)]


@pytest.mark.parametrize("lost", [0, 2])
def test_a_worker_is_lost_and_comes_back(
    lost: int, text: Path, expected: dict[int, float], tmp_path: Path
) -> None:
    config = elastic_config(text, tmp_path / "run")
    workers = [
        start(config, rank, dies=(3, "backward") if rank == lost else (0, ""), awaits=(7, 1))
        for rank in range(NUM_WORKERS)
    ]
    workers[lost].join()
    plant_half_a_record(config.run.dir.parent)
    again = start(config, lost)
    codes = wait([*workers, again])
    assert codes == [*(KILLED if rank == lost else 0 for rank in range(NUM_WORKERS)), 0], logs(config)
    assert losses(config.run.dir) == pytest.approx(expected, rel=1e-6)
    assert changes(config) == [(3, 2), (2, 3)]


def test_nobody_is_left_to_take_a_worker_in(text: Path, tmp_path: Path) -> None:
    config = elastic_config(text, tmp_path / "run")
    workers = [start(config, rank, dies=(4, "backward")) for rank in range(NUM_WORKERS)]
    assert wait(workers) == [KILLED] * NUM_WORKERS, logs(config)
    config = elastic_config(text, tmp_path / "run", worker_patience_s=1)
    assert wait([start(config, 1)]) == [1]
    assert "were lost, all of them" in logs(config)


def plant_half_a_record(folder: Path) -> None:
    """Leave what a worker leaves that is killed while it writes to the store: a length, and half of a key."""
    record = (1000).to_bytes(8, "little") + b"half a key"
    with (folder / "store").open("ab") as file:
        file.write(record)
    (folder / f"store{MEMBERS}" / "new-half").write_bytes(record)


@pytest.mark.parametrize("lost", [0, slow(1)])
def test_a_worker_that_stands_still_is_given_up(
    lost: int, text: Path, expected: dict[int, float], tmp_path: Path
) -> None:
    config = elastic_config(text, tmp_path / "run", worker_patience_s=8)
    workers = [
        start(config, rank, dies=(4, "backward") if rank == lost else (0, ""), by=signal.SIGSTOP)
        for rank in range(NUM_WORKERS)
    ]
    others = [worker for rank, worker in enumerate(workers) if rank != lost]
    assert wait(others) == [0, 0], logs(config)
    pid = workers[lost].pid
    assert pid is not None
    os.kill(pid, signal.SIGCONT)
    assert wait([workers[lost]]) == [EXIT_LOST], logs(config)
    assert "the others went on without this process" in logs(config)
    assert losses(config.run.dir) == pytest.approx(expected, rel=1e-6)
    assert changes(config) == [(3, 2)]


@pytest.mark.parametrize(
    ("step", "place", "lost"),
    [
        (6, "evaluation", 0), (12, "lacks_scores", 1), (12, "finish", 0),
        slow(6, "evaluation", 1), slow(12, "lacks_scores", 0), slow(12, "finish", 1),
    ],
)  # fmt: skip
def test_a_worker_is_lost_between_steps(
    step: int, place: str, lost: int, text: Path, expected: dict[int, float], tmp_path: Path
) -> None:
    config = elastic_config(text, tmp_path / "run")
    workers = [
        start(config, rank, dies=(step, place) if rank == lost else (0, "")) for rank in range(NUM_WORKERS)
    ]
    codes = wait(workers)
    assert codes == [KILLED if rank == lost else 0 for rank in range(NUM_WORKERS)], logs(config)
    rows = record.read_record(config.run.dir)
    assert losses(config.run.dir) == pytest.approx(expected, rel=1e-6)
    assert {row.step for row in rows if isinstance(row, record.Evaluation)} == {6, 12}
    assert [row.step for row in rows if isinstance(row, record.End)] == [12]
    assert (config.run.dir / "transformers" / "model.safetensors").is_file()
    assert changes(config) == [(3, 2)]


@pytest.mark.parametrize("lost", [0, slow(2)])
def test_phases_with_a_worker_that_is_lost_and_comes_back(lost: int, text: Path, tmp_path: Path) -> None:
    fixed = small_bert_config(text, tmp_path / "fixed")
    assert run(fixed, 1) == [0]
    config = small_bert_config(
        text, tmp_path / "run", distributed={"elastic": "1:3", "worker_patience_s": 30}
    )
    workers = [
        start(config, rank, dies=(3, "backward") if rank == lost else (0, ""), awaits=(11, 1))
        for rank in range(NUM_WORKERS)
    ]
    workers[lost].join()
    wait_for_step(config.run.dir, 9, workers)
    again = start(config, lost)
    codes = wait([*workers, again])
    assert codes == [*(KILLED if rank == lost else 0 for rank in range(NUM_WORKERS)), 0], logs(config)
    assert losses(config.run.dir) == pytest.approx(losses(fixed.run.dir), rel=1e-6)
    assert changes(config) == [(3, 2), (2, 3)]


@pytest.mark.parametrize("asked", [0, 1])
def test_a_worker_that_is_asked_to_stop_leaves(
    asked: int, text: Path, expected: dict[int, float], tmp_path: Path
) -> None:
    config = elastic_config(text, tmp_path / "run")
    workers = [
        start(config, rank, dies=(4, "backward") if rank == asked else (0, ""), by=signal.SIGTERM)
        for rank in range(NUM_WORKERS)
    ]
    codes = wait(workers)
    assert codes == [EXIT_STOPPED if rank == asked else 0 for rank in range(NUM_WORKERS)], logs(config)
    assert losses(config.run.dir) == pytest.approx(expected, rel=1e-6)
    assert changes(config) == [(3, 2)]
    rows = record.read_record(config.run.dir)
    assert not any(isinstance(row, record.Stop) for row in rows)
