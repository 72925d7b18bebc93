"""The inner gloo group: for what the engine does not do itself. It is made when it is first needed.

It is made without waiting for anybody: each rank publishes its address in the store, and gloo connects two
ranks when they first talk. So two ranks may send to each other while a third is elsewhere.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, Work
from torch.futures import Future

from shoal.comm.engine import CommError
from shoal.comm.work import NO_TIMEOUT

_POLL_S = 0.2
_STORE_POLL_S = 0.01
_MEETING_LIMIT = timedelta(minutes=30)
# A rank that dies resets gloo's connections as well as ours. Ours name it, within this time.
_NAMING_S = 3.0
_ABORT_TAG = 0x7FFF_FFF0

Start = Callable[[Any], Work]


class InnerGloo:
    """The gloo group inside a group, and the thread that breaks it off when the engine reports a failure."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        address: str,
        timeout: timedelta,
        error: Callable[[], str | None],
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._address = address
        self._timeout = timeout
        self.error = error
        self._group: Any = None
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._broken_off = False
        self._meeting = _MeetingStore(
            PrefixStore("gloo/", store), lambda: self._stopped.is_set() or self.error() is not None
        )
        self._peers: dict[int, _Peer] = {}

    @property
    def exists(self) -> bool:
        return self._group is not None

    def group(self) -> Any:
        """Return the inner group, made now if it has not been."""
        with self._lock:
            if self._stopped.is_set():
                raise CommError("this process group has been shut down; make a new one")
            if self._group is None:
                gloo: Any = ProcessGroupGloo
                options = gloo._Options()
                options._devices = [gloo.create_device(hostname=self._address, lazy_init=True)]
                options._timeout = self._timeout
                self._group = gloo(self._meeting, self._rank, self._size, options)
                self._store.set(f"inner/{self._rank}", "1")
                threading.Thread(target=self._guard, name="shoal-inner-group", daemon=True).start()
            return self._group

    def join_if_wanted(self) -> None:
        """Make the inner group if a rank waits for a message from anybody; called now and then by slow "
        "waits."""
        if self._group is None and self._store.check(["inner/wanted"]):
            self.group()

    def want_all(self) -> None:
        """Ask every rank to make its inner group."""
        self._store.set("inner/wanted", "1")

    def is_ready(self, peer: int) -> bool:
        return bool(self._store.check([f"inner/{peer}"]))

    def until_ready(self, peer: int, timeout: timedelta) -> None:
        """Wait until ``peer`` has made its inner group.

        Raises:
            CommError: it has not in this time, or the group failed.
        """
        end = time.monotonic() + timeout.total_seconds()
        while not self.is_ready(peer):
            if reason := self.error():
                raise CommError(reason)
            if self._stopped.is_set() or time.monotonic() >= end:
                raise CommError(
                    f"rank {peer} of the group did not send or receive within {timeout.total_seconds():g} s; "
                    "see whether it still runs, or give the group a longer timeout"
                )
            time.sleep(_STORE_POLL_S)

    def start_when_ready(self, peer: int, start: Start, timeout: timedelta) -> MessageWork:
        """Start a message now if ``peer`` has an inner group, else as soon as it has; the order is kept."""
        with self._lock:
            queue = self._peers.get(peer)
            if queue is None:
                queue = self._peers[peer] = _Peer(self, peer)
        return queue.start(self.group(), start, timeout)

    def explain(self, problem: Exception) -> Exception:
        """Return the engine's reason, which names the rank, if the group has failed; else the problem "
        "itself."""
        end = time.monotonic() + (_NAMING_S if "imed out" not in str(problem) else 0.0)
        while True:
            if reason := self.error():
                return CommError(reason)
            if time.monotonic() >= end:
                return problem
            time.sleep(_POLL_S / 4)

    def _guard(self) -> None:
        while not self._stopped.wait(_POLL_S):
            if self.error():
                self._break_off()
                return

    def _break_off(self) -> None:
        # gloo closes all connections of a group when an application's wait for a message runs out of time,
        # which ends every operation under way. It has no other way to be told.
        with self._lock:
            group, peers = self._group, range(self._size)
            if group is None or self._broken_off:
                return
            self._broken_off = True
        peer = next((rank for rank in peers if rank != self._rank and self.is_ready(rank)), None)
        if peer is not None:
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        if self._group is not None:
            self._group._set_default_timeout(timeout)

    def stop(self) -> None:
        """End the inner group; what is still under way after a failure is broken off."""
        self._stopped.set()
        if self.error():
            self._break_off()
        with self._lock:
            self._group = None
            self._peers.clear()


class _MeetingStore(Store):
    """The store as gloo sees it. Its threads wait here for ranks that may never come, but no longer than the
    group lives: a group whose threads wait cannot be ended."""

    def __init__(self, store: Store, must_end: Callable[[], bool]) -> None:
        super().__init__()
        self._store = store
        self._must_end = must_end

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = _MEETING_LIMIT) -> None:
        end = time.monotonic() + timeout.total_seconds()
        while not self._store.check(keys):
            if self._must_end() or time.monotonic() >= end:
                raise RuntimeError(f"nobody came to meet at {', '.join(keys)}")
            time.sleep(_STORE_POLL_S)


class _Peer:
    """Messages to and from one rank, in the order of the calls."""

    def __init__(self, inner: InnerGloo, rank: int) -> None:
        self._inner = inner
        self._rank = rank
        self._ready = False
        self._waiting: deque[tuple[Start, MessageWork]] = deque()
        self._lock = threading.Lock()

    def start(self, group: Any, start: Start, timeout: timedelta) -> MessageWork:
        work = MessageWork(self._inner, timeout)
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


class MessageWork(Work):
    """A message under way to or from one rank."""

    def __init__(self, inner: InnerGloo, timeout: timedelta) -> None:
        super().__init__()
        self._inner = inner
        self._timeout = timeout
        self._is_started = threading.Event()
        self._work: Work | None = None
        self._error: Exception | None = None
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

    def is_success(self) -> bool:
        return self._done and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def synchronize(self) -> None:
        self.wait()

    def _source_rank(self) -> int:
        return -1 if self._work is None else int(self._work._source_rank())

    def source_rank(self) -> int:
        return self._source_rank()


class DelegatedWork(Work):
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
        self._error: Exception | None = None
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
                raise CommError(
                    f"{self._name}: waited {timeout.total_seconds():g} s as asked and it is still under "
                    "way; wait longer, or look which rank is late"
                )
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> Any:
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Future[Any]:
        return self._future
