"""Implements shoal's device interface in host memory: streams are threads that execute their queue in order.

For tests, and to run the copy pipeline without a GPU. Tensors are ordinary CPU tensors. What a caller does to
them outside of a stream is complete when the call returns, as on the CPU, unless it runs inside
:meth:`MemoryDevice.on`. A queue keeps no memory alive, as a GPU's does not: a step whose tensors were freed
before the stream came to it fails, where a GPU would use memory that has been given out again.
"""

from __future__ import annotations

import ctypes
import os
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.multiprocessing.reductions import StorageWeakRef

from shoal.comm.collectives import collective
from shoal.comm.devices import Stream
from shoal.comm.engine import EngineOptions
from shoal.comm.rendezvous import connect_engine

_DELAYS_S = (0.0, 0.0, 0.0, 0.0005, 0.002)
_CPU = torch.device("cpu")
FREED = "a step uses memory that was freed before the stream came to it: keep its tensors until a later event"

Step = Callable[[], object]


def borrowed(step: Step) -> Step:
    """Return ``step`` without its references: it raises RuntimeError if what it uses is gone by then.

    Args:
        step: a method of a tensor with its arguments (``partial``); or another function or method, of which
            the caller keeps the object, and with it the tensors.
    """
    if isinstance(step, partial) and isinstance(getattr(step.func, "__self__", None), Tensor):
        return _on_aliases(step.func.__self__, step.func.__name__, step.args, step.keywords)  # type: ignore[attr-defined]
    reference: Any = weakref.WeakMethod(step) if hasattr(step, "__self__") else weakref.ref(step)
    del step

    def run() -> None:
        if (found := reference()) is None:
            raise RuntimeError(FREED)
        found()

    return run


