"""A save that is killed at any of its system calls leaves the checkpoint before it, or the new one, whole."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forked import fork_process
from shoal.train.checkpoint import Checkpointer
from shoal.train.checkpoint_files import list_checkpoints

KILLED = 9
CALLS = (
    "open",
    "os.rename",
    "os.mkdir",
    "os.remove",
    "os.rmdir",
    "os.listdir",
    "os.scandir",
    "shutil.rmtree",
)
"""Events of Python's audit; it has none for fsync."""


def a_state(step: int) -> dict[str, Any]:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
    return {"model": model, "progress": {"step": step}}


def save(run_dir: Path, step: int, killed_at: int) -> None:
    """Save in a process that ends at a system call below the folder, or at the end of the save."""
    checkpointer, count = Checkpointer(run_dir, keep=1), itertools.count(1)

    def called() -> None:
        if next(count) == killed_at:
            os._exit(KILLED)

    def audited(event: str, arguments: tuple[Any, ...]) -> None:
        if event in CALLS and str(run_dir) in str(arguments[0]):
            called()

    fsync = os.fsync

    def counted_fsync(file: int) -> None:
        called()
        fsync(file)
        called()

    os.fsync = counted_fsync  # type: ignore[assignment]
    sys.addaudithook(audited)
    checkpointer.save(step, a_state(step), wait=True)
    os._exit(0)


def restored(run_dir: Path) -> tuple[int, bool]:
    """Return the step of the checkpoint that is found, and whether all of it is of that step."""
    state = a_state(0)
    found = Checkpointer(run_dir, keep=1).restore(state)
    assert found is not None
    step = found.values["progress"]["step"]
    return step, all(bool((p == step).all()) for p in state["model"].parameters()) and found.step == step


def kill_at_each_call(folder: Path) -> None:
    torch.set_num_threads(1)
    Checkpointer(folder / "base", keep=1).save(1, a_state(1), wait=True)
    found = []
    for number in itertools.count(1):
        run_dir = folder / f"run-{number}"
        shutil.copytree(folder / "base", run_dir)
        if not (pid := os.fork()):
            save(run_dir, 2, number)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        step, is_whole = restored(run_dir)
        Checkpointer(run_dir, keep=1).save(3, a_state(3), wait=True)
        names = [path.name for path in list_checkpoints(run_dir)]
        found.append(
            {"code": code, "step": step, "is_whole": is_whole, "next": restored(run_dir), "names": names}
        )
        if code != KILLED:
            break
    (folder / "found.json").write_text(json.dumps(found))


def test_a_save_killed_at_any_call_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    parent = fork_process(kill_at_each_call, tmp_path)
    parent.join(200)
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) > 10 and [one["code"] for one in found] == [KILLED] * (len(found) - 1) + [0]
    steps = [one["step"] for one in found]
    assert set(steps) == {1, 2} and steps == sorted(steps)  # the new one once it is there
    for one in found:
        assert one["is_whole"] and one["next"] == [3, True] and len(one["names"]) == 1, one
