"""Defines ``Work`` objects: wait for a collective, poll it, or get its future."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.autograd.graph import _engine_run_backward
from torch.futures import Future

from shoal.comm.engine import CommError, Operation

NO_TIMEOUT = timedelta(0)
"""Of a wait, as torch has it."""
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


def first_cause(problem: Exception, error: Callable[[], str | None], limit_s: float) -> Exception:
    """Return the engine's error, which names the rank, if the group fails in time; else ``problem``.

    A rank that dies resets all connections, and one that leaves after a failure closes them. Only the group's
    engine then receives the first cause.

    Args:
        problem: an error on another connection.
        error: returns the reason for which the group has failed, if it has.
        limit_s: the longest wait for it.
    """
    end = time.monotonic() + limit_s
    while not (reason := error()):
        if time.monotonic() >= end:
            return problem
        time.sleep(_POLL_S)
    return CommError(reason)


@opaque_to_dynamo
class MessageSource:
    """Knows the rank that has sent a received message; mixed into the works of messages."""

    _rank: Tensor | None = None

    def note_source(self, operation: Operation) -> None:
        """Keep the memory to which the number of the rank is written."""
        self._rank = operation.memory[0] if operation.kind == "recv" else None

    def source_rank(self) -> int:
        """Return the rank that has sent the received tensor; -1 before it arrives, and for a send."""
        return -1 if self._rank is None else int(self._rank.item())

    _source_rank = source_rank


class BaseWork(Work):
    """A single operation: its result or its error. :meth:`wait` is the same for all kinds of operations.

    Args:
        name: the operation, for messages.
        result: value of the future.
        timeout: the longest wait of a caller who gives none; zero: no limit.
    """

    def __init__(self, name: str, result: Any, timeout: timedelta = NO_TIMEOUT) -> None:
        super().__init__()
        self._name = name
        self._result = result
        self._timeout = timeout
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._completion: Future[Any] | None = None
        self._future: Future[Any] | None = None

    def _advance(self, left_s: float) -> bool:
        """Wait a short while, and at most ``left_s``; return whether the outcome is known.

        Raises:
            CommError: the group has failed while the operation is pending.
        """
        raise NotImplementedError

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Block until the result is available, in short waits, so that Python handles signals.

        Raises:
            CommError: the group has failed, or ``timeout`` has passed (less than zero: at once; the operation
                itself continues until the deadline with which it was submitted).
        """
        limit = timeout if timeout != NO_TIMEOUT else self._timeout
        end = time.monotonic() + limit.total_seconds() if limit != NO_TIMEOUT else math.inf
        while not self._advance(max(0.0, end - time.monotonic())):
            if time.monotonic() >= end:
                raise CommError(
                    f"{self._name}: waited {limit.total_seconds():g} s and it is still pending; wait longer, "
                    "or find out which rank is late"
                )
        self._raise_error()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        self.is_completed()  # records the outcome
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


def is_fp16_bucket(result: Any) -> bool:
    """Return whether the result may be a bucket of DDP's built-in hook FP16_COMPRESS."""
    return (
        isinstance(result, list) and len(result) == 1 and getattr(result[0], "dtype", None) == torch.float16
    )


def called_by_backward() -> bool:
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

    def __init__(self, works: Sequence[BaseWork], result: Any) -> None:
        super().__init__("several collectives", result)
        self._works = tuple(works)

    def _advance(self, left_s: float) -> bool:
        for work in self._works:
            if not work._advance(left_s):
                return False
            work._raise_error()
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
