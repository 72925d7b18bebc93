"""Runs operations that the engine does not implement on an inner gloo group, created on first use.

:class:`GlooFallback` is that group, and :class:`GlooCollectives` has the operations that torch asks for.

Creating the inner group waits for no other rank: each rank publishes its address in the store, and gloo
connects two ranks when they first exchange data. Two ranks can therefore exchange messages while a third one
is busy.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, Work
from torch.futures import Future

from shoal.comm.collectives import Finish, as_contiguous, check_rows, copy_back
from shoal.comm.devices import BounceBuffers
from shoal.comm.engine import CommError, Operation
from shoal.comm.operations import Membership
from shoal.comm.store import wait_for_keys
from shoal.comm.work import NO_TIMEOUT, BaseWork, first_cause, opaque_to_dynamo
from shoal.errors import UsageError

_POLL_S = 0.2
_RENDEZVOUS_LIMIT = timedelta(minutes=30)
_ENGINE_ERROR_S = 3.0
"""Time within which the engine names a rank that has died."""
_ABORT_TAG = 0x7FFF_FFF0

Start = Callable[[Any], Work]
"""Starts an operation on the inner group, its argument."""


class GlooFallback:
    """The inner gloo group of a process group, aborted when the engine reports a failure."""

    def __init__(self, member: Membership, address: str, timeout: timedelta) -> None:
        self._store, self._rank, self._size = member.store, member.rank, member.size
        self._address, self.timeout = address, timeout
        self.error = member.engine.error
        self._group: Any = None
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._aborted = False
        self._rendezvous = _InterruptibleStore(PrefixStore("gloo/", member.store), self._must_end)
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
                options._timeout = self.timeout
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
                self.wait_for_peer(peer, self.timeout)
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
        return self._peers[peer].start(group, start, self.timeout, finish)

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
        self.timeout = timeout
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

    def _advance(self, left_s: float) -> bool:
        if self._done.wait(min(_POLL_S, left_s)):
            return True
        if reason := self._fallback.error():
            raise CommError(reason)
        return False

    def is_completed(self) -> bool:
        return self._done.is_set()

    def get_future(self) -> Future[Any]:
        return self._future


class _InterruptibleStore(Store):
    """A store whose waits end when the group does.

    gloo's threads wait in it for ranks that may never come. A group whose threads block cannot be destroyed.
    """

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

    def wait(self, keys: list[str], timeout: timedelta = _RENDEZVOUS_LIMIT) -> None:
        if not wait_for_keys(self._store, keys, self._must_end, timeout):
            raise RuntimeError(f"no rank wrote {', '.join(keys)}")


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
        super().__init__("a message", None, timeout)
        self._fallback = fallback
        self._finish = finish
        self._is_started = threading.Event()
        self._work: Work | None = None
        self._done = False

    def started(self, work: Work) -> None:
        self._work = work
        self._is_started.set()

    def failed(self, error: Exception) -> None:
        self._error = error
        self._is_started.set()

    def _advance(self, left_s: float) -> bool:
        if not self._is_started.wait(min(_POLL_S, left_s)):
            return False
        if self._work is not None and self._error is None and not self._done:
            # A wait that times out closes gloo's connections: there is only one, of the whole time.
            limit = self._timeout if math.isinf(left_s) else timedelta(seconds=left_s)
            try:
                self._work.wait(max(limit, timedelta(milliseconds=1)))
                if self._finish is not None:
                    self._finish()
                self._done = True
            except RuntimeError as problem:
                self._error = self._fallback.explain(problem)
        return True

    def is_completed(self) -> bool:
        if self._error is not None or self._done:
            return True
        return self._work is not None and self._work.is_completed()

    def source_rank(self) -> int:
        return -1 if self._work is None else int(self._work._source_rank())

    _source_rank = source_rank


# ---- the operations that torch asks for -----------------------------------------------------------------


class GlooCollectives:
    """Collectives and messages of one group that run on its inner group.

    A collective is announced on the engine, which gives it a number and so detects a mismatch. A message is
    not, since only two ranks take part.

    Args:
        fallback: the inner group.
        member: this rank of the group.
        begin: submits an operation to the group's engine.
        bounce_buffers: returns what copies the tensors of a device; ``None`` if gloo takes them.
    """

    def __init__(
        self,
        fallback: GlooFallback,
        member: Membership,
        begin: Callable[[Operation], int],
        bounce_buffers: Callable[[torch.device], BounceBuffers | None],
    ) -> None:
        self._fallback, self._member = fallback, member
        self._begin, self._bounce_buffers = begin, bounce_buffers

    def run(
        self, name: str, start: Start, opts: Any,
        *, root: int = 0, shape: Sequence[int] = (), num_bytes: int = 0, result: Any = None,
        finish: Finish | None = None,
    ) -> GlooWork:  # fmt: skip
        """Announce a collective and start it on the inner group."""
        if opts.timeout <= NO_TIMEOUT:
            opts.timeout = self._fallback.timeout
        handle = self._begin(
            Operation(
                kind="delegated", op=name, root=root, count=num_bytes, shape=shape,
                timeout_s=opts.timeout.total_seconds(),
            )
        )  # fmt: skip
        engine = self._member.engine
        try:
            work = start(self._fallback.group())
        except Exception:
            engine.finish_delegated(handle)
            raise
        return GlooWork(self._fallback, work, name, lambda: engine.finish_delegated(handle), result, finish)

    def _inputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors for gloo to read: the given ones, or host copies of device tensors."""
        copies = self._bounce_buffers(tensors[0].device) if tensors else None
        return list(tensors) if copies is None else copies.to_host(tensors)

    def _outputs(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Finish | None]:
        """Return tensors for gloo to write, and a function that copies them to the device, if needed."""
        copies = self._bounce_buffers(tensors[0].device) if tensors else None
        return (list(tensors), None) if copies is None else copies.for_outputs(tensors)

    def gather(self, output_lists: Sequence[list[Tensor]], inputs: list[Tensor], opts: Any) -> GlooWork:
        sources = self._inputs(inputs)
        targets, finish = self._outputs(list(itertools.chain(*output_lists)))
        lists = [targets] if output_lists else []
        return self.run(
            "gather", lambda g: g.gather(lists, sources, opts), opts,
            root=opts.rootRank, shape=inputs[0].shape, finish=finish, result=output_lists if finish else None,
        )  # fmt: skip

    def gather_rows(self, output: Tensor, input: Tensor, opts: Any) -> GlooWork:
        """Gather each rank's tensor into a row of the root's output."""
        size, rows = self._member.size, []
        if opts.rootRank == self._member.rank:
            check_rows(size, "gather_into_tensor", "output", output, "input", input)
            rows = [list(output.view(size, *input.shape).unbind())]
        return self.gather(rows, [input], opts)

    def scatter(self, outputs: list[Tensor], input_lists: Sequence[list[Tensor]], opts: Any) -> GlooWork:
        sources = [self._inputs(inputs) for inputs in input_lists]
        targets, finish = self._outputs(outputs)
        return self.run(
            "scatter", lambda g: g.scatter(targets, sources, opts), opts,
            root=opts.rootRank, shape=outputs[0].shape, finish=finish, result=outputs if finish else None,
        )  # fmt: skip

    def all_to_all(self, outputs: list[Tensor], inputs: Sequence[Tensor], opts: Any) -> GlooWork:
        sizes = [output.numel() for output in outputs]
        source = torch.cat([as_contiguous(tensor).view(-1) for tensor in self._inputs(inputs)])
        target = torch.empty(sum(sizes), dtype=source.dtype)  # gloo takes no lists
        targets, to_device = self._outputs(outputs)
        unpack = copy_back(targets, target)

        def finish() -> None:
            unpack()
            if to_device is not None:
                to_device()

        return self.run(
            "all_to_all",
            lambda g: g.alltoall_base(target, source, sizes, [tensor.numel() for tensor in inputs], opts),
            opts, result=outputs, finish=finish,
        )  # fmt: skip

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any
    ) -> GlooWork:
        (source,), ((target,), finish) = self._inputs([input]), self._outputs([output])
        return self.run(
            "all_to_all_single",
            lambda g: g.alltoall_base(target, source, output_sizes, input_sizes, opts),
            opts, num_bytes=input.numel() * input.element_size(), finish=finish,
            result=[output] if finish else None,
        )  # fmt: skip

    def send(self, tensors: list[Tensor], to: int, tag: int) -> PointToPointWork:
        self._check_peer(to)
        sources = self._inputs(tensors)
        return self._fallback.message(to, lambda g: g.send(sources, to, tag))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> PointToPointWork:
        self._check_peer(source)
        targets, finish = self._outputs(tensors)
        return self._fallback.message(source, lambda g: g.recv(targets, source, tag), finish)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> PointToPointWork:
        """Receive from any rank. gloo connects to all ranks for it, so all create their inner group."""
        group = self._fallback.connect_all()
        targets, finish = self._outputs(tensors)
        work = PointToPointWork(self._fallback, self._fallback.timeout, finish)
        work.started(group.recv_anysource(targets, tag))
        return work

    def _check_peer(self, peer: int) -> None:
        rank, size = self._member.rank, self._member.size
        if not 0 <= peer < size or peer == rank:
            raise UsageError(f"a message between rank {rank} and rank {peer} of a group of {size}")
