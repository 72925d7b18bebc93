"""Pipelines collectives of device tensors through pinned host memory, chunk by chunk.

Two threads, each with a stream of the device, process the operations of a group in the order of the calls:

    sender      makes its stream wait for the caller's work; queues the copy of each chunk into a host buffer;
                submits the chunk to the engine when its copy has completed
    receiver    waits for the result of a chunk; queues its copy to the device; after the last one, delivers

So the chunks of one bucket are copied out, reduced and copied back concurrently, while the device computes
the next bucket. The caller only queues work. At most ``num_buffers`` buffers exist and are reused; the sender
blocks until one is free. The receiver frees them without the sender, so the two cannot deadlock.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

from torch import Tensor
from torch.futures import Future

from shoal.comm.collectives import collective
from shoal.comm.devices import Device, Event
from shoal.comm.engine import CommError
from shoal.comm.routes import Route
from shoal.comm.work import BaseWork, opaque_to_dynamo

_SLICE_S = 0.5
_MAX_QUEUED_COPIES = 2
"""Copies from the device that are queued before the first of them has completed."""
_OWN_ERROR_S = 1.0
"""Wait for the operation's own error after the group has failed; it is more specific than the group's."""

Step = Callable[[], object]


class GroupControl(Protocol):
    """Operations of a process group that the pipeline calls."""

    def error(self) -> str | None: ...
    def abort(self, reason: str) -> None: ...
    def explain(self, problem: Exception) -> Exception: ...


@opaque_to_dynamo
class DeviceWork(BaseWork):
    """A collective that passes through host memory.

    It is *delivered* when the last of its device work is queued. From then on, a user of the result on the
    device waits for an event, and no thread blocks.
    """

    def __init__(
        self,
        device: Device,
        name: str,
        result: Any,
        error: Callable[[], str | None],
        idle: Callable[[], None],
    ) -> None:
        super().__init__(name, result)
        self._device = device
        self._group_error, self._idle = error, idle
        self._delivered = threading.Event()
        self._event: Event | None = None

    def _advance(self, left_s: float) -> bool:
        """Wait until the copy of the result is queued, and make the calling thread's stream wait for it."""
        if not self._delivered.wait(min(_SLICE_S, left_s)):
            self._idle()
            if (reason := self._group_error()) and not self._delivered.wait(_OWN_ERROR_S):
                raise CommError(reason)
            if not self._delivered.is_set():
                return False
        if self._error is None:
            self._device.current_stream().wait_event(self._event)
        return True

    def deliver(self, event: Event) -> None:
        """Publish the result, which is valid after ``event``."""
        self._event = event
        self._delivered.set()

    def fail(self, error: Exception) -> None:
        """Record an error, even of an operation that was delivered."""
        self._error = error
        self._delivered.set()
        self.complete()

    def complete(self) -> None:
        """Set the future, if there is one, on a stream on which the result may be used."""
        with self._lock:
            completion, self._completion = self._completion, None
        # A future of CUDA tensors records events in the streams that are current where it is set.
        if completion is not None:
            completion.set_result(self._result if self._error is None else None)

    def is_completed(self) -> bool:
        if not self._delivered.is_set():
            return False
        return self._error is not None or self._event is None or self._event.query()

    def get_future(self) -> Future[Any]:
        """Return a future of the output tensors; its callbacks run when the result is delivered."""
        future, is_new = self._future_of(self._device.future_devices())
        if is_new and self._delivered.is_set():
            if self._event is not None and self._error is None:
                self._device.current_stream().wait_event(self._event)
            self.complete()
        return future


@dataclass
class Buffer:
    """Host memory, and the event after which it is free."""

    memory: Tensor
    free_after: Event | None = None


@dataclass(kw_only=True)
class Transfer:
    """An operation in the pipeline. It keeps its tensors alive until the device has finished with them."""

    route: Route
    ready: Event
    """recorded after the work that the caller had queued"""
    deadline: float
    """in seconds of ``time.monotonic()``"""
    work: DeviceWork
    on_end: Step
    sent: Event | None = None
    error: Exception | None = None


@dataclass
class _Chunk:
    transfer: Transfer
    buffer: Buffer
    columns: slice
    handle: int = -1


