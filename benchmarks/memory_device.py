"""Implements shoal's device interface in host memory, on a runtime of CUDA whose streams are threads.

For tests, and to run staging without a GPU. The runtime, ``tests/fake_cuda``, is compiled on first use; the
lane of the core calls it as it calls CUDA's. Tensors are ordinary CPU tensors. What a caller does to them
outside of a stream is complete when the call returns, as on the CPU, unless it runs inside
:meth:`MemoryDevice.on`. A queue keeps no memory alive, as a GPU's does not: a step or a copy whose tensors
were freed before the stream came to it fails, where a GPU would use memory that has been given out again.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.multiprocessing.reductions import StorageWeakRef

from shoal.comm import native_build
from shoal.comm.collectives import collective
from shoal.comm.devices import DeviceStream
from shoal.comm.engine import CollectiveEngine, EngineOptions, Operation, SingleProcessEngine
from shoal.comm.lane import Lane
from shoal.comm.rendezvous import connect_engine
from shoal.comm.routes import Route

_SOURCES = Path(__file__).parents[1] / "tests" / "fake_cuda"
_CPU = torch.device("cpu")
_NOT_READY = 600
_LAUNCH_FAILURE = 719
_RELAXED = 2
_NUM_KEPT = 64
FREED = "a step uses memory that was freed before the stream came to it: keep its tensors until a later event"

Step = Callable[[], object]

_numbers = itertools.count(1)
_queued: dict[int, Step] = {}
"""Functions that streams have not come to."""
_failures: list[Exception] = []
"""Errors of functions on streams, the first one first."""
_moved: deque[tuple[int, int, StorageWeakRef]] = deque(maxlen=_NUM_KEPT)
"""Address, size and storage of the tensors of the last transfers."""


def _run(number: int) -> None:
    try:
        with torch.no_grad():
            _queued.pop(number)()
    except Exception as problem:  # for those who wait for the stream
        _failures.append(problem)
        runtime().fake_cuda_break(None, _LAUNCH_FAILURE)


def _look(address: int) -> int:
    for begin, size, storage in reversed(list(_moved)):
        if begin <= address < begin + size:
            found = torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
            if found is None or found.data_ptr() != begin:
                _failures.append(RuntimeError(FREED))
                return 0
            return 1
    return 1


_run_queued = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_run)
_is_alive = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_look)


def runtime_file() -> Path:
    """Return the file of the runtime, compiled if the cache lacks it."""
    return native_build.build(
        native_build.Library(
            title="a runtime of CUDA without a GPU",
            kind="fake-cuda",
            name="fake_cudart",
            sources=_SOURCES,
            versions=(),
            includes=(),
        )
    )


@cache
def runtime() -> Any:
    """Return the loaded runtime."""
    loaded = ctypes.CDLL(str(runtime_file()))
    loaded.cudaGetErrorString.restype = ctypes.c_char_p
    loaded.fake_cuda_seed.argtypes = [ctypes.c_uint64]
    loaded.fake_cuda_count.restype = ctypes.c_uint64
    loaded.cudaLaunchHostFunc.argtypes = [ctypes.c_void_p, type(_run_queued), ctypes.c_void_p]
    loaded.fake_cuda_ask(_is_alive)
    return loaded


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


def watch(on: bool) -> None:
    """Let copies of memory that was freed fail (default), or not, so that a copy runs without Python."""
    runtime().fake_cuda_ask(_is_alive if on else None)


def forget_failures() -> None:
    """Let streams and calls work again after a failure, which on a GPU ends the process's use of it."""
    _failures.clear()
    runtime().fake_cuda_reset()


def _check(code: int) -> None:
    if code and _failures:
        raise _failures[0]
    if code:
        raise RuntimeError(f"{runtime().cudaGetErrorString(code).decode()} (error {code})")


class MemoryEvent:
    """An event of the runtime. One that was not recorded is reached."""

    def __init__(self) -> None:
        self._handle = ctypes.c_void_p()
        _check(runtime().cudaEventCreateWithFlags(ctypes.byref(self._handle), 0))
        weakref.finalize(self, runtime().cudaEventDestroy, self._handle).atexit = False

    @property
    def cuda_event(self) -> int:
        assert self._handle.value is not None
        return self._handle.value

    def record(self, stream: ctypes.c_void_p) -> None:
        _check(runtime().cudaEventRecord(self._handle, stream))

    def synchronize(self) -> None:
        _check(runtime().cudaEventSynchronize(self._handle))

    def query(self) -> bool:
        code = runtime().cudaEventQuery(self._handle)
        if code != _NOT_READY:
            _check(code)
        return bool(code != _NOT_READY)


