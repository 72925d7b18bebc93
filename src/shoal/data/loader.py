"""Prefetches a worker's batches.

The state of training data is one integer, the number of samples consumed. The next global batch is the next
``global_batch_size`` samples of the endless stream (``shoal.decide.order``); a worker's part and its
micro-batches follow from sizes alone. So a run that resumes with another number of workers or loader
processes continues with the same global batches.

:func:`training_steps` prefetches whole steps in a thread, :func:`streamed_steps` single micro-batches of
large examples (images) up to a number of bytes; both can use loader processes. They do not use torch's
DataLoader: with a timeout it notices the death of a loader process only at the timeout, without one it waits
for ever if a process hangs, and its errors have a traceback in their text. For a script that does use one,
:class:`StepDataset` yields the same micro-batches, and readers are map-style data sets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, product
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from shoal.data.steps import (
    Arrays,
    DataShard,
    Reader,
    SizedReader,
    StepReader,
    evenly_spread,
    loader_processes,
    submit,
)
from shoal.decide.order import Order, micro_batches, worker_part
from shoal.decide.rng import Int64Array
from shoal.errors import ShoalError, UsageError, require_positive

_Task = TypeVar("_Task")
_Made = TypeVar("_Made")
_Other = TypeVar("_Other")

Batch = dict[str, Any]
"""A micro-batch as models take it (``steps.Reader.micro_batch``): tensors, and numbers."""

_DEADLINE_S = 600.0
"""A step's batches take milliseconds; a loader process that is silent for so long hangs."""

_NUM_STREAMED = 2
"""Micro-batches that ``streamed_steps`` makes at a time: idle decode threads at the end of one begin the
next."""


class BatchStream(Iterator[_Made], Generic[_Made]):
    """Iterates over items that the threads and processes of ``pools`` make; exhausting or closing it joins
    them.

    Not a generator with a ``finally``: Python closes an abandoned one (held by the traceback of an error)
    whenever it collects garbage, in any thread and under any lock, where waiting for a thread deadlocks.
    Abandoned pools end their threads and processes without anyone waiting for them.
    """

    def __init__(self, items: Iterator[_Made], pools: Sequence[Executor]) -> None:
        self._items = items
        self.pools = pools

    def __next__(self) -> _Made:
        try:
            return next(self._items)
        except BaseException:
            self.close()
            raise

    def map(self, function: Callable[[_Made], _Other]) -> BatchStream[_Other]:
        """Return the stream of ``function(item)``; it replaces this one."""
        return BatchStream(map(function, self), self.pools)

    def close(self) -> None:
        """Cancel tasks that have not begun, wait for the rest, and end threads and processes. Idempotent."""
        self._items = iter(())
        for pool in self.pools:
            pool.shutdown(cancel_futures=True)


def in_order(
    begin: Callable[[_Task], Future[_Made]], tasks: Iterable[_Task], num_ahead: int
) -> Iterator[_Made]:
    """Yield the result of each task in order; ``num_ahead`` tasks are begun before they are needed."""
    rest = iter(tasks)
    ahead = deque(map(begin, islice(rest, num_ahead)))
    while ahead:
        ahead[0].result()
        ahead.extend(map(begin, islice(rest, 1)))
        yield ahead.popleft().result()  # no reference stays here: batches of images are large


def in_thread(
    make: Callable[[_Task], _Made], tasks: Iterable[_Task], num_ahead: int = 2
) -> BatchStream[_Made]:
    """Return the stream of ``make(task)``; a thread is ``num_ahead`` tasks ahead."""
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shoal-loader")
    return BatchStream(in_order(lambda task: thread.submit(make, task), tasks, num_ahead), [thread])


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """Prefetching of batches; does not change which batches there are.

    With ``num_loader_processes=0`` a thread of the worker makes them, which is enough for text: a micro-batch
    of 32 × 128 tokens takes less than a millisecond.
    """

    num_loader_processes: int = 0
    num_prefetched_steps: int = 2
    """Steps that ``training_steps`` prefetches."""
    max_prefetched_bytes: int = 1 << 29
    """Bytes that ``streamed_steps`` prefetches; at least one micro-batch, and one per loader process."""

    def __post_init__(self) -> None:
        require_positive("", self, "num_prefetched_steps")
        require_positive("", self, "num_loader_processes", "max_prefetched_bytes", least=0)


