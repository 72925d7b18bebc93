"""Collectives of tensors on a device, through the host's memory, chunk by chunk.

Two threads, each with a lane of the device, work on the operations of a group in the order of the calls:

    sender      waits in its lane for the caller's work; queues each chunk's copy into a buffer of the host;
                when a copy has ended, gives the chunk to the engine
    receiver    waits for a chunk's sum; queues its copy back; behind the last one, delivers the work

So the chunks of one bucket leave the device, travel and come back at the same time, while the device computes
the next bucket. The caller only queues. Buffers are reused, and there are no more than ``num_buffers``: the
sender waits for one that is free, which the receiver frees by itself.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from shoal.comm.devices import Device, Mark
from shoal.comm.engine import CommError, Operation
from shoal.comm.routes import Route
from shoal.comm.staged import StagedWork

_SLICE_S = 0.5
_NUM_AHEAD = 2
"""Copies from the device that may be queued before the first of them has ended."""

Step = Callable[[], object]


class Failing(Protocol):
    """What staging needs of its group."""

    def error(self) -> str | None: ...
    def abort(self, reason: str) -> None: ...
    def explain(self, problem: Exception) -> Exception: ...


@dataclass
class Buffer:
    """Memory of the host, and the mark after which it is free."""

    memory: Tensor
    free_after: Mark | None = None


@dataclass(kw_only=True)
class Job:
    """One operation on its way. It keeps its tensors alive until the device is done with them."""

    name: str
    route: Route
    ready: Mark
    """behind what the caller had queued"""
    end_s: float
    """``time.monotonic()`` by which it must have ended"""
    work: StagedWork
    finish: Step | None
    ended: Step
    sent: Mark | None = None
    error: Exception | None = None


@dataclass
class Seen:
    """What was noted of a chunk, in ns of ``time.time_ns()``: its copy queued, copied, and summed."""

    name: str
    index: int
    begun: int = field(default_factory=time.time_ns)
    submitted: int = 0
    summed: int = 0


@dataclass
class _Chunk:
    job: Job
    buffer: Buffer
    columns: tuple[int, int]
    handle: int = -1
    seen: Seen | None = None


class Staging:
    """The two threads of one group and device."""

    def __init__(self, device: Device, group: Failing, *, num_buffers: int, buffer_bytes: int) -> None:
        self._device = device
        self._group = group
        self._buffer_bytes = buffer_bytes
        self._num_unmade = num_buffers
        self._free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._travelling: queue.SimpleQueue[_Chunk | Job | None] = queue.SimpleQueue()
        self._leaving, self._coming = device.new_lane(), device.new_lane()
        self._under_way: set[int] = set()
        self.seen: list[Seen] | None = None
        """Chunks are noted here while this is a list."""
        self._threads = [
            threading.Thread(target=device.run_thread, args=(work,), name=f"shoal-{name}", daemon=True)
            for name, work in (("sender", self._send_all), ("receiver", self._receive_all))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether all has been delivered."""
        return not self._under_way

    def begin(self, job: Job) -> None:
        self._under_way.add(id(job))
        self._jobs.put(job)

    def stop(self) -> None:
        """End the threads, once what is under way has ended or its engines are closed."""
        self._jobs.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    # ---- from the device ----------------------------------------------------------------------------------

    def _send_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._send(job)
            except Exception as problem:
                self._fail(job, problem)
            self._travelling.put(job)
            del job  # or its tensors would live until the next one comes
        self._travelling.put(None)

    def _send(self, job: Job) -> None:
        if reason := self._group.error():
            raise CommError(reason)
        route, lane = job.route, self._leaving
        lane.wait_for(job.ready)
        if route.begin is not None:
            lane.run(route.begin)
        leaving: deque[_Chunk] = deque()
        try:
            for columns in route.chunks(self._buffer_bytes) if route.engine is not None else ():
                leaving.append(self._leave(job, columns))
                while leaving and (len(leaving) == _NUM_AHEAD or not self._has_room):
                    self._submit(leaving[0])
                    leaving.popleft()
            while leaving:
                self._submit(leaving[0])
                leaving.popleft()
        finally:  # what could not be given to the engine
            for chunk in leaving:
                self._free.put(chunk.buffer)
        job.sent = lane.mark()

    def _leave(self, job: Job, columns: tuple[int, int]) -> _Chunk:
        """Queue a chunk's copy into a buffer, once there is one."""
        chunk = _Chunk(job, self._take(), columns)
        if self.seen is not None:
            chunk.seen = Seen(job.name, columns[0])
        if job.route.sends:
            self._leaving.run(_copy(_input(chunk), _columns(job.route.source, columns)))
        chunk.buffer.free_after = self._leaving.mark()
        return chunk

    @property
    def _has_room(self) -> bool:
        return self._num_unmade > 0 or not self._free.empty()

    def _take(self) -> Buffer:
        if self._num_unmade and self._free.empty():
            self._num_unmade -= 1
            return Buffer(self._device.buffer(self._buffer_bytes))
        buffer = self._free.get()
        try:
            if buffer.free_after is not None:
                buffer.free_after.wait()
        except Exception:
            self._free.put(buffer)
            raise
        return buffer

    def _submit(self, chunk: _Chunk) -> None:
        """Give a chunk to the engine once it is in the host's memory."""
        job = chunk.job
        route, asked = job.route, job.route.asked
        assert route.engine is not None and chunk.buffer.free_after is not None
        chunk.buffer.free_after.wait()
        input, output = _input(chunk), _output(chunk)
        chunk.handle = route.engine.submit(
            Operation(
                kind=asked.kind, input=input.data_ptr(), output=output.data_ptr(),
                count=chunk.columns[1] - chunk.columns[0], dtype=route.dtype, op=route.op, root=route.root,
                shape=asked.shape, timeout_s=max(job.end_s - time.monotonic(), 1e-3),
                priority=asked.priority,
            )
        )  # fmt: skip
        if chunk.seen is not None:
            chunk.seen.submitted = time.time_ns()
        self._travelling.put(chunk)

    # ---- back to the device -------------------------------------------------------------------------------

    def _receive_all(self) -> None:
        while (arriving := self._travelling.get()) is not None:
            job = arriving if isinstance(arriving, Job) else arriving.job
            try:
                if isinstance(arriving, _Chunk):
                    self._receive(arriving)
                elif job.error is None:
                    self._deliver(job)
            except Exception as problem:
                self._fail(job, problem)
            if isinstance(arriving, _Chunk):
                self._free.put(arriving.buffer)
            else:
                self._end(job)
            del arriving, job

    def _receive(self, chunk: _Chunk) -> None:
        """Wait for a chunk's sum and queue its copy back; of a failed operation, until its memory is free."""
        route = chunk.job.route
        assert route.engine is not None
        while not route.engine.wait(chunk.handle, _SLICE_S):
            if reason := self._group.error():
                route.engine.abort(reason)
        if chunk.seen is not None and self.seen is not None:
            chunk.seen.summed = time.time_ns()
            self.seen.append(chunk.seen)
        if route.receives and chunk.job.error is None:
            self._coming.run(_copy(_columns(route.target, chunk.columns), _output(chunk)))
            chunk.buffer.free_after = self._coming.mark()

    def _deliver(self, job: Job) -> None:
        """Queue what is left to do on the device, hand the result out, and wait until the device is done."""
        assert job.sent is not None
        lane = self._coming
        lane.wait_for(job.sent)
        for step in (job.route.end, job.finish):
            if step is not None:
                lane.run(step)
        mark = lane.mark()
        self._under_way.discard(id(job))
        job.ended()
        job.work.deliver(mark)
        lane.run(job.work.complete)
        lane.mark().wait()

    def _end(self, job: Job) -> None:
        if job.error is not None:
            job.ended()
            job.work.fail(job.error)
        self._under_way.discard(id(job))

    def _fail(self, job: Job, problem: Exception) -> None:
        """Note an operation's failure. The other ranks have begun it: the group fails as a whole."""
        if job.error is None:
            job.error = self._group.explain(problem)
        if not self._group.error():
            self._group.abort(f"{job.name}: {problem}")


def _copy(target: Tensor, source: Tensor) -> Step:
    return lambda: target.copy_(source, non_blocking=True)


def _columns(table: Tensor, columns: tuple[int, int]) -> Tensor:
    return table[:, columns[0] : columns[1]]


def _table(chunk: _Chunk, first: int, last: int) -> Tensor:
    """Return rows ``first`` to ``last`` of what a chunk has in its buffer."""
    source = chunk.job.route.source
    width = chunk.columns[1] - chunk.columns[0]
    begin, end = (row * width * source.element_size() for row in (first, last))
    return chunk.buffer.memory[begin:end].view(source.dtype).view(last - first, width)


def _input(chunk: _Chunk) -> Tensor:
    route = chunk.job.route
    if route.asked.kind == "all_gather":
        return _table(chunk, route.rank, route.rank + 1)
    return _table(chunk, 0, route.source.shape[0])


def _output(chunk: _Chunk) -> Tensor:
    route = chunk.job.route
    if route.asked.kind == "reduce_scatter":
        return _table(chunk, route.size, route.size + 1)
    return _table(chunk, 0, route.target.shape[0])
