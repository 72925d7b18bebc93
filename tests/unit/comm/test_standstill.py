"""Tests that a process that stands still is noticed, and that nobody is suspected without a store."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist

from shoal.comm.members import StandstillWatch

DEADLINE_S = 120


def test_a_process_that_counts_no_further_is_silent(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), -1)
    store.set("beat/still", "7")
    noticed: list[frozenset[str]] = []
    is_noticed = threading.Event()

    def notice(silent: frozenset[str]) -> None:
        noticed.append(silent)
        is_noticed.set()

    watch = StandstillWatch(store, "own", 0.2, notice)
    try:
        watch.follow(["own", "still"])
        assert is_noticed.wait(DEADLINE_S)
        assert noticed == [frozenset({"still"})]
        watch.follow(["own"])
        assert watch.silent == frozenset()
    finally:
        watch.close()


class LostStore:
    """A store whose host cannot be reached."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.has_been_asked = threading.Event()

    def clone(self) -> Self:
        return self

    def set(self, *_: Any) -> None:
        self.num_calls += 1
        if self.num_calls == 40:  # four times the patience
            self.has_been_asked.set()
        raise dist.DistNetworkError("the store's host is gone")


def test_nobody_is_suspected_without_the_store() -> None:
    store = LostStore()
    noticed: list[frozenset[str]] = []
    watch = StandstillWatch(store, "own", 0.1, noticed.append)
    try:
        watch.follow(["other"])
        assert store.has_been_asked.wait(DEADLINE_S)
        assert noticed == [] and watch.silent == frozenset()
    finally:
        watch.close()
