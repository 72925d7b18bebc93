"""``Work`` objects: wait for a collective, poll it, or get its future."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FunctionType
from typing import Any, Protocol, TypeVar

import torch
from torch._C._distributed_c10d import Work
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.autograd.graph import _engine_run_backward
from torch.futures import Future

from shoal.comm.engine import CommError
from shoal.comm.tensors import CollectiveRequest

NO_TIMEOUT = timedelta(0)
_POLL_S = 0.03

# Applies to the method and to the functions it calls. torch.compiler.disable does the same, but imports
# Dynamo, which takes seconds.
_SKIP = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)

_Class = TypeVar("_Class", bound=type)


def opaque_to_dynamo(cls: _Class) -> _Class:
    """Exclude the public methods of a class from tracing by ``torch.compile``.

    Dynamo breaks the graph at a method of a process group and calls it. In torch's own groups that method is
    C++. A Python method would be compiled as the next frame, which fails: to Dynamo a process group is an
    opaque object that has only the attributes which torch registered.
    """
    for method in vars(cls).values():
        if isinstance(method, FunctionType) and not method.__name__.startswith("_"):
            set_code_exec_strategy(method.__code__, _SKIP)
            vars(method)["_torchdynamo_disable"] = True  # also prevents inlining into the caller's graph
    return cls


def wait_until(
    name: str,
    timeout: timedelta,
    wait_once: Callable[[float], bool],
    *,
    slice_s: float = 1.0,
    poll: Callable[[], None] | None = None,
) -> None:
    """Wait in slices, so that Python handles signals and ``poll`` runs between two of them.

    Args:
        name: the operation, for the error message.
        timeout: the longest wait; none if zero.
        wait_once: waits for at most the given number of seconds; returns whether the operation has completed.
        slice_s: the longest single wait.
        poll: called after each slice in which the operation did not complete; may raise.

    Raises:
        CommError: ``timeout`` has passed.
    """
    deadline = time.monotonic() + timeout.total_seconds() if timeout > NO_TIMEOUT else None
    while not wait_once(slice_s if deadline is None else max(0.0, min(slice_s, deadline - time.monotonic()))):
        if deadline is not None and time.monotonic() >= deadline:
            raise CommError(
                f"{name}: waited {timeout.total_seconds():g} s as asked and it is still pending; wait "
                "longer, or find out which rank is late"
            )
        if poll is not None:
            poll()


def first_cause(problem: Exception, error: Callable[[], str | None], limit_s: float) -> Exception:
    """Return the engine's error, which names the rank, if the group fails in time; else ``problem``.

    A rank that dies resets all connections, and one that leaves after a failure closes them. Only the group's
    engine then receives the first cause.

    Args:
        problem: found on another connection.
        error: returns the reason for which the group has failed, if it has.
        limit_s: the longest wait for it.
    """
    end = time.monotonic() + limit_s
    while not (reason := error()):
        if time.monotonic() >= end:
            return problem
        time.sleep(_POLL_S)
    return CommError(reason)


class WorkOwner(Protocol):
    """Operations of a process group that its works call."""

    def is_done(self, handle: int) -> bool: ...
    def wait_once(self, handle: int, timeout_s: float) -> bool: ...
    def forget(self, handle: int) -> None: ...
    def complete_later(self, work: EngineWork) -> None: ...


@opaque_to_dynamo
class BaseWork(Work):
    """State of a single operation: its result or its error."""

    def __init__(self, name: str, result: Any) -> None:
        super().__init__()
        self._name = name
        self._result = result
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._completion: Future[Any] | None = None
        self._future: Future[Any] | None = None

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> Any:
        return self._result

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _outcome(self, _: Future[Any]) -> Any:
        self._raise_error()
        return self._result

    def _future_of(self, devices: list[torch.device]) -> tuple[Future[Any], bool]:
        """Return the future of the result, and whether this call has created it."""
        with self._lock:
            is_new = self._future is None
            if self._future is None:
                self._completion = Future(devices=list(devices))
                # DDP's reducer, in C++, gets an error that a callback raises as that of this second future.
                self._future = self._completion.then(self._outcome)
            return self._future, is_new


@opaque_to_dynamo
class EngineWork(BaseWork):
    """An operation of the engine.

    Args:
        group: the process group.
        handle: the engine's number of the operation.
        request: its tensors are kept alive until the operation completes; its ``finish`` runs once, after
            that and before the result is visible.
    """

    def __init__(self, group: WorkOwner, handle: int, request: CollectiveRequest) -> None:
        super().__init__(request.kind, request.result)
        self._group = group
        self.handle = handle
        self._request: CollectiveRequest | None = request
        self._settled = False

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Block until the result is available.

        Raises:
            CommError: the group has failed, or ``timeout`` has passed (the operation itself continues until
            the
                deadline with which it was submitted).
        """
        if not self._settled:
            try:
                wait_until(self._name, timeout, lambda slice_s: self._group.wait_once(self.handle, slice_s))
            except CommError as error:
                if not self._group.is_done(self.handle):
                    raise
                self._settle(error)
            else:
                self._settle(None)
        self._raise_error()
        return True

    def _settle(self, error: Exception | None) -> None:
        """Record the outcome of an operation that the engine has completed."""
        with self._lock:
            if self._request is None:
                return
            try:
                if error is None and self._request.finish is not None:
                    self._request.finish()
            except Exception as problem:
                error = problem
            self._error = error
            self._request = None
            self._settled = True
        self._group.forget(self.handle)

    def _settle_now(self) -> None:
        """Record the outcome of an operation that has completed, or whose group shuts down."""
        error: CommError | None = None
        try:
            if not self._group.wait_once(self.handle, 0.0):
                error = CommError(f"{self._name}: this process group was shut down before it had ended")
        except CommError as problem:
            error = problem
        self._settle(error)

    def is_completed(self) -> bool:
        if not self._settled and self._group.is_done(self.handle):
            self._settle_now()
        return self._settled

    def get_future(self) -> Future[Any]:
        """Return a future of the output tensors."""
        if is_fp16_bucket(self._result) and _called_by_backward():
            self.wait()
            return typed_future(self._result)
        future, is_new = self._future_of([])
        if is_new:
            self._group.complete_later(self)
        return future

    def complete_future(self) -> None:
        """Set the future. The completer calls it once the engine has completed the operation."""
        if not self._settled:
            self._settle_now()
        if self._completion is not None:
            self._completion.set_result(None)


