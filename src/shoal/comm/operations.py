"""Submits the operations of a process group, and keeps those in flight until they have an outcome."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import Store

from shoal.comm.completer import CallbackThread, Completer
from shoal.comm.engine import CollectiveEngine, CommError, EngineOptions, Operation
from shoal.comm.work import EngineWork, InFlight, MessageWork
from shoal.errors import UsageError

_log = logging.getLogger(__name__)
_SLICE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Membership:
    """A rank of a process group and its engine."""

    store: Store
    rank: int
    size: int
    name: str
    global_rank: int
    engine: CollectiveEngine
    options: EngineOptions


class Operations:
    """The operations of one group. Works refer to it, and not to the group.

    Args:
        member: this rank; its engine is closed with this object.
        timeout: deadline of operations that have none of their own.

    Attributes:
        sequence: number of operations begun.
        pending: operations without an outcome; keeps their memory alive.
        messages: the same of sends and receives, one of which may stay for long.
        resources: what :meth:`close` closes, the last added first. Whatever is added must not refer to this
            object, which may be garbage-collected without it; its resources are closed shortly after.
    """

    def __init__(self, member: Membership, timeout: timedelta) -> None:
        self.engine = member.engine
        self.timeout = timeout
        self.sequence = 0
        self.pending: dict[int, InFlight] = {}
        self.messages: dict[int, InFlight] = {}
        self.is_closed = False
        self._name = member.name
        self._is_ordered = member.options.ordered_callbacks
        self._thread = CallbackThread()
        self._completer = Completer(self.engine, self._thread)
        self._submitting = threading.Lock()
        self._num_begun = 0
        """by the program; those of callbacks are not counted"""
        self.resources = ExitStack()
        self.resources.callback(self.pending.clear)  # last: the engine reads and writes their memory
        self.resources.callback(self.messages.clear)
        self.resources.callback(self.engine.close)
        self.resources.callback(self._completer.stop)
        _close_when_collected(self, self.resources)

    def submit(self, operation: Operation) -> EngineWork:
        """Begin an operation on tensors in host memory, which are kept alive until it completes."""
        handle = self.begin(operation)
        flight = self.pending[handle] = InFlight(handle, operation)
        # Operations that nobody waits for are settled here, at the latest when the group shuts down.
        while (oldest := next(iter(self.pending.values()), flight)) is not flight:
            if not self.advance(oldest, 0.0):
                break
        return EngineWork(self, flight, operation)

    def submit_message(self, operation: Operation) -> MessageWork:
        """Begin a send or receive, which has no place in the order of the group's operations."""
        self._require_open(operation)
        for each in list(self.messages.values()):
            self.advance(each, 0.0)
        handle = self.engine.submit(operation)
        flight = self.messages[handle] = InFlight(handle, operation)
        return MessageWork(self, flight, operation)

    def _require_open(self, operation: Operation) -> None:
        if self.is_closed:
            raise CommError(f"{operation.name}: this process group has been shut down; make a new one")

    def begin(self, operation: Operation) -> int:
        """Submit an operation of the program, or of a callback, to the engine, and return its handle.

        Raises:
            CommError: the group has failed or was shut down, or, with ``ordered_callbacks``, earlier
                callbacks have not returned in time.
            UsageError: a callback submits an operation after the program has submitted others.
        """
        self._require_open(operation)
        callback = self._thread.task
        if callback is None and self._is_ordered:
            self._completer.wait_until_idle(operation.name, self.timeout)
        with self._submitting:
            if callback is None:
                self._num_begun += 1
            elif self._num_begun > callback.num_begun:
                raise UsageError(
                    f"a callback begins {operation.name}, and the program has begun other collectives of "
                    "this group since it asked for the future: each rank may do so in another order. Make "
                    "the group with pg_options=EngineOptions(ordered_callbacks=True), or begin nothing else "
                    "until the callback has ended (with DistributedDataParallel: have one bucket)"
                )
            handle = self.engine.submit(operation)
        self.sequence += 1
        return handle

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

    def complete_later(self, work: EngineWork) -> None:
        """Have the work's future set once the operation is done."""
        callback = self._thread.task
        self._completer.add(work, self._num_begun if callback is None else callback.num_begun)


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
