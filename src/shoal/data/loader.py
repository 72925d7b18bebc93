"""Batches for a worker: its part of each global batch, ready before the step that needs it.

The state of training data is one integer, the number of samples consumed: the next global batch is the
next ``global_batch_size`` samples of the endless stream (``shoal.decide.order``), and a worker's part and
its micro-batches follow from sizes alone. Nothing else is remembered, so resuming with another number of
workers or loader processes continues with the same global batches.

A thread of the worker makes batches ahead; large examples (images) come as a stream of micro-batches, of
which a number of bytes is ready ahead. With loader processes, it waits for theirs. (torch's DataLoader
is not used: with a deadline it notices only at the deadline that a loader process has died, without one it
never ends if a process hangs, and its errors come with a traceback in their text.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain, islice, product
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from shoal.data.steps import (
    Arrays,
    DataShard,
    Reader,
    SizedReader,
    StepReader,
    evenly_spread,
    loader_processes,
    submit_read,
    submit_read_one,
)
from shoal.decide.order import Order, micro_batches, worker_part
from shoal.decide.rng import Int64Array
from shoal.errors import ShoalError, UsageError

_Task = TypeVar("_Task")
_Made = TypeVar("_Made")
_Other = TypeVar("_Other")


class Stream(Iterator[_Made], Generic[_Made]):
    """Items that the threads and processes of ``pools`` make; closing it, or its end, waits for theirs.

    Not a generator with a ``finally``: Python closes one that was left behind (by an error whose traceback
    still holds it) whenever it collects garbage, in any thread and under any lock, where waiting for a thread
    hangs. Pools that are left behind end their threads and processes by themselves, and nobody waits.
    """

    def __init__(self, items: Iterator[_Made], pools: Sequence[Executor]) -> None:
        self._items = items
        self._pools = pools

    def __next__(self) -> _Made:
        try:
            return next(self._items)
        except BaseException:
            self.close()
            raise

    def map(self, function: Callable[[_Made], _Other]) -> Stream[_Other]:
        """Return the stream of what ``function`` makes of each item; it takes this one's place."""
        return Stream(map(function, self), self._pools)

    def close(self) -> None:
        """Drop what was not begun, wait for what was, and end threads and processes. May be repeated."""
        self._items = iter(())
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)


def in_order(
    begin: Callable[[_Task], Future[_Made]], tasks: Iterable[_Task], num_ahead: int
) -> Iterator[_Made]:
    """Yield what becomes of each task, in order; ``num_ahead`` are begun before they are asked for."""
    rest = iter(tasks)
    ahead = deque(map(begin, islice(rest, num_ahead)))
    while ahead:
        ahead[0].result()
        ahead.extend(map(begin, islice(rest, 1)))
        yield ahead.popleft().result()  # not kept here while its user has it: batches of images are large


Batch = dict[str, Any]
"""A micro-batch as models take it (``steps.Reader.micro_batch``): tensors, and numbers."""

_DEADLINE_S = 600.0
"""A step's batches take milliseconds; a loader process that is silent for so long hangs."""

_NUM_STREAMS = 2
"""Micro-batches of a stream in the making: decode threads that find the end of one begin the next."""


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """How batches are made ready; none of it changes which batches.

    With ``num_loader_processes=0`` a thread of the worker makes them, which is enough for text: a
    micro-batch of 32 × 128 tokens takes less than a millisecond.
    """

    num_loader_processes: int = 0
    num_prefetched_steps: int = 2
    """Steps ready ahead, of ``training_steps``."""
    max_prefetched_bytes: int = 1 << 29
    """Bytes ready ahead, of ``streamed_steps``; at least one micro-batch, and one for each loader process."""

    def __post_init__(self) -> None:
        if self.num_loader_processes < 0:
            raise UsageError(f"num_loader_processes {self.num_loader_processes} must be at least 0")
        if self.num_prefetched_steps < 1:
            raise UsageError(f"num_prefetched_steps {self.num_prefetched_steps} must be at least 1")
        if self.max_prefetched_bytes < 0:
            raise UsageError(f"max_prefetched_bytes {self.max_prefetched_bytes} must be at least 0")


