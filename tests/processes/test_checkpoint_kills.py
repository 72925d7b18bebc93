"""Runs killed at any moment leave a newest checkpoint that loads and is of one step throughout."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from forked_workers import start_workers

from forked import wait_for
from shoal.train.checkpoint import Checkpointer
from shoal.train.checkpoint_files import find_damage, list_checkpoints

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs forked workers")

NUM_KILLS = 12
SIZES = {"weights": 300_000, "first_moment": 300_000, "second_moment": 100_000, "count": 1}


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((size,), float(step)) for name, size in SIZES.items()}


def save_forever(rank: int, run_dir: Path, started: Path) -> None:
    checkpointer = Checkpointer(run_dir, keep=2)
    state = tensors_of(0)
    restored = checkpointer.restore(state)
    step = restored.step if restored else 0
    assert all(tensor.eq(step).all() for tensor in state.values())
    (started.with_name(f"{started.name}-{rank}")).touch()
    while True:
        step += 1
        for tensor in state.values():
            tensor.fill_(step)
        checkpointer.save(step, {**state, "progress": {"step": step}})
        for tensor in state.values():
            tensor.fill_(-step)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_kill_at_any_moment_leaves_a_whole_newest_checkpoint(tmp_path: Path, num_workers: int) -> None:
    chance = random.Random(7)
    last_step = 0
    for attempt in range(NUM_KILLS):
        started = tmp_path / f"started-{attempt}"
        processes = start_workers(
            save_forever, num_workers, tmp_path / f"meet-{attempt}", tmp_path / "run", started
        )
        end = time.monotonic() + 180
        while not all(started.with_name(f"{started.name}-{rank}").exists() for rank in range(num_workers)):
            assert time.monotonic() < end, "the workers did not start"
            assert all(process.is_alive() for process in processes)
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 0.3))
        for process in chance.sample(processes, len(processes)):
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
        assert set(wait_for(processes)) == {-signal.SIGKILL}

        found = list_checkpoints(tmp_path / "run")
        assert [find_damage(path) for path in found] == [None] * len(found)
        state = tensors_of(0)
        restored = Checkpointer(tmp_path / "run").restore(state)
        if restored is None:
            assert last_step == 0
            continue
        assert restored.step >= last_step
        assert restored.values == {"progress": {"step": restored.step}}
        for name, tensor in state.items():
            assert tensor.eq(restored.step).all(), f"{name} is not of step {restored.step}"
        last_step = restored.step
    assert last_step > NUM_KILLS, "the runs were killed before they saved anything: the test tests nothing"
    assert len(list_checkpoints(tmp_path / "run")) <= 3  # keep=2, and one whose deletion was cut off
    assert not list((tmp_path / "run" / "checkpoints").glob("*.tmp"))
