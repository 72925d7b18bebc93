"""Tests the copy pipeline with CPU tensors: order with the caller's stream, futures, training, errors."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shoal_workers import exit_codes, run_group
from staged_group import PYTHON_GROUP, device_of, small_pieces, staged
from test_backend_work import raises
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.engine import CommError
from shoal.comm.hooks import bf16_wire
from shoal.errors import UsageError


def check_order(rank: int) -> None:
    with staged() as side:
        device = device_of(side)
        stream, late = device.new_stream(), device.new_stream()
        tensor, seen = torch.zeros(1000), torch.zeros(1000)
        with device.on(stream):
            for step in range(3):
                stream.call(lambda: time.sleep(0.02))
                stream.call(lambda step=step: tensor.fill_(step + rank))  # type: ignore[misc]
                side.pipeline._h2d.call(lambda: time.sleep(0.02))
                work: Any = dist.all_reduce(tensor, async_op=True)
                work.wait()
                stream.call(lambda: seen.copy_(tensor))
                stream.record_event().synchronize()
                assert (seen == 2 * step + 1).all()
                assert work.is_completed() and work.is_success()
        # many under way at once, waited for from behind; each thread's wait is for its own stream
        tensors = [torch.full((700,), float(rank + i)) for i in range(20)]
        works: list[Any] = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        with device.on(late):
            for i, work in reversed(list(enumerate(works))):
                work.wait()
                late.call(lambda i=i: tensors[i].mul_(2))  # type: ignore[misc]
        late.record_event().synchronize()
        assert [set(tensor.tolist()) for tensor in tensors] == [{2.0 * (2 * i + 1)} for i in range(20)]
        # futures: before and after the end, a chain, and several as one
        tensor = torch.full((1000,), float(rank))
        work = dist.all_reduce(tensor, async_op=True)
        future = work.get_future()
        assert future.then(lambda done: done.value()[0].sum().item()).wait() == 1000
        assert work.get_future() is future
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert torch.equal(work.get_future().wait()[0], torch.full((1000,), 2.0))
        group: Any = dist.group.WORLD
        joined = group.allreduce_coalesced([torch.ones(3), torch.ones(3, dtype=torch.int64)])
        assert [tensor.tolist() for tensor in joined.get_future().wait()] == [[2.0] * 3, [2] * 3]
        if rank == 0:
            work = dist.all_reduce(tensor, async_op=True)
            with raises(CommError, "all_reduce", "0.1 s"):
                work.wait(timedelta(seconds=0.1))
        else:
            time.sleep(0.5)
            work = dist.all_reduce(tensor, async_op=True)
        with device.capturing(), raises(UsageError, "while a graph is captured"):
            dist.all_reduce(tensor)
        work.wait()
        assert (tensor == 4).all()


# ---- training -----------------------------------------------------------------------------------------


def trained(rank: int, wrap: str) -> list[Tensor]:
    torch.manual_seed(5)
    module: Any = nn.Sequential(nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 3))
    if wrap == "fsdp":
        module = fully_shard(module, mesh=dist.init_device_mesh("cpu", (2,)))
    else:
        module = DistributedDataParallel(module, bucket_cap_mb=0.003)
        if wrap == "bf16":
            module.register_comm_hook(None, bf16_wire)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(3):
        random = torch.Generator().manual_seed(10 * step + rank)
        optimizer.zero_grad()
        module(torch.randn(8, 20, generator=random)).square().mean().backward()
        optimizer.step()
    return [getattr(each, "full_tensor", lambda each=each: each)().detach() for each in module.parameters()]


def check_training(rank: int) -> None:
    for wrap in ("ddp", "bf16", "fsdp"):
        plain = trained(rank, wrap)
        for seed in (None, 7 + rank):  # the second: streams of the device late at random
            with staged(seed=seed):
                found = trained(rank, wrap)
            assert all(map(torch.equal, plain, found)), (wrap, seed)


def check_captures(rank: int) -> None:
    """The pipeline's threads go on while another thread captures a graph, and do not end the capture."""
    with staged(seed=rank) as side:
        tensors = [torch.full((5000,), float(rank + i)) for i in range(4)]
        works: list[Any] = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        with device_of(side).capturing():
            deadline = time.monotonic() + 30
            while not side.pipeline.is_idle and time.monotonic() < deadline:
                time.sleep(0.001)
            assert side.pipeline.is_idle
        for work in works:
            work.wait()
        assert [set(tensor.tolist()) for tensor in tensors] == [{2.0 * i + 1} for i in range(4)]


def check_order_and_training(rank: int) -> None:
    small_pieces()
    check_order(rank)
    check_training(rank)
    check_captures(rank)


def test_order_with_the_callers_lane_and_training(tmp_path: Path) -> None:
    run_group(check_order_and_training, 2, tmp_path, hosts=("a", "b"), environment=PYTHON_GROUP)


# ---- what goes wrong ----------------------------------------------------------------------------------


def check_lost(rank: int, size: int) -> None:
    small_pieces()
    with staged():
        dist.all_reduce(torch.ones(5000))
        if rank == size - 1:
            dist.all_reduce(torch.ones(5000), async_op=True)
            os.kill(os.getpid(), signal.SIGKILL)
        with raises(CommError, f"rank {size - 1}", "was lost"):
            for _ in range(1000):
                dist.all_reduce(torch.ones(5000))
        with raises(CommError, f"rank {size - 1}"):
            dist.all_reduce(torch.ones(5))
        dist.destroy_process_group()


@pytest.mark.parametrize("hosts", [pytest.param(("a", "b"), marks=pytest.mark.slow), ("a", "a", "b", "b")])
def test_a_lost_rank_is_named(hosts: tuple[str, ...], tmp_path: Path) -> None:
    codes = exit_codes(check_lost, len(hosts), tmp_path, len(hosts), hosts=hosts, environment=PYTHON_GROUP)
    assert codes == [0] * (len(hosts) - 1) + [-signal.SIGKILL]


def check_wrong(rank: int) -> None:
    def fail() -> None:
        raise RuntimeError("the copy came to grief")

    part: Any = dist.new_group([0, 1])
    with staged(group=part), raises(CommError, "do not agree", "all_reduce"):
        dist.all_reduce(torch.ones(10 + rank), group=part)
    with staged() as side:
        dist.all_reduce(torch.ones(10))
        if rank == 0:
            side.pipeline._h2d.call(fail)
        with raises(RuntimeError if rank == 0 else CommError, "the copy came to grief", *["rank 0"] * rank):
            for _ in range(100):
                dist.all_reduce(torch.ones(10))
                time.sleep(0.05)
    dist.destroy_process_group()


def test_what_one_rank_does_wrong_all_are_told(tmp_path: Path) -> None:
    run_group(check_wrong, 2, tmp_path, hosts=("a", "b"), environment=PYTHON_GROUP)
