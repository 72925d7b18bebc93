"""Passes collectives of device tensors through pinned host memory, and delivers them in call order.

The lane in C++ (``lane``) copies, submits and copies back chunk by chunk, without Python. Here is what
happens once for an operation, on a stream each:

    prepare     the caller's thread queues device work before the copies, such as a reduction inside the host
    to host     the lane copies out, after the caller's work and the preparation
    to device   the lane copies back; then a thread queues the work after the copies and publishes the result

So one tensor leaves the device while another is reduced and a third returns, and the device computes. The
caller only queues work.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.futures import Future

from shoal.comm.devices import Device, Event
from shoal.comm.engine import CommError
from shoal.comm.routes import Route
from shoal.comm.work import BaseWork, MessageSource, opaque_to_dynamo

_SLICE_S = 0.5
_FOREVER_S = 1e9
_OWN_ERROR_S = 1.0
"""Wait for the operation's own error after the group has failed; it is more specific than the group's."""


class GroupControl(Protocol):
    """Operations of a process group that staging calls."""

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
        group: GroupControl,
        idle: Callable[[], None],
    ) -> None:
        super().__init__(name, result)
        self._device, self._group, self._idle = device, group, idle
        self._delivered = threading.Event()
        self._event: Event | None = None

    def _advance(self, left_s: float) -> bool:
        """Wait until the copy of the result is queued, and make the calling thread's stream wait for it."""
        if not self._delivered.wait(min(_SLICE_S, left_s)):
            self._idle()
            if (reason := self._group.error()) and not self._delivered.wait(_OWN_ERROR_S):
                raise CommError(reason)
            if not self._delivered.is_set():
                return False
        if self._error is None:
            try:
                self._device.current_stream().wait_event(self._event)
            except Exception as problem:
                raise self._group.explain(problem) from problem
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


@opaque_to_dynamo
class DeviceMessage(MessageSource, DeviceWork):
    """A send or a receive."""


@dataclass(kw_only=True)
class Transfer:
    """An operation on its way. It keeps its tensors alive until the device has finished with them."""

    route: Route
    ready: Event
    """recorded after the work that the caller had queued, later after the preparation"""
    timeout_s: float
    work: DeviceWork
    on_end: Callable[[], object]
    number: int | None = None
    """of the lane; ``None`` if nothing leaves the device"""
    error: Exception | None = None
    done: Event | None = None
    """recorded after the last of its device work"""


