"""Tests staging with CPU tensors: order with the caller's stream, futures, training, errors.

``device_checks`` are those that run on a GPU too (``tests/gpu/test_cuda_comm.py``).
"""

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
from benchmarks.memory_device import runtime
from comm_group import SECRET, HelperProcess
from device_checks import (
    FakeGpu,
    check_bounded,
    check_captures_beside_collectives,
    check_collectives,
    check_eight_bits,
    check_first_use_by_two_threads,
    check_local,
    check_lost,
    check_messages,
    check_no_servers,
    check_orders,
    check_rails,
    check_rails_of_one_rank,
    check_rails_with_a_helper,
    check_rounded,
    check_served,
    check_streams,
    check_training,
)
from shoal_workers import exit_codes, run_group
from staged_group import PYTHON_GROUP, device_of, staged
from test_backend_work import raises
from test_serve_metrics import scrape, value

from shoal.comm.engine import CommError
from shoal.errors import UsageError

slow = pytest.mark.slow


def check_order(rank: int) -> None:
    with staged() as side:
        device = device_of(side)
        late = device.new_stream()
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


def test_futures_and_waits_of_other_streams(tmp_path: Path) -> None:
    run_group(check_order, 2, tmp_path, hosts=("a", "b"), environment=PYTHON_GROUP)


@pytest.mark.parametrize(
    "check",
    [check_streams, check_messages, check_captures_beside_collectives, check_training, check_eight_bits],
)
def test_order_with_streams_captures_and_training(check: Any, tmp_path: Path) -> None:
    run_group(check, 2, tmp_path, FakeGpu(), hosts=("a", "b"), environment=PYTHON_GROUP)


@pytest.mark.parametrize(
    ("hosts", "is_hierarchical"),
    [
        pytest.param("aab", False, id="aab"),
        pytest.param("abc", False, id="abc", marks=slow),
        pytest.param("aaa", True, id="aaa", marks=slow),
        pytest.param("aabb", True, id="aabb", marks=slow),
    ],
)
def test_collectives_give_what_gloo_gives(hosts: str, is_hierarchical: bool, tmp_path: Path) -> None:
    run_group(
        check_collectives, len(hosts), tmp_path, FakeGpu(), len(hosts), is_hierarchical,
        hosts=tuple(hosts), environment=PYTHON_GROUP,
    )  # fmt: skip


@pytest.mark.parametrize("check", [check_served, check_rounded, check_bounded, check_local])
def test_servers_update_weights_that_stay_on_the_device(check: Any, tmp_path: Path) -> None:
    run_group(check, 2, tmp_path, FakeGpu(), hosts=("a", "b"), environment=PYTHON_GROUP)


def test_servers_update_weights_of_two_devices_in_each_host(tmp_path: Path) -> None:
    """Each device sends its whole gradients, and the ranks of a host add theirs before they leave it."""
    run_group(check_served, 4, tmp_path, FakeGpu(), hosts=tuple("aabb"), environment=PYTHON_GROUP)


def test_threads_that_begin_together_share_a_device(tmp_path: Path) -> None:
    run_group(check_first_use_by_two_threads, 2, tmp_path, hosts=("a", "b"), environment=PYTHON_GROUP)


def test_servers_of_a_single_host_are_refused(tmp_path: Path) -> None:
    run_group(check_no_servers, 2, tmp_path, FakeGpu(), hosts=("a", "a"), environment=PYTHON_GROUP)


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 1000), marks=slow)], ids=len)
def test_whatever_is_late_the_numbers_are_right(seeds: range, tmp_path: Path) -> None:
    run_group(
        check_orders,
        2,
        tmp_path,
        FakeGpu(),
        seeds,
        hosts=("a", "b"),
        environment=PYTHON_GROUP,
        deadline_s=1200,
    )


# ---- several devices in a host, with one in each ----------------------------------------------------------


def test_rails_of_a_device_in_each_host(tmp_path: Path) -> None:
    run_group(check_rails, 2, tmp_path, FakeGpu(), 2, hosts=("a", "b"), environment=PYTHON_GROUP)
    run_group(check_rails_of_one_rank, 1, tmp_path, FakeGpu(), environment=PYTHON_GROUP)


def test_each_rail_sums_on_the_helper(tmp_path: Path) -> None:
    with HelperProcess("h0", arguments=("--metrics", "0")) as helper:
        assert helper.process.stdout is not None
        url = helper.process.stdout.readline().strip().partition(" at ")[2]
        named = {"SHOAL_HELPERS": f"{helper.address}:{helper.port}*1.0", "SHOAL_SECRET": SECRET}
        run_group(
            check_rails_with_a_helper, 4, tmp_path, FakeGpu(), 4, hosts=tuple("aabb"),
            environment={**PYTHON_GROUP, **named},
        )  # fmt: skip
        assert value(scrape(url), "summed_chunks") >= 2


# ---- what goes wrong ----------------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", [pytest.param("ab", marks=slow), "aabb"])
def test_a_lost_rank_is_named(hosts: str, tmp_path: Path) -> None:
    codes = exit_codes(
        check_lost, len(hosts), tmp_path, FakeGpu(), len(hosts), hosts=tuple(hosts), environment=PYTHON_GROUP
    )
    assert codes == [0] * (len(hosts) - 1) + [-signal.SIGKILL]


def check_wrong(rank: int) -> None:
    part: Any = dist.new_group([0, 1])
    with staged(group=part), raises(CommError, "do not agree", "all_reduce"):
        dist.all_reduce(torch.ones(10 + rank), group=part)
    with staged():
        dist.all_reduce(torch.ones(10))
        if rank == 0:
            runtime().fake_cuda_fail(b"cudaMemcpyAsync", 3, 719)
        with raises(CommError, "all_reduce", "cudaMemcpyAsync: cudaErrorLaunchFailure", *["rank 0"] * rank):
            for _ in range(100):
                dist.all_reduce(torch.ones(10))
                time.sleep(0.05)
    dist.destroy_process_group()


def check_wrong_messages(rank: int) -> None:
    other, parts = 1 - rank, [dist.new_group([0, 1]) for _ in range(2)]
    with staged(group=parts[0]):
        given, target = torch.ones(5), torch.zeros(4)
        works: list[Any] = [
            dist.isend(given, other, group=parts[0]),
            dist.irecv(target, other, group=parts[0]),
        ]
        with raises(CommError, "message", "float32"):  # is larger than what receives it
            for work in works:
                work.wait()
    with staged(group=parts[1]):
        if rank == 0:
            runtime().fake_cuda_fail(b"cudaMemcpyAsync", 0, 719)
            with raises(CommError, "send on cpu: cudaMemcpyAsync: cudaErrorLaunchFailure (719)"):
                dist.send(torch.ones(10), 1, group=parts[1])
        else:
            with raises(CommError, "rank 0", "send: cudaMemcpyAsync: cudaErrorLaunchFailure (719)"):
                dist.recv(torch.ones(10), 0, group=parts[1])
    with staged():
        work = dist.irecv(torch.ones(10), other, tag=3)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with raises(CommError, "rank 1", "was lost"):
            work.wait()
    dist.destroy_process_group()


def test_what_one_rank_does_wrong_all_are_told(tmp_path: Path) -> None:
    run_group(check_wrong, 2, tmp_path, hosts=("a", "b"), environment=PYTHON_GROUP)
    codes = exit_codes(check_wrong_messages, 2, tmp_path, hosts=("a", "b"), environment=PYTHON_GROUP)
    assert codes == [0, -signal.SIGKILL]
