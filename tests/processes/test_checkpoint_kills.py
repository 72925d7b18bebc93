"""Runs killed at any moment leave a newest checkpoint that loads and is of one step throughout."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_workers import start_workers

from forked import fork_process, wait_for
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

    # A run killed between a save and its deletions leaves one more than is kept; a save that ends does not.
    Checkpointer(tmp_path / "run", keep=2).save(last_step + 1, tensors_of(last_step + 1), wait=True)
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert len(kept) == 2 and kept[-1] == f"step-{last_step + 1:08}"


# --------------------------------------------------------------------- a kill before each operation in turn

OPERATIONS = ("rename", "replace", "fsync", "unlink", "rmdir", "mkdir")
STEP, OLD, NEW = 5, 1.0, 2.0


def filled(value: float) -> dict[str, Any]:
    return {"weights": torch.full((100,), value), "progress": {"value": value}}


def restored_value(run_dir: Path) -> float:
    """Return what the next start finds, which must be of one save throughout and in its place."""
    state = filled(0.0)
    restored = Checkpointer(run_dir).restore(state)
    assert restored is not None, f"nothing is left of {sorted(run_dir.rglob('*'))}"
    value = restored.values["progress"]["value"]
    assert restored.step == STEP and restored.damaged == []
    assert state["weights"].eq(value).all()
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == [f"step-{STEP:08}"]
    return float(value)


def die_at(operation: int) -> None:
    """Let this process be killed just before its n-th operation on the file system from now on."""
    num_done = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal num_done
            num_done += 1
            if num_done == operation:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return call

    for name in OPERATIONS:
        setattr(os, name, counted(getattr(os, name)))


def save_again(run_dir: Path, dying_at: int) -> None:
    checkpointer = Checkpointer(run_dir)
    die_at(dying_at)
    checkpointer.save(STEP, filled(NEW), wait=True)


def start_again(run_dir: Path, dying_at: int) -> None:
    die_at(dying_at)
    Checkpointer(run_dir)


def killed_at_each_operation(
    before: Path, after: Path, function: Callable[[Path, int], None]
) -> list[tuple[int, Path]]:
    """Run ``function`` on copies of ``before``, killed at its first, second, … operation, until it ends."""
    left = []
    for operation in range(1, 100):
        run_dir = after / str(operation)
        shutil.copytree(before, run_dir)
        (exit_code,) = wait_for([fork_process(function, run_dir, operation)])
        left.append((operation, run_dir))
        if exit_code == 0:
            return left
        assert exit_code == -signal.SIGKILL
    raise AssertionError("it has no end")


def test_a_step_that_is_saved_again_is_there_at_any_moment(tmp_path: Path) -> None:
    Checkpointer(tmp_path / "run").save(STEP, filled(OLD), wait=True)
    left = killed_at_each_operation(tmp_path / "run", tmp_path / "saving", save_again)
    without_name = [
        run_dir for _, run_dir in left if not (run_dir / "checkpoints" / f"step-{STEP:08}").exists()
    ]
    start = tmp_path / "start"
    shutil.copytree(without_name[0], start)

    values = [restored_value(run_dir) for _, run_dir in left]
    assert set(values) == {OLD, NEW} and values == sorted(values)
    assert len(left) > 8 and len(without_name) == 1, "the kills did not come where the test means them to"

    # and while the next start puts the one without a name back in its place
    left = killed_at_each_operation(start, tmp_path / "starting", start_again)
    assert len(left) > 4
    assert [restored_value(run_dir) for _, run_dir in left] == [NEW] * len(left)
