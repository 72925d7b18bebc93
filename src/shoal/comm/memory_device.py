"""The processor's memory as a device: lanes are threads, and nothing is done before its turn comes.

For tests and for trying the staged way without a GPU. Tensors are ordinary CPU tensors; what a caller does
to them outside a lane is done when the call returns, as on the CPU, unless it works ``on`` a lane.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from shoal.comm.bootstrap import connect_engine
from shoal.comm.devices import Lane
from shoal.comm.engine import EngineOptions, Operation
from shoal.comm.operands import plain

_CPU = torch.device("cpu")


class MemoryMark:
    """Passed by the lane's thread. ``failure`` is what went wrong before it."""

    def __init__(self) -> None:
        self._passed = threading.Event()
        self.failure: Exception | None = None

    def pass_by(self, failure: Exception | None) -> None:
        self.failure = failure
        self._passed.set()

    def wait(self) -> None:
        self._passed.wait()
        if self.failure is not None:
            raise self.failure

    def is_done(self) -> bool:
        return self._passed.is_set()


class MemoryLane:
    """A thread that does one step after the other. After a failure it only hands that to marks."""

    def __init__(self) -> None:
        self._steps: queue.SimpleQueue[Callable[[], object] | MemoryMark | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        threading.Thread(target=self._run, name="shoal-memory-lane", daemon=True).start()

    def _run(self) -> None:
        with torch.no_grad():
            while (step := self._steps.get()) is not None:
                if isinstance(step, MemoryMark):
                    step.pass_by(self._failure)
                elif self._failure is None:
                    try:
                        step()
                    except Exception as problem:
                        self._failure = problem

    def run(self, step: Callable[[], object]) -> None:
        self._steps.put(step)

    def wait_for(self, mark: MemoryMark) -> None:
        self._steps.put(mark.wait)

    def mark(self) -> MemoryMark:
        mark = MemoryMark()
        self._steps.put(mark)
        return mark

    def close(self) -> None:
        self._steps.put(None)


class _CallersLane:
    """What a thread does itself: done when the call returns."""

    def run(self, step: Callable[[], object]) -> None:
        step()

    def wait_for(self, mark: MemoryMark) -> None:
        mark.wait()

    def mark(self) -> MemoryMark:
        mark = MemoryMark()
        mark.pass_by(None)
        return mark


class MemoryDevice:
    """Ranks of a host may share an ``identity``, as processes share a GPU; by default each has its own."""

    place = _CPU
    _numbers = itertools.count()

    def __init__(self, place: torch.device = _CPU, identity: str | None = None) -> None:
        self._identity = identity or f"memory of process {os.getpid()}"
        self._lanes: list[MemoryLane] = []
        self._of_thread = threading.local()
        self._recording = False

    def identity(self) -> str:
        return self._identity

    def here(self) -> Lane:
        lane: Lane = getattr(self._of_thread, "lane", None) or _CallersLane()
        return lane

    @contextmanager
    def on(self, lane: MemoryLane) -> Iterator[None]:
        """Let this thread's collectives follow, and be followed by, what is queued in ``lane``."""
        self._of_thread.lane = lane
        try:
            yield
        finally:
            self._of_thread.lane = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Behave as while a graph is captured."""
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    def new_lane(self) -> MemoryLane:
        self._lanes.append(MemoryLane())
        return self._lanes[-1]

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def inside_host(self, store: Store, rank: int, size: int, timeout: timedelta, name: str) -> MemoryHost:
        return MemoryHost(store, rank, size, timeout, name)

    def is_recording(self) -> bool:
        return self._recording

    def future_devices(self) -> list[torch.device]:
        return []

    def run_thread(self, work: Callable[[], None]) -> None:
        with torch.no_grad():
            work()

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()


class MemoryHost:
    """Ranks of one host that add up in shared memory, in rank order, with an engine of their own."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, name: str) -> None:
        self._engine = connect_engine(store, rank, size, name, rank, timeout, EngineOptions())
        self._timeout_s = timeout.total_seconds()

    def reduce_scatter(self, output: Tensor, input: Tensor, op: str) -> None:
        self._do("reduce_scatter", output, input, output.numel(), op)

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        self._do("all_gather", output, input, input.numel(), "sum")

    def _do(self, kind: str, output: Tensor, input: Tensor, count: int, op: str) -> None:
        _, dtype = plain(input)
        arguments: dict[str, Any] = {"kind": kind, "count": count, "dtype": dtype, "op": op}
        self._engine.wait(
            self._engine.submit(
                Operation(
                    input=input.data_ptr(),
                    output=output.data_ptr(),
                    timeout_s=self._timeout_s,
                    **arguments,
                )
            )
        )

    def abort(self, reason: str) -> None:
        self._engine.abort(reason)

    def close(self) -> None:
        self._engine.close()
