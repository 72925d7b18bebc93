"""Tests collectives on device tensors against those on arrays, on a runtime of CUDA without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from benchmarks.memory_device import MemoryDevice
from torch import Tensor

from engine_group import engine_group, on_threads
from shoal.comm import arrays
from shoal.comm.device_tensors import DeviceTensors
from shoal.comm.engine import CommError, SingleProcessEngine
from shoal.comm.job_group import JobGroup
from shoal.env.worker import WorkerRanks

SHAPES = [(3, 4), (0,), (), (6, 30_000), (9,), (20_000,)]


def each(size: int, call: Callable[[JobGroup], Any]) -> list[Any]:
    def group_of(rank: int, engine: Any) -> JobGroup:
        ranks = WorkerRanks(rank=rank, num_workers=size, local_rank=rank, num_local_workers=size)
        return JobGroup(ranks, engine, 60.0)

    if size == 1:
        return [call(group_of(0, SingleProcessEngine()))]
    with engine_group(["a", "b", "a"][:size]) as group:
        return on_threads(size, lambda rank: call(group_of(rank, group.engines[rank])))


def values(rank: int, dtype: torch.dtype) -> list[Tensor]:
    random = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=random).mul(10).to(dtype) for shape in SHAPES]


@pytest.mark.parametrize(("size", "dtype"), [(1, torch.float32), (3, torch.float32), (3, torch.float16)])
def test_sums_have_the_bits_of_arrays(size: int, dtype: torch.dtype) -> None:
    def call(group: JobGroup) -> tuple[list[Tensor], list[Tensor], dict[str, int]]:
        plain, found = values(group.rank, dtype), values(group.rank, dtype)
        arrays.all_reduce(group, [each.numpy() for each in plain], "avg")
        tensors = DeviceTensors(MemoryDevice(seed=group.rank), group)
        tensors.all_reduce(found)
        counts = tensors.staging.lane.counters()
        tensors.close()
        return plain, found, counts

    for plain, found, counts in each(size, call):
        assert all(map(torch.equal, plain, found))
        assert counts["events"] <= 2 * counts["chunks"] and (counts["chunks"] == 0) == (size == 1)


def test_kernels_before_and_after_keep_their_order() -> None:
    def call(group: JobGroup) -> list[Tensor]:
        device, tensor, seen = MemoryDevice(seed=group.rank), torch.zeros(100_000), []
        tensors, compute = DeviceTensors(device, group), device.new_stream()
        with device.on(compute):
            for step in range(5):
                compute.call(partial(tensor.fill_, step + group.rank))
                tensors.all_reduce([tensor], "sum")
                compute.call(lambda: seen.append(tensor.clone()))
            compute.record_event().synchronize()
        tensors.close()
        return seen

    for seen in each(2, call):
        assert [set(each.tolist()) for each in seen] == [{2.0 * step + 1} for step in range(5)]


def test_ranks_that_differ_are_told() -> None:
    def call(group: JobGroup) -> str:
        tensors = DeviceTensors(MemoryDevice(), group)
        with pytest.raises(CommError) as caught:
            tensors.all_reduce([torch.ones(20_000 + group.rank)], "sum")
        tensors.close()
        return str(caught.value)

    assert all("do not agree" in said and "all_reduce" in said for said in each(2, call))