def is_fp16_bucket(result: Any) -> bool:
    """Return whether the result may be a bucket of DDP's built-in hook FP16_COMPRESS."""
    return (
        isinstance(result, list) and len(result) == 1 and getattr(result[0], "dtype", None) == torch.float16
    )


def _called_by_backward() -> bool:
    """Return whether the caller's caller is C++ in a backward pass, such as DDP's reducer."""
    caller = sys._getframe(1).f_back  # none on an autograd thread
    return caller is None or caller.f_code is _engine_run_backward.__code__


def typed_future(tensors: list[torch.Tensor]) -> Future[Any]:
    """Return a completed future that C++ accepts as one of a list of tensors.

    A ``torch.futures.Future`` holds Python objects, which the built-in hook FP16_COMPRESS rejects. The result
    of ``torch._C.fork`` (``torch.jit.fork`` without its warning) for a Python function has the type of its
    value, but is complete at once, so the backward pass blocks for this bucket.
    """
    future: Any = torch._C.fork(lambda: tensors)
    typed: Future[Any] = future
    return typed


@opaque_to_dynamo
class JoinedWork(BaseWork):
    """Several works as one."""

    def __init__(self, works: Sequence[Work], result: Any) -> None:
        super().__init__("several collectives", result)
        self._works = tuple(works)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def get_future(self) -> Future[Any]:
        def outcome(completed: Future[Any]) -> Any:
            for future in completed.value():
                future.wait()  # does not block; raises errors and synchronizes streams
            return self._result

        return torch.futures.collect_all([work.get_future() for work in self._works]).then(outcome)
