"""Runs operations that the engine does not implement on an inner gloo group, created on first use.

Creating it waits for no other rank: each rank publishes its address in the store, and gloo connects two ranks
when they first exchange data. Two ranks can therefore exchange messages while a third one is busy.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Work
from torch.futures import Future

from shoal.comm.devices import Device
from shoal.comm.engine import CommError
from shoal.comm.rendezvous import Membership
from shoal.comm.store import InterruptibleStore, wait_for_keys
from shoal.comm.tensors import Finish
from shoal.comm.work import NO_TIMEOUT, BaseWork, first_cause, opaque_to_dynamo, wait_until

_POLL_S = 0.2
_ENGINE_ERROR_S = 3.0
"""Time within which the engine names a rank that has died."""
_ABORT_TAG = 0x7FFF_FFF0

Start = Callable[[Any], Work]
"""Starts an operation on the inner group, its argument."""


class GlooFallback:
    """The inner gloo group of a process group, aborted when the engine reports a failure."""

    def __init__(self, group: Membership, address: str, timeout: timedelta) -> None:
        self._store, self._rank, self._size = group.store, group.rank, group.size
        self._address, self._timeout = address, timeout
        self.error = group.engine.error
        self._group: Any = None
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._aborted = False
        self._rendezvous = InterruptibleStore(PrefixStore("gloo/", group.store), self._must_end)
        self._peers: dict[int, _PeerQueue] = {}

    def group(self) -> Any:
        """Return the inner group; create it on the first call."""
        with self._lock:
            if self._stopped.is_set():
                raise CommError("this process group has been shut down; make a new one")
            if self._group is None:
                gloo: Any = ProcessGroupGloo
                options = gloo._Options()
                options._devices = [gloo.create_device(hostname=self._address, lazy_init=True)]
                options._timeout = self._timeout
                self._group = gloo(self._rendezvous, self._rank, self._size, options)
                self._store.set(f"inner/{self._rank}", "1")
                threading.Thread(target=self._watch, name="shoal-inner-group", daemon=True).start()
            return self._group

    def join_if_wanted(self) -> None:
        """Create the inner group if a rank waits in ``recv_anysource``; long waits poll this."""
        if self._group is None and self._store.check(["inner/wanted"]):
            self.group()

    def connect_all(self) -> Any:
        """Return the inner group once every rank has created its own.

        Raises:
            CommError: a rank has not within the group's timeout, or the group failed.
        """
        group = self.group()
        self._store.set("inner/wanted", "1")
        for peer in range(self._size):
            if peer != self._rank:
                self.wait_for_peer(peer, self._timeout)
        return group

    def is_ready(self, peer: int) -> bool:
        return bool(self._store.check([f"inner/{peer}"]))

    def wait_for_peer(self, peer: int, timeout: timedelta) -> None:
        """Wait until ``peer`` has created its inner group.

        Raises:
            CommError: it has not within ``timeout``, or the group failed.
        """
        if not wait_for_keys(self._store, [f"inner/{peer}"], self._must_end, timeout):
            raise CommError(
                self.error()
                or f"rank {peer} of the group did not send or receive within {timeout.total_seconds():g} s; "
                "see whether it still runs, or give the group a longer timeout"
            )

    def message(self, peer: int, start: Start, finish: Finish | None = None) -> PointToPointWork:
        """Start a send or receive now if ``peer`` has its inner group, else when it has; in call order."""
        group = self.group()
        with self._lock:
            if peer not in self._peers:
                self._peers[peer] = _PeerQueue(self, peer)
        return self._peers[peer].start(group, start, self._timeout, finish)

    def explain(self, problem: Exception) -> Exception:
        """Return the engine's error, which names the rank, if the group has failed; else ``problem``."""
        return first_cause(problem, self.error, _ENGINE_ERROR_S if "imed out" not in str(problem) else 0.0)

    def _must_end(self) -> bool:
        return self._stopped.is_set() or self.error() is not None

    def _watch(self) -> None:
        while not self._stopped.wait(_POLL_S):
            if self.error():
                self._abort()
                return

    def _abort(self) -> None:
        # gloo has no abort. When an application's wait for a message times out, it closes all connections of
        # the group, which ends every pending operation.
        with self._lock:
            group = self._group
            if group is None or self._aborted:
                return
            self._aborted = True
        peer = next((rank for rank in range(self._size) if rank != self._rank and self.is_ready(rank)), None)
        if peer is not None:
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        if self._group is not None:
            self._group._set_default_timeout(timeout)

    def stop(self) -> None:
        """Drop the inner group; abort operations that are pending after a failure."""
        self._stopped.set()
        if self.error():
            self._abort()
        with self._lock:
            self._group = None