class MemoryStream:
    """A stream of the runtime. After a failure it skips its work, and all calls raise the error.

    Args:
        seed: of random delays before each piece of its work; default: none.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._handle = ctypes.c_void_p()
        runtime().fake_cuda_seed(0 if seed is None else seed + 1)
        _check(runtime().cudaStreamCreateWithPriority(ctypes.byref(self._handle), 0, 0))

    @property
    def handle(self) -> int:
        assert self._handle.value is not None
        return self._handle.value

    def run(self, step: Step) -> None:
        self.call(borrowed(step))

    def call(self, function: Step) -> None:
        """Queue a function of the host, which the stream keeps."""
        number = next(_numbers)
        _queued[number] = function
        _check(runtime().cudaLaunchHostFunc(self._handle, _run_queued, number))

    def wait_event(self, event: MemoryEvent) -> None:
        _check(runtime().cudaStreamWaitEvent(self._handle, event._handle, 0))

    def record_event(self) -> MemoryEvent:
        event = MemoryEvent()
        event.record(self._handle)
        return event

    def close(self) -> None:
        runtime().cudaStreamDestroy(self._handle)


class _CallerStream:
    """Executes steps at once, on the calling thread."""

    def run(self, step: Step) -> None:
        step()

    def wait_event(self, event: MemoryEvent) -> None:
        event.synchronize()

    def record_event(self) -> MemoryEvent:
        return MemoryEvent()


class MemoryLane(Lane):
    """A lane that notes the memory of its tensors: a copy of what was freed by then fails."""

    def begin(self, route: Route, columns: int, ready: int, timeout_s: float) -> int:
        _note([route.source, route.target])
        return super().begin(route, columns, ready, timeout_s)

    def begin_messages(
        self, engine: CollectiveEngine, operation: Operation, ready: int, timeout_s: float
    ) -> int:
        _note(operation.memory)
        return super().begin_messages(engine, operation, ready, timeout_s)


def _note(tensors: Sequence[Tensor]) -> None:
    for each in tensors:
        storage = each.untyped_storage()
        weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        _moved.append((storage.data_ptr(), storage.nbytes(), weak))


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

    def current_stream(self) -> DeviceStream:
        stream: DeviceStream = getattr(self._of_thread, "stream", None) or _CallerStream()
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
        :meth:`run_thread` and of lanes must not wait for events nor allocate."""
        self._capturing = True
        runtime().fake_cuda_capture(1)
        try:
            yield
        finally:
            runtime().fake_cuda_capture(0)
            self._capturing = False

    def new_stream(self) -> MemoryStream:
        seed = None if self._seed is None else 1_000 * self._seed + len(self._streams)
        self._streams.append(MemoryStream(seed))
        return self._streams[-1]

    def open_lane(
        self, to_host: MemoryStream, to_device: MemoryStream, num_buffers: int, buffer_bytes: int
    ) -> Lane:
        return MemoryLane(
            str(runtime_file()), 0, to_host.handle, to_device.handle,
            num_buffers=num_buffers, buffer_bytes=buffer_bytes,
        )  # fmt: skip

    def upload(self, tensor: Tensor, stream: MemoryStream) -> Tensor:
        copied = torch.empty_like(tensor)
        stream.run(partial(copied.copy_, tensor))
        return copied

    def intra_host_group(
        self, store: Store, rank: int, size: int, timeout: timedelta, name: str
    ) -> MemoryIntraHostGroup:
        return MemoryIntraHostGroup(store, rank, size, timeout, name)

    def is_capturing(self) -> bool:
        return self._capturing

    def future_devices(self) -> list[torch.device]:
        return []

    def run_thread(self, work: Callable[[], None]) -> None:
        runtime().cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))
        with torch.no_grad():
            work()

    def close(self) -> None:
        for stream in self._streams:
            stream.close()


class MemoryIntraHostGroup:
    """The ranks of one host, which reduce through shared memory in rank order, on their own engine."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, name: str) -> None:
        self._engine: CollectiveEngine = SingleProcessEngine()
        if size > 1:
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
