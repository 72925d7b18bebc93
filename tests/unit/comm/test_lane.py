"""Tests the lane and staging on a runtime of CUDA whose streams are threads, and on torch's without a GPU."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from benchmarks.memory_device import MemoryDevice, forget_failures, runtime, watch

from shoal.comm.collectives import collective
from shoal.comm.cuda_device import runtime_library
from shoal.comm.engine import CommError, SingleProcessEngine
from shoal.comm.lane import Lane
from shoal.comm.routes import flat_route
from shoal.comm.staging import DeviceWork, Staging, Transfer

KIB = 1 << 10
LIMIT = timedelta(seconds=60)


class Group:
    """A process group of one rank, whose abort is remembered."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def error(self) -> str | None:
        return None

    def abort(self, reason: str) -> None:
        self.reason = reason

    def explain(self, problem: Exception) -> Exception:
        return problem


@contextmanager
def opened(buffer_bytes: int = KIB, seed: int | None = None) -> Iterator[tuple[MemoryDevice, Staging, Group]]:
    device, group = MemoryDevice(seed=seed), Group()
    staging = Staging(device, group, num_buffers=3, buffer_bytes=buffer_bytes)
    try:
        yield device, staging, group
    finally:
        staging.stop()
        forget_failures()
        device.close()


def begin(device: MemoryDevice, staging: Staging, source: torch.Tensor, target: torch.Tensor) -> DeviceWork:
    operation = collective("all_reduce", source, target)
    work = DeviceWork(device, "all_reduce", [target], Group(), lambda: None)
    staging.begin(
        Transfer(
            route=flat_route(operation, SingleProcessEngine(), 0, 1),
            ready=device.current_stream().record_event(),
            timeout_s=60, work=work, on_end=lambda: None,
        )
    )  # fmt: skip
    return work


def python_calls(of: Callable[[], object]) -> int:
    """Return the number of calls of Python functions on this thread and those that begin meanwhile."""
    calls = 0

    def count(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event == "call"

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        of()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return calls


def counted(num_chunks: int) -> tuple[int, dict[str, int]]:
    """Return the calls of Python, and the lane's counters, of a collective with so many chunks."""
    source, target = torch.randn(num_chunks * KIB // 4), torch.zeros(num_chunks * KIB // 4)
    counts: dict[str, int] = {}

    def step() -> None:
        with opened() as (device, staging, _):
            begin(device, staging, source, target).wait(LIMIT)
            device.current_stream().record_event().synchronize()
            counts.update(staging.lane.counters())

    watch(False)  # what looks at freed memory is Python
    try:
        calls = python_calls(step)
    finally:
        watch(True)
    assert torch.equal(source, target)
    return calls, counts


def test_no_python_runs_for_a_chunk() -> None:
    few, _ = counted(2)
    calls, counts = counted(400)
    assert counts["chunks"] == counts["copies_to_host"] == counts["copies_to_device"] == 400
    assert counts["bytes_to_host"] == counts["bytes_to_device"] == 400 * KIB
    assert counts["events"] == 800 and counts["waits"] == 400
    assert 0 < calls < few + 100, "waits are repeated twice a second; nothing is done for each chunk"


@pytest.mark.parametrize("seed", range(3))
def test_results_are_those_of_the_tensors_as_the_stream_left_them(seed: int) -> None:
    """The compute stream fills and reads tensors, and all streams are late at random."""
    with opened(seed=seed) as (device, staging, _):
        compute, targets, seen = device.new_stream(), [], []
        with device.on(compute):
            for number in range(12):
                source, target = torch.zeros(1000), torch.zeros(1000)
                compute.call(partial(source.fill_, number))
                work = begin(device, staging, source, target)
                del source  # staging keeps it
                targets.append(target)
                work.wait(LIMIT)
                compute.call(lambda target=target: seen.append(target.clone()))  # type: ignore[misc]
                compute.run(partial(target.fill_, -1))  # must not overtake the copy back
            compute.record_event().synchronize()
    assert [set(each.tolist()) for each in seen] == [{float(number)} for number in range(12)]


@pytest.mark.parametrize(
    ("function", "number"), [("cudaMemcpyAsync", 7), ("cudaHostAlloc", 1), ("cudaEventRecord", 5)]
)
def test_a_failure_of_cuda_ends_the_work_with_the_call_and_the_code(function: str, number: int) -> None:
    with opened() as (device, staging, group):
        runtime().fake_cuda_fail(function.encode(), number, 719)
        work = begin(device, staging, torch.ones(10 * KIB), torch.ones(10 * KIB))
        wanted = rf"all_reduce on cpu: {function}: cudaErrorLaunchFailure \(719\): unspecified launch failure"
        with pytest.raises(CommError, match=wanted):
            work.wait(LIMIT)
        assert group.reason is not None and function in group.reason
        assert work.get_future().done()


def test_a_copy_of_freed_memory_fails() -> None:
    """The tests of staging rest on it: the device must see what staging would forget to keep."""
    with opened() as (device, staging, _):
        source, target, engine = torch.ones(KIB), torch.zeros(KIB), SingleProcessEngine()
        stream, go_on = device.new_stream(), threading.Event()
        stream.call(go_on.wait)
        ready = stream.record_event()
        route = flat_route(collective("all_reduce", source, target), engine, 0, 1)
        number = staging.lane.begin(route, 256, ready.cuda_event, 60)
        del route, source
        go_on.set()
        with pytest.raises(RuntimeError, match=r"cudaErrorIllegalAddress \(700\)"):
            staging.lane.wait(number, 60)


@pytest.mark.parametrize("library", ["", "libcudart.so.99", "/tmp/libcudart.so", "libm.so.6"])
def test_only_a_runtime_that_is_loaded_is_used(library: str) -> None:
    with pytest.raises(CommError, match="tensors of a GPU need CUDA's functions: CUDA's runtime"):
        Lane(library, 0, 0, 0, num_buffers=2, buffer_bytes=KIB)


def test_the_runtime_that_torch_has_loaded_is_found() -> None:
    if torch.version.cuda is None or torch.cuda.is_available():
        pytest.skip("needs a torch with CUDA on a machine without a GPU")
    tensor = torch.ones(10)
    lane = Lane(runtime_library(), 0, 0, 0, num_buffers=2, buffer_bytes=KIB)
    route = flat_route(collective("all_reduce", tensor, tensor), SingleProcessEngine(), 0, 1)
    number = lane.begin(route, 10, 0, 60)
    with pytest.raises(RuntimeError, match=r"cudaSetDevice: cudaError\w+ \(\d+\): "):
        lane.wait(number, 60)
    lane.stop()
