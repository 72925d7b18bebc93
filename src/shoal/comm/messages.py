"""Messages from one rank to another, over the inner group: in the order of the calls, whoever is late."""

from __future__ import annotations

import threading
import time
from collections import deque
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Work

from shoal.comm.engine import CommError
from shoal.comm.inner import InnerGloo, Start
from shoal.comm.operands import Finish
from shoal.comm.untraced import untraced
from shoal.comm.work import NO_TIMEOUT, SingleWork


class Messages:
    """The messages of a group. They start once both ranks have an inner group."""

    def __init__(self, inner: InnerGloo) -> None:
        self._inner = inner
        self._peers: dict[int, _Peer] = {}
        self._lock = threading.Lock()

    def start(self, peer: int, start: Start, timeout: timedelta, finish: Finish | None = None) -> MessageWork:
        """Start a message now if ``peer`` has an inner group, else as soon as it has; the order is kept."""
        with self._lock:
            queue = self._peers.get(peer)
            if queue is None:
                queue = self._peers[peer] = _Peer(self._inner, peer)
        return queue.start(self._inner.group(), start, timeout, finish)


class _Peer:
    """Messages to and from one rank, in the order of the calls."""

    def __init__(self, inner: InnerGloo, rank: int) -> None:
        self._inner = inner
        self._rank = rank
        self._ready = False
        self._waiting: deque[tuple[Start, MessageWork]] = deque()
        self._lock = threading.Lock()

    def start(self, group: Any, start: Start, timeout: timedelta, finish: Finish | None) -> MessageWork:
        work = MessageWork(self._inner, timeout, finish)
        with self._lock:
            self._ready = self._ready or (not self._waiting and self._inner.is_ready(self._rank))
            if self._ready:
                work.started(start(group))
                return work
            self._waiting.append((start, work))
            if len(self._waiting) == 1:
                threading.Thread(target=self._start_waiting, args=(group, timeout), daemon=True).start()
        return work

    def _start_waiting(self, group: Any, timeout: timedelta) -> None:
        problem: Exception | None = None
        try:
            self._inner.until_ready(self._rank, timeout)
        except Exception as failure:
            problem = failure
        with self._lock:
            while self._waiting:
                start, work = self._waiting.popleft()
                try:
                    if problem is not None:
                        raise problem
                    work.started(start(group))
                except Exception as failure:
                    work.failed(failure)
            self._ready = problem is None


@untraced
class MessageWork(SingleWork):
    """A message under way to or from one rank."""

    def __init__(self, inner: InnerGloo, timeout: timedelta, finish: Finish | None = None) -> None:
        super().__init__()
        self._inner = inner
        self._finish = finish
        self._timeout = timeout
        self._is_started = threading.Event()
        self._work: Work | None = None
        self._done = False

    def started(self, work: Work) -> None:
        self._work = work
        self._is_started.set()

    def failed(self, error: Exception) -> None:
        self._error = error
        self._is_started.set()

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        if self._error is None and not self._done:
            limit = timeout if timeout > NO_TIMEOUT else self._timeout
            begin = time.monotonic()
            if not self._is_started.wait(limit.total_seconds()):
                raise CommError(f"a message was not taken within {limit.total_seconds():g} s by its peer")
            if self._work is not None:
                left = limit - timedelta(seconds=time.monotonic() - begin)
                try:
                    self._work.wait(max(left, timedelta(milliseconds=1)))
                    if self._finish is not None:
                        self._finish()
                    self._done = True
                except RuntimeError as problem:
                    self._error = self._inner.explain(problem)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        if self._error is not None or self._done:
            return True
        return self._work is not None and self._work.is_completed()

    def _has_ended(self) -> bool:
        return self._done

    def _source_rank(self) -> int:
        return -1 if self._work is None else int(self._work._source_rank())

    def source_rank(self) -> int:
        return self._source_rank()
