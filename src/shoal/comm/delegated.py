"""A collective that the inner group does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Work
from torch.futures import Future

from shoal.comm.engine import CommError
from shoal.comm.inner import InnerGloo
from shoal.comm.untraced import untraced
from shoal.comm.work import NO_TIMEOUT, SingleWork, still_under_way

_POLL_S = 0.2


@untraced
class DelegatedWork(SingleWork):
    """A collective of the inner group. A failure that the engine finds meanwhile ends the wait."""

    def __init__(
        self,
        inner: InnerGloo,
        work: Work,
        name: str,
        end: Callable[[], None],
        result: Any,
        finish: Callable[[], None] | None,
    ) -> None:
        super().__init__()
        self._inner = inner
        self._work = work
        self._name = name
        self._result = result
        self._done = threading.Event()
        self._end, self._finish = end, finish
        self._future: Future[Any] = work.get_future().then(self._outcome)
        self._future.add_done_callback(lambda _: self._done.set())

    def _outcome(self, future: Future[Any]) -> Any:
        self._end()
        try:
            value = future.value()
            if self._finish is not None:
                self._finish()
        except Exception as problem:
            self._error = self._inner.explain(problem)
            raise self._error from problem
        return value if self._result is None else self._result

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        end = time.monotonic() + timeout.total_seconds() if timeout > NO_TIMEOUT else None
        while not self._done.wait(_POLL_S):
            if reason := self._inner.error():
                raise CommError(reason)
            if end is not None and time.monotonic() >= end:
                raise still_under_way(self._name, timeout)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def _has_ended(self) -> bool:
        return self._done.is_set()

    def result(self) -> Any:
        return self._result

    def get_future(self) -> Future[Any]:
        return self._future
