"""What an asynchronous collective returns: wait for it, ask it, or have a future of it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import Work
from torch.autograd.graph import _engine_run_backward
from torch.futures import Future

from shoal.comm.engine import CommError
from shoal.comm.untraced import untraced

NO_TIMEOUT = timedelta(0)

# A wait returns to Python this often, for signals and for what others ask of a rank that waits.
SLICE_S = 1.0


class Waiting(Protocol):
    """What works need of their group."""

    def is_done(self, handle: int) -> bool: ...
    def wait_once(self, handle: int, timeout_s: float) -> bool: ...
    def forget(self, handle: int) -> None: ...
    def complete_later(self, work: EngineWork) -> None: ...


@untraced
class SingleWork(Work):
    """What the works of a single operation share: it ends once, well or with an error."""

    def __init__(self) -> None:
        super().__init__()
        self._error: Exception | None = None

    def _has_ended(self) -> bool:
        raise NotImplementedError

    def is_success(self) -> bool:
        return self._has_ended() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def synchronize(self) -> None:
        self.wait()


def still_under_way(name: str, limit: timedelta) -> CommError:
    """Return the error of a wait that ends before its operation."""
    return CommError(
        f"{name}: waited {limit.total_seconds():g} s as asked and it is still under way; wait longer, or "
        "look which rank is late"
    )


@untraced
class EngineWork(SingleWork):
    """One operation of the engine.

    ``finish`` runs once, after the engine is done and before anybody sees the result. ``operands`` keeps
    alive the memory that the engine reads and writes.
    """

    def __init__(
        self,
        group: Waiting,
        handle: int,
        name: str,
        result: Any,
        operands: Sequence[Any],
        finish: Callable[[], None] | None,
    ) -> None:
        super().__init__()
        self._group = group
        self.handle = handle
        self._name = name
        self._result = result
        self._operands: Sequence[Any] = operands
        self._finish = finish
        self._lock = threading.Lock()
        self._settled = False
        self._begun: Future[Any] | None = None
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait until the result is there.

        Raises:
            CommError: the group has failed, or ``timeout`` has passed (the operation itself goes on until the
                deadline it was started with).
        """
        if not self._settled:
            self._await(timeout)
        if self._error is not None:
            raise self._error
        return True

    def _await(self, limit: timedelta) -> None:
        end = time.monotonic() + limit.total_seconds() if limit > NO_TIMEOUT else None
        try:
            while not self._group.wait_once(
                self.handle, SLICE_S if end is None else max(0.0, min(SLICE_S, end - time.monotonic()))
            ):
                if end is not None and time.monotonic() >= end:
                    raise still_under_way(self._name, limit)
        except CommError as error:
            if not self._group.is_done(self.handle):
                raise
            self.settle(error)
        else:
            self.settle(None)

    def settle(self, error: Exception | None) -> None:
        """Note that the engine is done with it."""
        with self._lock:
            if self._settled:
                return
            try:
                if error is None and self._finish is not None:
                    self._finish()
            except Exception as problem:
                error = problem
            self._error = error
            self._finish, self._operands = None, ()
            self._settled = True
        self._group.forget(self.handle)

    def settle_now(self) -> None:
        """Note the outcome of an operation that is done, or whose group ends."""
        error: CommError | None = None
        try:
            if not self._group.wait_once(self.handle, 0.0):
                error = CommError(f"{self._name}: this process group was shut down before it had ended")
        except CommError as problem:
            error = problem
        self.settle(error)

    def is_completed(self) -> bool:
        if not self._settled and self._group.is_done(self.handle):
            self.settle_now()
        return self._settled

    def _has_ended(self) -> bool:
        return self._settled

    def result(self) -> Any:
        return self._result

    def get_future(self) -> Future[Any]:
        """Return a future of the output tensors."""
        if is_fp16_bucket(self._result) and _called_by_backward():
            self.wait()
            return typed_future(self._result)
        with self._lock:
            if self._future is not None:
                return self._future
            begun: Future[Any] = Future()
            self._begun = begun
            # A failure raised by a callback reaches C++ (DDP's reducer) as the error of this second future.
            self._future = begun.then(self._outcome)
            future = self._future
        self._group.complete_later(self)
        return future

    def complete_future(self) -> None:
        """Called by the completer once the engine is done."""
        if not self._settled:
            self.settle_now()
        if self._begun is not None:
            self._begun.set_result(None)

    def _outcome(self, _: Future[Any]) -> Any:
        if self._error is not None:
            raise self._error
        return self._result


def is_fp16_bucket(result: Any) -> bool:
    """Return whether the result may be a bucket of DDP's built-in hook FP16_COMPRESS."""
    return (
        isinstance(result, list) and len(result) == 1 and getattr(result[0], "dtype", None) == torch.float16
    )


def _called_by_backward() -> bool:
    """Return whether C++ in a backward pass, such as DDP's reducer, called the calling method."""
    caller = sys._getframe(1).f_back  # none in a thread of autograd's
    return caller is None or caller.f_code is _engine_run_backward.__code__


def typed_future(tensors: list[torch.Tensor]) -> Future[Any]:
    """Return a completed future that C++ takes for a list of tensors.

    A ``torch.futures.Future`` holds Python objects, and the built-in hook FP16_COMPRESS refuses those. What
    ``torch._C.fork`` (``torch.jit.fork`` without its warning) returns for a Python function has the type of
    its value, but is complete at once: the backward pass waits for this bucket.
    """
    future: Any = torch._C.fork(lambda: tensors)
    typed: Future[Any] = future
    return typed


@untraced
class JoinedWork(Work):
    """Several works as one."""

    def __init__(self, works: Sequence[Work], result: Any) -> None:
        super().__init__()
        self._works = tuple(works)
        self._result = result

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def result(self) -> Any:
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Future[Any]:
        def outcome(all_done: Future[Any]) -> Any:
            for part in all_done.value():
                part.wait()  # all are done: this raises, and joins streams
            return self._result

        return torch.futures.collect_all([work.get_future() for work in self._works]).then(outcome)