class CopyPipeline:
    """The two threads of one group and device."""

    def __init__(self, device: Device, group: GroupControl, *, num_buffers: int, buffer_bytes: int) -> None:
        self._device = device
        self._group = group
        self._buffer_bytes = buffer_bytes
        self._num_unallocated = num_buffers
        self._free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        self._submitted: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._in_flight: queue.SimpleQueue[_Chunk | Transfer | None] = queue.SimpleQueue()
        self._d2h, self._h2d = device.new_stream(), device.new_stream()
        self._undelivered: set[int] = set()
        self._threads = [
            threading.Thread(target=device.run_thread, args=(work,), name=f"shoal-{name}", daemon=True)
            for name, work in (("sender", self._send_all), ("receiver", self._receive_all))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_idle(self) -> bool:
        """Return whether every operation has been delivered."""
        return not self._undelivered

    def begin(self, transfer: Transfer) -> None:
        self._undelivered.add(id(transfer))
        self._submitted.put(transfer)

    def stop(self) -> None:
        """Join the threads, once pending operations have completed or their engines are closed."""
        self._submitted.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    # ---- device to host -----------------------------------------------------------------------------------

    def _send_all(self) -> None:
        while (transfer := self._submitted.get()) is not None:
            try:
                self._send(transfer)
            except Exception as problem:  # noqa: BLE001  # raised where the work is waited for
                self._fail(transfer, problem)
            self._in_flight.put(transfer)
            del transfer  # or its tensors would live until the next operation
        self._in_flight.put(None)

    def _send(self, transfer: Transfer) -> None:
        if reason := self._group.error():
            raise CommError(reason)
        route, stream = transfer.route, self._d2h
        stream.wait_event(transfer.ready)
        if route.begin is not None:
            stream.run(route.begin)
        queued: deque[_Chunk] = deque()
        try:
            for columns in route.chunks(self._buffer_bytes) if route.engine is not None else ():
                queued.append(self._queue_copy(transfer, columns))
                while queued and (len(queued) == _MAX_QUEUED_COPIES or not self._has_buffer):
                    self._submit(queued[0])
                    queued.popleft()
            while queued:
                self._submit(queued[0])
                queued.popleft()
        finally:  # chunks that could not be submitted
            for chunk in queued:
                self._free.put(chunk.buffer)
        transfer.sent = stream.record_event()

    def _queue_copy(self, transfer: Transfer, columns: tuple[int, int]) -> _Chunk:
        """Queue the copy of a chunk into a buffer; block until there is one."""
        chunk = _Chunk(transfer, self._take_buffer(), slice(*columns))
        if transfer.route.sends:
            self._d2h.run(_copy(_input(chunk), transfer.route.source[:, chunk.columns]))
        chunk.buffer.free_after = self._d2h.record_event()
        return chunk

    @property
    def _has_buffer(self) -> bool:
        return self._num_unallocated > 0 or not self._free.empty()

    def _take_buffer(self) -> Buffer:
        if self._num_unallocated and self._free.empty():
            self._num_unallocated -= 1
            return Buffer(self._device.host_buffer(self._buffer_bytes))
        buffer = self._free.get()
        try:
            if buffer.free_after is not None:
                buffer.free_after.synchronize()
        except Exception:
            self._free.put(buffer)
            raise
        return buffer

    def _submit(self, chunk: _Chunk) -> None:
        """Submit a chunk to the engine once it is in host memory."""
        transfer = chunk.transfer
        route, asked = transfer.route, transfer.route.operation
        assert route.engine is not None and chunk.buffer.free_after is not None
        chunk.buffer.free_after.synchronize()
        left = timedelta(seconds=max(transfer.deadline - time.monotonic(), 1e-3))
        operation = collective(
            asked.kind, _input(chunk), _output(chunk),
            op=route.op, root=route.root, shape=asked.shape, priority=asked.priority, timeout=left,
        )  # fmt: skip
        chunk.handle = route.engine.submit(operation)
        self._in_flight.put(chunk)

    # ---- host to device -----------------------------------------------------------------------------------

    def _receive_all(self) -> None:
        while (item := self._in_flight.get()) is not None:
            transfer = item if isinstance(item, Transfer) else item.transfer
            try:
                if isinstance(item, _Chunk):
                    self._receive(item)
                elif transfer.error is None:
                    self._deliver(transfer)
            except Exception as problem:  # noqa: BLE001  # raised where the work is waited for
                self._fail(transfer, problem)
            if isinstance(item, _Chunk):
                self._free.put(item.buffer)
            else:
                self._end(transfer)
            del item, transfer

    def _receive(self, chunk: _Chunk) -> None:
        """Wait for a chunk's result and queue its copy; after a failure, wait until its memory is free."""
        route = chunk.transfer.route
        assert route.engine is not None
        while not route.engine.wait(chunk.handle, _SLICE_S):
            if reason := self._group.error():
                route.engine.abort(reason)
        if route.receives and chunk.transfer.error is None:
            self._h2d.run(_copy(route.target[:, chunk.columns], _output(chunk)))
            chunk.buffer.free_after = self._h2d.record_event()

    def _deliver(self, transfer: Transfer) -> None:
        """Queue the remaining device work, publish the result, and block until the device has finished."""
        assert transfer.sent is not None
        stream = self._h2d
        stream.wait_event(transfer.sent)
        for step in (transfer.route.end, transfer.route.operation.finish):
            if step is not None:
                stream.run(step)
        event = stream.record_event()
        self._undelivered.discard(id(transfer))
        transfer.on_end()
        transfer.work.deliver(event)
        stream.run(transfer.work.complete)
        stream.record_event().synchronize()

    def _end(self, transfer: Transfer) -> None:
        if transfer.error is not None:
            transfer.on_end()
            transfer.work.fail(transfer.error)
        self._undelivered.discard(id(transfer))

    def _fail(self, transfer: Transfer, problem: Exception) -> None:
        """Record a failure and abort the group, since the other ranks have begun the operation."""
        if transfer.error is None:
            transfer.error = self._group.explain(problem)
        if not self._group.error():
            self._group.abort(f"{transfer.route.operation.kind}: {problem}")


def _copy(target: Tensor, source: Tensor) -> Step:
    return partial(target.copy_, source, non_blocking=True)


def _rows(chunk: _Chunk, first: int, last: int) -> Tensor:
    """Return rows ``first`` to ``last`` of a chunk's buffer."""
    source = chunk.transfer.route.source
    width = chunk.columns.stop - chunk.columns.start
    begin, end = (row * width * source.element_size() for row in (first, last))
    return chunk.buffer.memory[begin:end].view(source.dtype).view(last - first, width)


def _input(chunk: _Chunk) -> Tensor:
    route = chunk.transfer.route
    if route.operation.kind == "all_gather":
        return _rows(chunk, route.rank, route.rank + 1)
    return _rows(chunk, 0, route.source.shape[0])


def _output(chunk: _Chunk) -> Tensor:
    route = chunk.transfer.route
    if route.operation.kind == "reduce_scatter":
        return _rows(chunk, route.size, route.size + 1)
    return _rows(chunk, 0, route.target.shape[0])