def training_steps(
    steps: StepReader, config: LoaderConfig, *, num_steps: int, pin_memory: bool = False
) -> BatchStream[list[Batch]]:
    """Yield, for each of ``num_steps`` optimizer steps, this worker's micro-batches.

    After step ``i`` (from 0) the state is ``samples_consumed + (i + 1) * global_batch_size``. Batches are
    made ahead, in pinned memory if asked (for asynchronous copies to a GPU). Closing the iterator ends its
    thread and processes.

    Raises:
        ShoalError: a shard is damaged; a loader process died or hangs.
    """
    pool = _Pool(steps, config, num_threads=1)
    blocks = (range(num_steps)[i : i + steps.steps_at_once] for i in range(0, num_steps, steps.steps_at_once))

    def convert(made: list[list[Arrays]]) -> list[list[Batch]]:
        return [[as_tensors(arrays, pin_memory) for arrays in step] for step in made]

    num_ahead = -(-config.num_prefetched_steps // steps.steps_at_once) * max(config.num_loader_processes, 1)
    made = in_order(lambda block: pool.submit(StepReader.read, convert, block), blocks, num_ahead)
    return BatchStream(chain.from_iterable(made), pool.executors)


def streamed_steps(
    steps: StepReader, config: LoaderConfig, *, num_steps: int, pin_memory: bool = False
) -> BatchStream[Iterator[Batch]]:
    """Yield, for each of ``num_steps`` optimizer steps, an iterator over this worker's micro-batches.

    Batches and state are those of ``training_steps``, for a ``SizedReader``, of whose examples a whole step
    is too large to hold or to wait for: micro-batches are made one by one, and up to
    ``config.max_prefetched_bytes`` are prefetched across steps. Micro-batches that an iterator was not asked
    for before the next step are dropped. Closing the outer iterator ends threads and processes.

    Raises:
        ShoalError: as for ``training_steps``.
    """
    assert isinstance(steps.reader, SizedReader)
    pool = _Pool(steps, config, num_threads=_NUM_STREAMED)
    positions = product(range(num_steps), range(steps.share.num_micro_batches))
    batch_bytes = steps.share.micro_batch_size * steps.reader.example_bytes
    batches = in_order(
        lambda position: pool.submit(
            StepReader.read_one, lambda made: as_tensors(made, pin_memory), *position
        ),
        positions,
        max(1, config.num_loader_processes, config.max_prefetched_bytes // batch_bytes),
    )

    def in_steps() -> Iterator[Iterator[Batch]]:
        for _ in range(num_steps):
            step = islice(batches, steps.share.num_micro_batches)
            yield step
            deque(step, maxlen=0)

    return BatchStream(in_steps(), pool.executors)


def held_out_batches(
    reader: Reader,
    *,
    micro_batch_size: int,
    limit: int | None = None,
    indices: Int64Array | None = None,
    rank: int = 0,
    num_workers: int = 1,
    dealt: bool = False,
    num_ahead: int = 0,
    pin_memory: bool = False,
) -> BatchStream[Batch]:
    """Yield this worker's part of a fixed set of examples, the same at every call.

    The set is at most ``limit`` examples, spread evenly over the split, or else ``indices`` ``[N]`` in their
    order, as epoch 0 draws them. Workers share it without padding or repetition, so the last micro-batch may
    be smaller and workers may differ by a micro-batch: reduce over workers after the loop, not inside it.
    They take contiguous parts, or, if ``dealt``, micro-batches in turn, which are then the same for any
    number of workers. With ``num_ahead`` a thread prefetches that many micro-batches.
    """
    chosen = evenly_spread(reader.num_examples, limit) if indices is None else indices
    if dealt:
        own = micro_batches(range(len(chosen)), micro_batch_size)[rank::num_workers]
    else:
        own = micro_batches(worker_part(len(chosen), rank, num_workers), micro_batch_size)

    def make(cut: range) -> Batch:
        return as_tensors(reader.micro_batch(reader.batch(0, chosen[cut.start : cut.stop])), pin_memory)

    return in_thread(make, own, num_ahead) if num_ahead else BatchStream(map(make, own), [])


class StepDataset(IterableDataset[Batch]):
    """Yields a rank's micro-batches in order, for a ``DataLoader(dataset, batch_size=None)``.

    The batches are those of :func:`training_steps`, with any ``num_workers`` of the DataLoader. Its state, as
    torchdata's ``StatefulDataLoader`` saves it, is the number of samples consumed before the present step and
    the next micro-batch of that step; at the end of a step it can be loaded with another number of ranks.

        dataset = StepDataset(reader, DataShard(global_batch_size=64, micro_batch_size=16))
        for batch in DataLoader(dataset, batch_size=None, num_workers=2): ...

    Args:
        reader: of the examples.
        share: this rank's part of each global batch.
        num_steps: optimizer steps after which it ends; ``None``: it never does.
        samples_consumed: samples before the first step.
        order: instead of the full shuffle by the reader's seed.
    """

    def __init__(
        self,
        reader: Reader,
        share: DataShard,
        *,
        num_steps: int | None = None,
        samples_consumed: int = 0,
        order: Order | None = None,
    ) -> None:
        self._steps = StepReader(reader=reader, share=share, samples_consumed=samples_consumed, order=order)
        self._end = None if num_steps is None else num_steps * self._steps.share.num_micro_batches
        self._next = 0  # the next micro-batch, counted over steps
        self._is_of_worker = False  # of this process of a DataLoader alone, not of all of them

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        if info and not self._is_of_worker:
            self._next, self._is_of_worker = self._next + info.id, True
        return self._micro_batches(info.num_workers if info else 1)

    def _micro_batches(self, stride: int) -> Iterator[Batch]:
        while self._end is None or self._next < self._end:
            position = divmod(self._next, self._steps.share.num_micro_batches)
            self._next += stride
            yield as_tensors(self._steps.read_one(*position), pin_memory=False)

    def state_dict(self) -> dict[str, int]:
        """Return the position after the last micro-batch that this process yielded."""
        step, micro_batch = divmod(self._next, self._steps.share.num_micro_batches)
        samples = self._steps.samples_consumed + step * self._steps.share.global_batch_size
        return {"samples_consumed": samples, "micro_batch": micro_batch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at a position that ``state_dict`` returned.

        Raises:
            UsageError: it lies before the first step, or is not where a step of this batch size begins.
        """
        samples = state["samples_consumed"] - self._steps.samples_consumed
        step, rest = divmod(samples, self._steps.share.global_batch_size)
        per_step = self._steps.share.num_micro_batches
        if step < 0 or rest or not 0 <= state["micro_batch"] < per_step:
            raise UsageError(
                f"state {dict(state)} is not a position of a stream of global batches of "
                f"{self._steps.share.global_batch_size} samples, {per_step} micro-batches each, after "
                f"{self._steps.samples_consumed} samples; load it with the settings that it was saved with"
            )
        self._next = step * per_step + state["micro_batch"]
        self._is_of_worker = get_worker_info() is not None


class _Pool:
    """Threads that finish batches, and the loader processes that make them if any are configured."""

    def __init__(self, steps: StepReader, config: LoaderConfig, *, num_threads: int) -> None:
        self._steps = steps
        num_processes = config.num_loader_processes
        self._processes = loader_processes(steps, num_processes) if num_processes else None
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="shoal-loader")
        self.executors = [pool for pool in (self._processes, self._threads) if pool is not None]

    def submit(
        self, read: Callable[..., _Made], convert: Callable[[_Made], _Other], *args: Any
    ) -> Future[_Other]:
        """Run ``read(steps, *args)`` in a process, else in a thread; convert its result in a thread."""
        remote = None if self._processes is None else submit(self._processes, read, *args)
        steps = self._steps  # a task that referred to this pool would keep the threads of an abandoned one
        return self._threads.submit(lambda: convert(read(steps, *args) if remote is None else _wait(remote)))


def _wait(remote: Future[_Made]) -> _Made:
    remedy = "ask for fewer with num_loader_processes (0 uses a thread)"
    try:
        return remote.result(timeout=_DEADLINE_S)
    except BrokenProcessPool:
        raise ShoalError(f"a loader process died, perhaps because memory ran out; {remedy}") from None
    except TimeoutError:
        raise ShoalError(
            f"a loader process has made nothing for {_DEADLINE_S:.0f} s; is the storage of the shards "
            f"reachable? If it is, {remedy}"
        ) from None


def as_tensors(arrays: Arrays, pin_memory: bool) -> Batch:
    """Return a micro-batch with tensors for arrays, in pinned memory if asked; numbers stay as they are."""
    batch = {n: torch.from_numpy(a) if isinstance(a, np.ndarray) else a for n, a in arrays.items()}
    if not pin_memory:
        return batch
    return {n: v.pin_memory() if isinstance(v, torch.Tensor) else v for n, v in batch.items()}


def to_device(batch: Any, device: torch.device) -> Any:
    """Return ``batch`` with its tensors on ``device``; copies from pinned memory are asynchronous.

    Dictionaries, lists and tuples keep their form; other values stay as they are.
    """
    return _map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


def _map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {name: _map_tensors(function, value) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(_map_tensors(function, value) for value in batch)
    return batch


class CopyDevice(Protocol):
    """A device whose streams copy beside its kernels."""

    def current_stream(self) -> Any:
        """Return the stream of the calling thread's own work; it has ``wait_event(event)``."""

    def new_stream(self) -> Any:
        """Return another stream; it has ``record_event()``."""

    def upload(self, tensor: Tensor, stream: Any) -> Tensor:
        """Queue a copy of ``tensor`` to the device on ``stream``, and return it for the current stream.

        The caller keeps ``tensor`` until a later event of ``stream``, and the current stream waits for that.
        """


class DeviceCopies:
    """Copies tensors concurrently with the kernels of the current stream.

    The stream waits only for the copies that it uses.

    The host queues the copy of a micro-batch when the loop asks for it. By then a GPU is usually still busy
    with the kernels before, and the copy runs at the same time. Results may be used on the stream that is
    current at the call.

    Args:
        device: where to copy to; :func:`to_device` is the same without streams.
    """

    def __init__(self, device: CopyDevice) -> None:
        self._device, self._stream = device, device.new_stream()
        self._sources: deque[tuple[Any, Any]] = deque()
        """(event, batch): copies under way need the memory of their sources."""

    def __call__(self, batch: Any) -> Any:
        """Return ``batch`` with its tensors on the device; those that are there stay as they are."""
        moved = _map_tensors(lambda tensor: self._device.upload(tensor, self._stream), batch)
        copied = self._stream.record_event()
        self._device.current_stream().wait_event(copied)
        self._sources.append((copied, batch))
        while self._sources and self._sources[0][0].query():
            self._sources.popleft()
        return moved


class _Gpu:
    """A GPU as :class:`DeviceCopies` uses it."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]

    def upload(self, tensor: Tensor, stream: torch.cuda.Stream) -> Tensor:
        if tensor.device == self._device:
            return tensor
        with torch.cuda.stream(stream):
            copied = tensor.to(self._device, non_blocking=True)
        copied.record_stream(self.current_stream())
        return copied


Copies = Callable[[Any], Any]
"""Returns a tensor, or a dictionary, list or tuple of tensors and other values, with its tensors on the
device."""


def copies_to(device: torch.device) -> Copies:
    """Return a function that copies micro-batches to ``device``."""
    return DeviceCopies(_Gpu(device)) if device.type == "cuda" else partial(to_device, device=device)
