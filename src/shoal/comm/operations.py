"""Submits the operations of a process group, and keeps those in flight until they have an outcome."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store
from torch.futures import Future

from shoal.comm.engine import CollectiveEngine, CommError, EngineOptions, Operation
from shoal.comm.work import (
    BaseWork,
    MessageSource,
    called_by_backward,
    is_fp16_bucket,
    opaque_to_dynamo,
    typed_future,
)

_log = logging.getLogger(__name__)
_SLICE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Member:
    """A rank of a process group and its engine."""

    store: Store
    rank: int
    size: int
    name: str
    global_rank: int
    engine: CollectiveEngine
    options: EngineOptions


class InFlight:
    """An operation that the engine has begun: its memory, and its outcome once it has one.

    It does not refer to its process group, which keeps it until it is settled: a group that was dropped can
    be collected while operations are in flight.
    """

    def __init__(self, handle: int, operation: Operation) -> None:
        self.handle = handle
        self.error: Exception | None = None
        self._operation: Operation | None = operation
        self._lock = threading.Lock()

    @property
    def is_settled(self) -> bool:
        return self._operation is None

    def settle(self, error: Exception | None) -> None:
        """Complete the result of an operation that has ended, record the outcome, and release the memory."""
        with self._lock:
            if self._operation is None:
                return
            try:
                if error is None and self._operation.finish is not None:
                    self._operation.finish()
            except Exception as problem:  # noqa: BLE001  # raised where the work is waited for
                error = problem
            self.error = error
            self._operation = None


class Operations:
    """The operations of one group. Works refer to it, and not to the group.

    Args:
        member: this rank; its engine is closed with this object.
        timeout: deadline of operations that have none of their own.

    Attributes:
        pending: operations without an outcome; keeps their memory alive.
        messages: the same of sends and receives, one of which may stay for long.
        resources: closed by :meth:`close`, the last added first. They must not refer to this object, which
            may be garbage-collected without it; they are closed shortly after.
        after_engine: the same, closed after the engine.
    """

    def __init__(self, member: Member, timeout: timedelta) -> None:
        self.engine = member.engine
        self.timeout = timeout
        self.pending: dict[int, InFlight] = {}
        self.messages: dict[int, InFlight] = {}
        self.is_closed = False
        self._name = member.name
        self.resources = ExitStack()
        self.resources.callback(self.pending.clear)  # last: the engine reads and writes their memory
        self.resources.callback(self.messages.clear)
        self.after_engine = self.resources.enter_context(ExitStack())
        self.resources.callback(self.engine.close)
        _close_when_collected(self, self.resources)

    def submit(self, operation: Operation) -> EngineWork:
        """Begin an operation on tensors in host memory, which are kept alive until it completes."""
        handle = self.begin(operation)
        self.settle_ended()
        flight = self.pending[handle] = InFlight(handle, operation)
        return EngineWork(self, flight, operation)

    def settle_ended(self) -> bool:
        """Settle operations that have ended and that nobody waits for; return whether any are pending.

        The next operation calls it, also that of the backend in C++; at the latest :meth:`close` does.
        """
        while (oldest := next(iter(self.pending.values()), None)) is not None:
            if not self.advance(oldest, 0.0):
                return True
        return False

    def submit_message(self, operation: Operation) -> MessageWork:
        """Begin a send or receive, which does not count in the order of the group's operations."""
        self._require_open(operation)
        for each in list(self.messages.values()):
            self.advance(each, 0.0)
        handle = self.engine.submit(operation)
        flight = self.messages[handle] = InFlight(handle, operation)
        work = MessageWork(self, flight, operation)
        work.note_source(operation)
        return work

    def _require_open(self, operation: Operation) -> None:
        if self.is_closed:
            raise CommError(f"{operation.name}: this process group has been shut down; make a new one")

    def begin(self, operation: Operation) -> int:
        """Submit an operation to the engine, and return its handle.

        Errors are those of :meth:`CollectiveEngine.submit`; ``CommError`` too if the group was shut down.
        """
        self._require_open(operation)
        return self.engine.submit(operation)

    def close(self) -> None:
        """Leave the group and join its threads. Idempotent."""
        if self.is_closed:
            return
        for flight in [*self.pending.values(), *self.messages.values()]:
            self.advance(flight, 0.0)
        self.is_closed = True
        self.resources.close()

    # ---- called by works ----------------------------------------------------------------------------------

    def advance(self, flight: InFlight, left_s: float) -> bool:
        """Wait a short while, and at most ``left_s``; return whether the operation is settled."""
        if not flight.is_settled:
            try:
                if not self.engine.wait(flight.handle, min(_SLICE_S, left_s)):
                    if left_s > 0:
                        self.idle()
                    return False
            except CommError as error:
                flight.settle(error)
            else:
                flight.settle(None)
        self.pending.pop(flight.handle, None)
        self.messages.pop(flight.handle, None)
        return True

    def idle(self) -> None:
        """Log the engine's events, between two short waits of a long one."""
        for event in self.engine.take_events():
            _log.warning("group %s: %s", self._name, event)


# ---- works ----------------------------------------------------------------------------------------------


@opaque_to_dynamo
class EngineWork(BaseWork):
    """An operation of the engine. It keeps the group's operations, and so the engine, alive."""

    def __init__(self, owner: Operations, flight: InFlight, operation: Operation) -> None:
        super().__init__(operation.kind, operation.result)
        self.handle = flight.handle
        self._owner, self._flight = owner, flight

    def _advance(self, left_s: float) -> bool:
        is_settled = self._owner.advance(self._flight, left_s)
        self._error = self._flight.error
        return is_settled

    def is_completed(self) -> bool:
        return self._advance(0.0)

    def get_future(self) -> Future[Any]:
        """Return a future of the output tensors."""
        if is_fp16_bucket(self._result) and called_by_backward():
            self.wait()
            return typed_future(self._result)
        future, is_new = self._future_of([])
        if is_new:
            self._owner.engine.then(self.handle, self._complete_future)
        return future

    def _complete_future(self) -> None:
        """Set the future, once the engine has completed the operation or the group shuts down."""
        if not self._advance(0.0):  # its memory stays with the group until the engine is closed
            self._error = CommError(f"{self._name}: this process group was shut down before it had ended")
        if self._completion is not None:
            self._completion.set_result(None)


@opaque_to_dynamo
class MessageWork(MessageSource, EngineWork):
    """A send or receive."""


# ---- garbage collection ---------------------------------------------------------------------------------
# Python collects garbage on any thread and under any lock, where joining a thread can deadlock. Resources of
# a collected group are therefore closed by a thread that already exists; the collecting thread only puts them
# into a queue. shoal.comm.engine closes engines that are open when the interpreter exits.

# SimpleQueue: the garbage collector may call put() while the same thread is in put().
_collected: queue.SimpleQueue[ExitStack] = queue.SimpleQueue()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def _close_when_collected(owner: object, resources: ExitStack) -> None:
    """Close ``resources`` on a background thread once ``owner`` has been garbage-collected."""
    global _thread
    with _lock:
        if _thread is None or not _thread.is_alive():  # a forked child has no threads
            _thread = threading.Thread(target=_close_collected, name="shoal-ending", daemon=True)
            _thread.start()
    weakref.finalize(owner, _collected.put, resources).atexit = False


def _close_collected() -> None:
    while True:
        _collected.get().close()