@opaque_to_dynamo
class GlooWork(BaseWork):
    """A collective of the inner group. A failure that the engine detects ends the wait."""

    def __init__(
        self,
        fallback: GlooFallback,
        work: Work,
        name: str,
        on_end: Callable[[], None],
        result: Any,
        finish: Finish | None,
    ) -> None:
        super().__init__(name, result)
        self._fallback = fallback
        self._work = work
        self._done = threading.Event()
        self._on_end, self._finish = on_end, finish
        self._future: Future[Any] = work.get_future().then(self._complete)
        self._future.add_done_callback(lambda _: self._done.set())

    def _complete(self, future: Future[Any]) -> Any:
        self._on_end()
        try:
            value = future.value()
            if self._finish is not None:
                self._finish()
        except Exception as problem:
            self._error = self._fallback.explain(problem)
            raise self._error from problem
        return value if self._result is None else self._result

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        wait_until(self._name, timeout, self._done.wait, slice_s=_POLL_S, poll=self._poll)
        self._raise_error()
        return True

    def _poll(self) -> None:
        if reason := self._fallback.error():
            raise CommError(reason)

    def is_completed(self) -> bool:
        return self._done.is_set()

    def get_future(self) -> Future[Any]:
        return self._future


class _PeerQueue:
    """Sends to and receives from one rank, in the order of the calls."""

    def __init__(self, fallback: GlooFallback, rank: int) -> None:
        self._fallback = fallback
        self._rank = rank
        self._ready = False
        self._waiting: deque[tuple[Start, PointToPointWork]] = deque()
        self._lock = threading.Lock()

    def start(self, group: Any, start: Start, timeout: timedelta, finish: Finish | None) -> PointToPointWork:
        work = PointToPointWork(self._fallback, timeout, finish)
        with self._lock:
            self._ready = self._ready or (not self._waiting and self._fallback.is_ready(self._rank))
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
            self._fallback.wait_for_peer(self._rank, timeout)
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


@opaque_to_dynamo
class PointToPointWork(BaseWork):
    """A send or receive."""

    def __init__(self, fallback: GlooFallback, timeout: timedelta, finish: Finish | None = None) -> None:
        super().__init__("a message", None)
        self._fallback = fallback
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
                    self._error = self._fallback.explain(problem)
        self._raise_error()
        return True

    def is_completed(self) -> bool:
        if self._error is not None or self._done:
            return True
        return self._work is not None and self._work.is_completed()

    def source_rank(self) -> int:
        return -1 if self._work is None else int(self._work._source_rank())

    _source_rank = source_rank


class BounceBuffers:
    """Copies device tensors to and from host memory for gloo. The calling thread blocks for each copy."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = device.new_stream()

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return host copies of tensors, made after the work that the caller has queued."""
        copies, _ = self.for_outputs(tensors)
        self._copy(copies, tensors)
        return copies

    def for_outputs(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Finish]:
        """Return host tensors for results, and a function that copies them to the device."""
        copies = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
        self._stream.wait_event(self._device.current_stream().record_event())
        return copies, lambda: self._copy(tensors, copies)

    def _copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            self._stream.run(partial(target.detach().copy_, source.detach()))
        self._stream.record_event().synchronize()