class Staging:
    """The lane of one group and device, and the thread that delivers its operations."""

    def __init__(self, device: Device, group: GroupControl, *, num_buffers: int, buffer_bytes: int) -> None:
        self._device = device
        self._group = group
        self._buffer_bytes = buffer_bytes
        self._prepare, self._to_host, self._to_device = (device.new_stream() for _ in range(3))
        self.lane = device.open_lane(self._to_host, self._to_device, num_buffers, buffer_bytes)
        self._begun: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._undelivered: set[int] = set()
        self._thread = threading.Thread(
            target=device.run_thread, args=(self._deliver_all,), name="shoal-delivery", daemon=True
        )
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Return whether every operation has been delivered."""
        return not self._undelivered

    def begin(self, transfer: Transfer) -> None:
        """Begin an operation. Its error, if there is one, is raised where the work is waited for.

        Raises:
            ValueError: it is not possible, on all ranks alike.
        """
        self._undelivered.add(id(transfer))
        try:
            self._send(transfer)
        except ValueError:
            self._undelivered.discard(id(transfer))
            transfer.on_end()
            raise
        except Exception as problem:  # noqa: BLE001  # the other ranks have begun it: they are told
            transfer.error = problem
        self._begun.put(transfer)

    def _send(self, transfer: Transfer) -> None:
        if reason := self._group.error():
            raise CommError(reason)
        route = transfer.route
        if route.begin is not None:
            self._prepare.wait_event(transfer.ready)
            with torch.no_grad():
                self._prepare.run(route.begin)
            transfer.ready = self._prepare.record_event()
        event = transfer.ready.cuda_event
        if route.engine is None:
            return
        if route.operation.is_by_messages:
            transfer.number = self.lane.begin_messages(
                route.engine, route.operation, event, transfer.timeout_s
            )
        else:
            transfer.number = self.lane.begin(
                route, route.columns(self._buffer_bytes), event, transfer.timeout_s
            )

    def stop(self) -> None:
        """Join the threads, once pending operations have completed or their engines are closed."""
        self._begun.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()
        self.lane.stop()

    # ---- the thread that delivers -------------------------------------------------------------------------

    def _deliver_all(self) -> None:
        delivered: deque[Transfer] = deque()  # the device may not have finished with these
        while (transfer := self._next(delivered)) is not None:
            try:
                self._await_copies(transfer)
                self._deliver(transfer)
            except Exception as problem:  # noqa: BLE001  # raised where the work is waited for
                self._fail(transfer, problem)
            else:
                delivered.append(transfer)
            del transfer  # or its tensors would live until the next operation
        self._release(delivered, wait=True)

    def _next(self, delivered: deque[Transfer]) -> Transfer | None:
        """Return the next operation, and release delivered ones with which the device has finished."""
        self._release(delivered, wait=False)
        if self._begun.empty():
            self._release(delivered, wait=True)
        return self._begun.get()

    def _release(self, delivered: deque[Transfer], *, wait: bool) -> None:
        while delivered:
            transfer = delivered[0]
            assert transfer.done is not None
            try:
                if wait:
                    transfer.done.synchronize()
                elif not transfer.done.query():
                    return
            except Exception as problem:  # noqa: BLE001  # raised where the work is waited for
                self._fail(transfer, problem)
            delivered.popleft()

    def _await_copies(self, transfer: Transfer) -> None:
        """Block until the copies back are queued."""
        if transfer.error is not None:
            raise transfer.error
        self._to_device.wait_event(transfer.ready)
        while transfer.number is not None and not self.lane.wait(transfer.number, _SLICE_S):
            if (reason := self._group.error()) and transfer.route.engine is not None:
                transfer.route.engine.abort(reason)

    def _deliver(self, transfer: Transfer) -> None:
        """Queue the remaining device work and publish the result."""
        stream = self._to_device
        for step in (transfer.route.end, transfer.route.operation.finish):
            if step is not None:
                stream.run(step)
        event = stream.record_event()
        self._undelivered.discard(id(transfer))
        transfer.on_end()
        transfer.work.deliver(event)
        stream.run(transfer.work.complete)
        transfer.done = stream.record_event()

    def _fail(self, transfer: Transfer, problem: Exception) -> None:
        """Raise a failure where the work is waited for, and abort the group: the others have begun it too."""
        kind = transfer.route.operation.kind
        error = self._group.explain(problem)
        if not isinstance(error, CommError):
            error = CommError(f"{kind} on {self._device.torch_device.type}: {problem}")
            error.__cause__ = problem
        if not self._group.error():
            self._group.abort(f"{kind}: {problem}")
        with suppress(Exception):  # copies that are queued; the device may be what has failed
            for stream in (self._to_host, self._to_device):
                stream.record_event().synchronize()
        if transfer.done is None:
            transfer.on_end()
        transfer.work.fail(error)
        self._undelivered.discard(id(transfer))


class MessageStaging(Staging):
    """The same for sends and receives, which end in any order: a receive may wait for long.

    They have a lane of their own, whose threads wait for the device alone, never for other ranks.
    """

    def __init__(self, device: Device, group: GroupControl) -> None:
        self._pending: dict[int, Transfer] = {}
        self._lock = threading.Lock()
        super().__init__(device, group, num_buffers=2, buffer_bytes=1)

    def begin(self, transfer: Transfer) -> None:
        """Begin a message.

        Raises:
            CommError: the group has failed.
        """
        with self._lock:
            self._send(transfer)
            assert transfer.number is not None
            self._pending[transfer.number] = transfer
            self._undelivered.add(id(transfer))

    def stop(self) -> None:
        """Join the threads; the group's engine was closed, which ends messages that are pending."""
        self.lane.stop()
        self._thread.join()

    def _next(self, delivered: deque[Transfer]) -> Transfer | None:
        self._release(delivered, wait=False)
        if (number := self.lane.next_ended(0)) is None:
            self._release(delivered, wait=True)
            number = self.lane.next_ended(_FOREVER_S)
        if number is None:
            return None
        with self._lock:
            return self._pending.pop(number)