def _on_aliases(tensor: Tensor, name: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> Step:
    """Return a call of a tensor's method by addresses, after a look whether the memory is still there."""
    used = [each for each in (tensor, *args) if isinstance(each, Tensor)]
    storages = [each.untyped_storage() for each in used if each.numel()]
    memory = [(StorageWeakRef(each), each.data_ptr()) for each in storages]  # type: ignore[no-untyped-call]
    mine, *others = [_alias(each) if isinstance(each, Tensor) else each for each in (tensor, *args)]

    def run() -> None:
        kept = [torch.UntypedStorage._new_with_weak_ptr(reference.cdata) for reference, _ in memory]
        if any(
            each is None or each.data_ptr() != address
            for each, (_, address) in zip(kept, memory, strict=True)
        ):
            raise RuntimeError(FREED)
        getattr(mine, name)(*others, **keywords)

    return run


def _alias(tensor: Tensor) -> Tensor:
    """Return a tensor of the same memory that does not keep it alive."""
    storage = tensor.untyped_storage()
    if not tensor.numel():
        return tensor
    whole = torch.frombuffer(
        (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()), dtype=torch.uint8
    )
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(whole.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


class MemoryEvent:
    """An event that the stream's thread sets, with the first error of the work before it.

    Args:
        check: raises where the calling thread must not look at events.
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self._check = check
        self._reached = threading.Event()
        self._failure: Exception | None = None

    def set(self, failure: Exception | None) -> None:
        self._failure = failure
        self._reached.set()

    def synchronize(self) -> None:
        self._check()
        self.passed()

    def passed(self) -> None:
        """Wait, as a stream does."""
        self._reached.wait()
        if self._failure is not None:
            raise self._failure

    def query(self) -> bool:
        self._check()
        return self._reached.is_set()


class MemoryStream:
    """A thread that executes steps in order. After a failure it skips them and passes the error to events.

    Args:
        check: of its events.
        delays: draws the seconds before each step and event; default: none.
    """

    def __init__(self, check: Callable[[], None] = lambda: None, delays: random.Random | None = None) -> None:
        self._check, self._delays = check, delays
        self._steps: queue.SimpleQueue[Step | MemoryEvent | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        threading.Thread(target=self._run, name="shoal-memory-stream", daemon=True).start()

    def _run(self) -> None:
        with torch.no_grad():
            while (step := self._steps.get()) is not None:
                if self._delays is not None:
                    time.sleep(self._delays.choice(_DELAYS_S))
                if isinstance(step, MemoryEvent):
                    step.set(self._failure)
                elif self._failure is None:
                    try:
                        step()
                    except Exception as problem:
                        self._failure = problem

    def run(self, step: Step) -> None:
        self._steps.put(borrowed(step))

    def call(self, function: Step) -> None:
        """Queue a function of the host, which the stream keeps."""
        self._steps.put(function)

    def wait_event(self, event: MemoryEvent) -> None:
        self._steps.put(event.passed)

    def record_event(self) -> MemoryEvent:
        event = MemoryEvent(self._check)
        self._steps.put(event)
        return event

    def close(self) -> None:
        self._steps.put(None)


class _CallerStream:
    """Executes steps at once, on the calling thread."""

    def run(self, step: Step) -> None:
        step()

    def wait_event(self, event: MemoryEvent) -> None:
        event.synchronize()

    def record_event(self) -> MemoryEvent:
        event = MemoryEvent()
        event.set(None)
        return event


class MemoryDevice:
    """A device in host memory.

    Args:
        identity: the same string on ranks that share the device, as processes can share a GPU; default: each
            process has its own.
        seed: delays each stream at random, so that what no event orders happens in another order.
    """

    torch_device = _CPU

    def __init__(self, identity: str | None = None, *, seed: int | None = None) -> None:
        self._seed = seed
        self._identity = identity or f"memory of process {os.getpid()}"
        self._streams: list[MemoryStream] = []
        self._of_thread = threading.local()
        self._capturing = False

    def identity(self) -> str:
        return self._identity

    def current_stream(self) -> Stream:
        stream: Stream = getattr(self._of_thread, "stream", None) or _CallerStream()
        return stream

    @contextmanager
    def on(self, stream: MemoryStream) -> Iterator[None]:
        """Make ``stream`` the current stream of the calling thread."""
        self._of_thread.stream = stream
        try:
            yield
        finally:
            self._of_thread.stream = None

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Behave as during the capture of a graph, in CUDA's mode ``global``: threads other than those of
        :meth:`run_thread` must not look at events nor allocate."""
        self._capturing = True
        try:
            yield
        finally:
            self._capturing = False

    def _check(self) -> None:
        if self._capturing and not getattr(self._of_thread, "relaxed", False):
            raise RuntimeError("operation not permitted when stream is capturing")

    def new_stream(self) -> MemoryStream:
        delays = None if self._seed is None else random.Random(1_000 * self._seed + len(self._streams))
        self._streams.append(MemoryStream(self._check, delays))
        return self._streams[-1]

    def upload(self, tensor: Tensor, stream: MemoryStream) -> Tensor:
        copied = torch.empty_like(tensor)
        stream.run(partial(copied.copy_, tensor))
        return copied

    def host_buffer(self, num_bytes: int) -> Tensor:
        self._check()
        return torch.empty(num_bytes, dtype=torch.uint8)

    def intra_host_group(
        self, store: Store, rank: int, size: int, timeout: timedelta, name: str
    ) -> MemoryIntraHostGroup:
        return MemoryIntraHostGroup(store, rank, size, timeout, name)

    def is_capturing(self) -> bool:
        return self._capturing

    def future_devices(self) -> list[torch.device]:
        return []

    def run_thread(self, work: Callable[[], None]) -> None:
        self._of_thread.relaxed = True
        with torch.no_grad():
            work()

    def close(self) -> None:
        for stream in self._streams:
            stream.close()


class MemoryIntraHostGroup:
    """The ranks of one host, which reduce through shared memory in rank order, on their own engine."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, name: str) -> None:
        self._engine = connect_engine(store, rank, size, name, rank, timeout, EngineOptions())
        self._timeout = timeout

    def reduce_scatter(self, output: Tensor, input: Tensor, op: str) -> None:
        self._run("reduce_scatter", output, input, op)

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        self._run("all_gather", output, input, "sum")

    def _run(self, kind: str, output: Tensor, input: Tensor, op: str) -> None:
        operation = collective(kind, input, output, op=op, timeout=self._timeout)
        self._engine.wait(self._engine.submit(operation))

    def abort(self, reason: str) -> None:
        self._engine.abort(reason)

    def close(self) -> None:
        self._engine.close()
