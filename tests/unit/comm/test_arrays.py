"""Tests collectives on lists of NumPy arrays against NumPy's results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from engine_group import engine_group, on_threads
from shoal.comm import arrays
from shoal.comm.engine import EngineOptions, SingleProcessEngine
from shoal.comm.job_group import GlobalGroup, JobGroup
from shoal.env.worker import WorkerRanks
from shoal.errors import UsageError

SHAPES = [(3, 4), (0,), (), (6, 30_000), (9,)]


@contextmanager
def groups(size: int) -> Iterator[list[JobGroup]]:
    members = [
        WorkerRanks(rank=rank, num_workers=size, local_rank=rank, num_local_workers=size)
        for rank in range(size)
    ]
    if size == 1:
        yield [JobGroup(members[0], SingleProcessEngine(), 60.0)]
        return
    with engine_group(["a", "b", "a"][:size]) as group:
        yield [JobGroup(ranks, engine, 60.0) for ranks, engine in zip(members, group.engines, strict=True)]


def each(size: int, call: Callable[[JobGroup], Any]) -> list[Any]:
    with groups(size) as found:
        return on_threads(size, lambda rank: call(found[rank]))


def values(rank: int, dtype: str) -> list[Any]:
    random = np.random.default_rng(rank)
    return [np.asarray(random.integers(0, 50, shape)).astype(dtype) for shape in SHAPES]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "int32", "float16"])
def test_all_reduce_and_broadcast(size: int, dtype: str) -> None:
    def call(group: JobGroup) -> tuple[list[Any], list[Any]]:
        summed, sent = values(group.rank, dtype), values(group.rank, dtype)
        before = [id(array) for array in summed]
        arrays.all_reduce(group, summed, "sum")
        assert [id(array) for array in summed] == before
        arrays.broadcast(group, sent, size - 1)
        return summed, sent

    every = [values(rank, dtype) for rank in range(size)]
    for summed, sent in each(size, call):
        for place, array in enumerate(summed):
            assert np.array_equal(array, sum(leaves[place] for leaves in every))
            assert np.array_equal(sent[place], every[size - 1][place])


@pytest.mark.parametrize("size", [1, 3])
def test_parts(size: int) -> None:
    def call(group: JobGroup) -> tuple[Any, Any, Any]:
        mine = np.arange(6, dtype=np.int64).reshape(3, 2) + 10 * group.rank
        flags = arrays.all_gather(group, [np.array([group.rank == 1])])[0]
        return (
            arrays.all_gather(group, [mine])[0],
            arrays.reduce_scatter(group, [mine], "sum")[0],
            flags,
        )

    every = [np.arange(6).reshape(3, 2) + 10 * rank for rank in range(size)]
    for rank, (gathered, part, flags) in enumerate(each(size, call)):
        assert np.array_equal(gathered, every)
        rows = 3 // size
        assert np.array_equal(part, sum(every)[rank * rows : (rank + 1) * rows])
        assert flags.ravel().tolist() == [other == 1 for other in range(size)]


def test_what_is_refused() -> None:
    with groups(1) as (group,):
        with pytest.raises(TypeError, match="an array of dtype uint16 is not reduced over ranks; convert it"):
            arrays.all_reduce(group, [np.zeros(2, np.uint16)])
        with pytest.raises(ValueError, match="arrays must be contiguous"):
            arrays.all_reduce(group, [np.zeros((2, 2))[:, 0]])


def test_a_membership_is_joined_once() -> None:
    seen: list[Any] = []
    membership = GlobalGroup(
        "shoal.made",
        prepare=lambda: seen.append("prepare"),
        joined=lambda group: seen.append(group.size),
        finish=lambda: seen.append("finish"),
    )
    with pytest.raises(UsageError, match=r"shoal.made.init\(\) was not called"):
        membership.rank()
    membership.init()
    assert membership.is_initialized()
    assert (membership.rank(), membership.size(), membership.local_rank(), membership.local_size()) == (
        0,
        1,
        0,
        1,
    )
    membership.init()
    membership.init(timeout_s=membership.group().timeout_s)
    for other in ({"options": EngineOptions()}, {"timeout_s": 5.0}):
        with pytest.raises(UsageError, match=r"shoal.made.init\(\) was called before, with timeout_s="):
            membership.init(**other)
    membership.shutdown()
    membership.shutdown()
    assert seen == ["prepare", 1, "finish"] and not membership.is_initialized()
