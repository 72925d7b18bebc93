"""Tests a store whose processes are killed and stopped at any moment."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from forked import fork_process
from shoal.comm.folder_store import FolderStore

NUM_ROUNDS = 4
LENGTH = 20_000
DEADLINE_S = 60


def open_store(folder: Path, timeout_s: float = DEADLINE_S) -> FolderStore:
    return FolderStore(folder / "store", timedelta(seconds=timeout_s))


def test_through_torchs_prefixes(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first, other = (PrefixStore(f"{name}/", PrefixStore("job/", store)) for name in ("first", "other"))
    assert not first.check(["key"])
    first.set("key", "1 value")
    assert first.get("key") == b"1 value" and first.check(["key"]) and not first.check(["key", "none"])
    assert not other.check(["key"])
    first.set("key", "")
    assert first.get("key") == b"" and first.check(["key"])
    assert [first.add("sum", amount) for amount in (0, 2, 3, 0, -1)] == [0, 2, 5, 5, 4]
    assert first.get("sum") == b"4"
    first.set("sum", "40")
    assert first.add("sum", 2) == 42
    assert first.compare_set("plan", "", "mine") == b"mine"
    assert first.compare_set("plan", "", "yours") == b"mine"
    assert first.compare_set("plan", "mine", "ours") == b"ours" == first.get("plan")
    assert first.compare_set("absent", "some", "ours") == b"" and not first.check(["absent"])
    assert first.clone().get("plan") == b"ours"


def test_a_key_that_comes_late_and_one_that_never_comes(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    threading.Timer(0.1, lambda: open_store(tmp_path).set("late", "came")).start()
    assert store.get("late") == b"came"
    prefixed = PrefixStore("job/", store)
    prefixed.set_timeout(timedelta(seconds=0.05))
    for wait in (
        lambda: prefixed.get("never"),
        lambda: prefixed.wait(["never"], timedelta(seconds=0.05)),
    ):
        with pytest.raises(
            dist.DistStoreError, match=r"timeout waiting for key job/+never in .* after 0\.05 s"
        ):
            wait()


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    (tmp_path / "store").rmdir()
    with pytest.raises(dist.DistStoreError, match=r"the job's store in .*store cannot be written: .*No such"):
        store.set("key", "value")
    assert not store.check(["key"])


def write(folder: Path) -> None:
    """Write without end, and count in a file of this process what the store has taken."""
    store = open_store(folder)
    with (folder / f"{os.getpid()}.added").open("wb", buffering=0) as added:
        for number in range(1 << 30):
            store.set("value", str(number % 10) * LENGTH)
            store.compare_set(f"plan/{number}", "", f"{os.getpid()} " * 1000)
            store.add("sum", 1)
            added.write(b"+")


def test_writers_that_are_killed_leave_whole_values(tmp_path: Path) -> None:
    """The last thing that each one has done may be in the sum and not in its file."""
    store = open_store(tmp_path)
    killed = []
    for _ in range(NUM_ROUNDS):
        before = store.add("sum", 0)
        writers = [fork_process(write, tmp_path) for _ in range(2)]
        until = time.monotonic() + DEADLINE_S
        while store.add("sum", 0) < before + 50:
            assert time.monotonic() < until
            value = store.get("value")
            assert value == value[:1] * LENGTH
        for writer in writers:
            writer.kill()
            writer.join(DEADLINE_S)
            assert writer.exitcode == -signal.SIGKILL
        killed += writers
    num_added = sum(path.stat().st_size for path in tmp_path.glob("*.added"))
    assert num_added <= store.add("sum", 0) <= num_added + len(killed)
    number = 0
    while store.check([f"plan/{number}"]):
        words = store.get(f"plan/{number}").split()
        assert len(words) == 1000 and len(set(words)) == 1
        number += 1
    assert number > 0


def test_a_writer_that_is_stopped_holds_nobody_up(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for _ in range(NUM_ROUNDS):
        writer = fork_process(write, tmp_path)
        assert writer.pid is not None
        before = store.add("sum", 0)
        until = time.monotonic() + DEADLINE_S
        while store.add("sum", 0) == before:
            assert time.monotonic() < until
        os.kill(writer.pid, signal.SIGSTOP)
        begun = time.monotonic()
        store.set("value", "mine")
        assert store.get("value") == b"mine"
        store.add("sum", 1)
        assert time.monotonic() - begun < 5
        writer.kill()
        writer.join(DEADLINE_S)