def training_steps(
    reader: Reader,
    share: DataShard,
    config: LoaderConfig,
    *,
    num_steps: int,
    samples_consumed: int = 0,
    pin_memory: bool = False,
) -> Stream[list[Batch]]:
    """Yield, for each of ``num_steps`` optimizer steps, this worker's micro-batches.

    The first step begins after ``samples_consumed`` samples; after step ``i`` (from 0) the state is
    ``samples_consumed + (i + 1) * global_batch_size``. Batches are made ahead, in pinned memory if asked
    (for copies to a GPU that do not wait). Closing the iterator ends its thread and processes.

    Raises:
        ShoalError: a shard turned out to be damaged while it was read; a loader process died or hangs.
    """
    steps = StepReader(reader=reader, share=share, samples_consumed=samples_consumed)
    processes = loader_processes(steps, config.num_loader_processes) if config.num_loader_processes else None
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shoal-loader")
    blocks = (range(num_steps)[i : i + steps.steps_at_once] for i in range(0, num_steps, steps.steps_at_once))

    def finish(block: range, elsewhere: Future[list[list[Arrays]]] | None) -> list[list[Batch]]:
        made = steps.read(block) if elsewhere is None else _wait(elsewhere)
        return [[as_tensors(arrays, pin_memory) for arrays in step] for step in made]

    def begin(block: range) -> Future[list[list[Batch]]]:
        elsewhere = None if processes is None else submit_read(processes, block)
        return thread.submit(finish, block, elsewhere)

    num_ahead = -(-config.num_prefetched_steps // steps.steps_at_once) * max(config.num_loader_processes, 1)
    made = in_order(begin, blocks, num_ahead)
    return Stream(chain.from_iterable(made), _pools(processes, thread))


def streamed_steps(
    reader: SizedReader,
    share: DataShard,
    config: LoaderConfig,
    *,
    num_steps: int,
    samples_consumed: int = 0,
    order: Order | None = None,
    pin_memory: bool = False,
) -> Stream[Iterator[Batch]]:
    """Yield, for each of ``num_steps`` optimizer steps, an iterator over this worker's micro-batches.

    The same batches and the same state as ``training_steps`` (unless another ``order`` is given), for
    examples of which a whole step is too much to hold, or to wait for: each micro-batch is made by itself,
    and ``config.max_prefetched_bytes`` say how many are ready ahead, over the borders of steps. What an
    iterator was not asked for before the next step is dropped. Closing the outer one ends threads and
    processes.

    Raises:
        ShoalError: as for ``training_steps``.
    """
    steps = StepReader(reader=reader, share=share, samples_consumed=samples_consumed, order=order)
    processes = loader_processes(steps, config.num_loader_processes) if config.num_loader_processes else None
    threads = ThreadPoolExecutor(max_workers=_NUM_STREAMS, thread_name_prefix="shoal-loader")

    def finish(place: tuple[int, int], elsewhere: Future[Arrays] | None) -> Batch:
        return as_tensors(steps.read_one(*place) if elsewhere is None else _wait(elsewhere), pin_memory)

    def begin(place: tuple[int, int]) -> Future[Batch]:
        elsewhere = None if processes is None else submit_read_one(processes, *place)
        return threads.submit(finish, place, elsewhere)

    places = product(range(num_steps), range(steps.num_micro_batches))
    num_fitting = config.max_prefetched_bytes // (share.micro_batch_size * reader.example_bytes)
    batches = in_order(begin, places, max(1, config.num_loader_processes, num_fitting))

    def in_steps() -> Iterator[Iterator[Batch]]:
        for _ in range(num_steps):
            step = islice(batches, steps.num_micro_batches)
            yield step
            deque(step, maxlen=0)

    return Stream(in_steps(), _pools(processes, threads))


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
) -> Stream[Batch]:
    """Yield this worker's part of a fixed set of examples, the same whenever it is called.

    The set is at most ``limit`` examples, spread evenly over the split, or else ``indices`` ``[N]``, in their
    order; both as epoch 0 draws them. Workers share it without padding or repetition, so the last micro-batch
    may be smaller, and workers may differ by a micro-batch: sum over workers after the loop, not inside it.
    They take contiguous parts, or with ``dealt`` micro-batches in turn, which are then the same for any
    number of workers. With ``num_ahead`` a thread has so many micro-batches ready ahead.
    """
    chosen = evenly_spread(reader.num_examples, limit) if indices is None else indices
    if dealt:
        own = micro_batches(range(len(chosen)), micro_batch_size)[rank::num_workers]
    else:
        own = micro_batches(worker_part(len(chosen), rank, num_workers), micro_batch_size)

    def make(cut: range) -> Batch:
        arrays = reader.micro_batch(reader.batch(0, chosen[cut.start : cut.stop]))
        return as_tensors(arrays, pin_memory)

    if not num_ahead:
        return Stream(map(make, own), [])
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shoal-loader")
    return Stream(in_order(lambda cut: thread.submit(make, cut), own, num_ahead), [thread])


def _pools(processes: Executor | None, threads: Executor) -> list[Executor]:
    return [threads] if processes is None else [processes, threads]


def _wait(elsewhere: Future[_Made]) -> _Made:
    remedy = "ask for fewer with num_loader_processes (0 uses a thread)"
    try:
        return elsewhere.result(timeout=_DEADLINE_S)
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
    """Return ``batch`` with its tensors on ``device``; copies from pinned memory do not wait.

    Dictionaries, lists and tuples keep their form; other values stay as they are.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
