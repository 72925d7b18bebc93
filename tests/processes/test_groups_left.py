"""Tests ranks that leave a group by drop, exit or abort: the others raise an error at once."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.memory_device import MemoryDevice
from shoal_workers import thread_names

from forked import fork_process, wait_for
from shoal.comm.backend import ShoalProcessGroup
from shoal.comm.engine import CommError

LIMIT_S = 20.0
"""The time that operations may take: what the others wait today if nobody tells them."""
BOUND_S = 3 * 1.0
SIZE = 3
LEAVES = 1


def make(folder: Path, rank: int, size: int = SIZE, name: str = "first") -> ShoalProcessGroup:
    """Make a group directly, as torchft does; nothing else refers to it."""
    store = dist.PrefixStore(name, dist.FileStore(str(folder / "store"), -1))
    return ShoalProcessGroup(store, rank, size, timedelta(seconds=LIMIT_S), name, list(range(size)))


def run(function: Callable[..., None], folder: Path, *args: Any, size: int = SIZE) -> None:
    processes = [fork_process(function, rank, folder, *args) for rank in range(size)]
    assert wait_for(processes, 2 * LIMIT_S) == [0] * size


def ones() -> torch.Tensor:
    return torch.ones(100_000)


def use(group: ShoalProcessGroup, rank: int, how: str) -> None:
    """Use what starts threads that could keep the group, or what is under way when it is dropped."""
    if how == "a future":
        group.allreduce([ones()]).get_future().wait()
    elif how == "messages":
        tensor = ones()
        if rank < 2:
            (group.send([tensor], 1, 0) if rank == 0 else group.recv([tensor], 0, 0)).wait()
    elif how == "staging":
        device = MemoryDevice()
        group.devices["cpu"] = lambda place: device
        group.allreduce([ones()]).wait()
        del group.devices["cpu"]
    elif how == "many tensors":
        group.allreduce_coalesced([ones(), ones()]).wait()
    else:
        group.barrier().wait()
    if how == "a sum under way" and rank == LEAVES:
        group.allreduce([ones()])


def drop(rank: int, folder: Path, how: str) -> None:
    gc.disable()  # nothing refers to itself: the group ends when it is dropped
    group = make(folder, rank)
    use(group, rank, how)
    if rank == LEAVES:
        time.sleep(0.2)  # the others wait
        (folder / "left").write_text(str(time.monotonic()))
        seen = weakref.ref(group)
        del group
        assert seen() is None
        end = time.monotonic() + LIMIT_S
        while len(list(folder.glob("told-*"))) < SIZE - 1 and time.monotonic() < end:
            time.sleep(0.01)  # it lives on: it is not its end that they hear
        return
    with pytest.raises(CommError, match=r"rank 1 \(127.0.0.1, pid \d+\) has left the group") as error:
        for _ in range(2):
            group.allreduce([ones()]).wait()
    late_s = time.monotonic() - float((folder / "left").read_text())
    (folder / f"told-{rank}").touch()
    assert late_s < BOUND_S, f"{late_s:.1f} s: {error.value}"


HOW = ["a barrier", "a future", "messages", "staging", "many tensors", "a sum under way"]


@pytest.mark.parametrize("how", HOW)
def test_a_group_that_is_dropped_is_left(tmp_path: Path, how: str) -> None:
    run(drop, tmp_path, how)


def collect_under_a_lock(rank: int, folder: Path) -> None:
    """Collect a group where a thread cannot be started nor waited for: under the lock of Python's threads."""
    group = make(folder, rank, size=2)
    group.allreduce([ones()]).get_future().wait()
    group.cycle = group  # type: ignore[attr-defined]
    seen = weakref.ref(group)
    del group
    while seen() is not None:  # a moment after a future's result its thread still has the work
        with threading._active_limbo_lock:  # type: ignore[attr-defined]
            gc.collect()
    while thread_names().count("shoal-futures"):
        time.sleep(0.01)  # ended, soon, by another thread


def test_garbage_may_be_collected_under_any_lock(tmp_path: Path) -> None:
    run(collect_under_a_lock, tmp_path, size=2)


EXITS = {"": 0, "sys.exit(3)": 3, "raise ValueError('an error of the program')": 1}
# Forks an interpreter for each end, one after the other: loading torch takes longer than the rest.
EXIT = """
import os, sys
from pathlib import Path
sys.path[:0] = {path!r}
from test_groups_left import EXITS, make, ones
for number, (end, code) in enumerate(EXITS.items()):
    if (child := os.fork()) == 0:
        group = make(Path({folder!r}, str(number)), 1)
        group.allreduce([ones()]).wait()
        exec(end)
        break
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code, end
"""


def wait_for_the_one_who_exits(rank: int, folder: Path) -> None:
    group = make(folder, rank)
    group.allreduce([ones()]).wait()
    begin = time.monotonic()
    with pytest.raises(
        CommError, match=r"rank 1 \(127.0.0.1, pid \d+\) has left the group after 1 operations"
    ):
        group.allreduce([ones()]).wait()
    assert time.monotonic() - begin < BOUND_S


def test_an_interpreter_that_exits_leaves_its_groups(tmp_path: Path) -> None:
    program = EXIT.format(path=sys.path, folder=str(tmp_path))
    folders = [tmp_path / str(number) for number in range(len(EXITS))]
    for folder in folders:
        folder.mkdir()
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        for folder in folders:
            others = [fork_process(wait_for_the_one_who_exits, rank, folder) for rank in (0, 2)]
            assert wait_for(others, 2 * LIMIT_S) == [0, 0]
        _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    assert said.count("Traceback") == said.count("ValueError: an error of the program") == 1, said


def reconfigure(rank: int, folder: Path, how: str) -> None:
    """End the group when a rank fails and make a smaller one, as torchft does."""
    group = make(folder, rank)
    group.allreduce([ones()]).wait()
    (folder / f"summed-{rank}").touch()
    if rank == 2:
        # An abort ends an operation that is complete here and not yet on the others.
        while not all((folder / f"summed-{other}").exists() for other in (0, 1)):
            time.sleep(0.01)
        if how == "abort":
            group.abort()
        else:
            group.shutdown()
        del group
        gc.collect()
        time.sleep(1.0)
        return
    with pytest.raises(CommError, match=r"rank 2 .*(aborted it|has left)"):
        group.allreduce([ones()]).wait()
    group.abort()
    group = make(folder, rank, size=2, name="second")
    tensor = ones() * (1 + rank)
    group.allreduce([tensor]).wait()
    assert torch.equal(tensor, 3 * ones())
    group.shutdown()


@pytest.mark.parametrize("how", ["abort", "shutdown"])
def test_a_smaller_group_begins_where_a_rank_was_lost(tmp_path: Path, how: str) -> None:
    run(reconfigure, tmp_path, how)
