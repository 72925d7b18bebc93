"""Maps a step number to a worker's examples, as NumPy arrays. Runs in a thread or in a loader process.

This module does not import torch, so that a loader process starts in a fraction of a second.
"""

from __future__ import annotations

import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from shoal.decide.order import Order, ShuffledOrder, micro_batches, worker_part
from shoal.decide.rng import Int64Array
from shoal.errors import WARNING_SIGNALS

_BLOCK_TOKENS = 1 << 14
"""NumPy's overhead per call dominates small batches: 32 × 128 tokens take 0.75 ms alone, 0.34 ms four at a
time. Beyond this, arrays leave the processor's caches and it gets slower again."""

Arrays = dict[str, Any]
"""A micro-batch as models take it: arrays, and numbers such as the ``max_seqlen`` of a packed one."""

_Read = TypeVar("_Read")


class Reader(ABC):
    """Makes the examples of a split, a pure function of (seed, epoch, index). Picklable.

    It is also a map-style data set of the examples of one epoch, 0 unless ``epoch`` is set, for a plain
    ``torch.utils.data.DataLoader``::

        reader.epoch = 1
        for batch in DataLoader(reader, batch_size=32, shuffle=True, num_workers=2): ...

    Attributes:
        seed: decides the draws of the examples and their order.
        example_tokens: tokens, or other values, that making one example touches at most.
        epoch: of the examples that indexing returns.
    """

    seed: int
    example_tokens: int
    epoch: int = 0

    @property
    @abstractmethod
    def num_examples(self) -> int:
        """The number of examples in an epoch."""

    @property
    def full_shuffle(self) -> Order:
        """The order of the examples unless a loader is given another one."""
        return ShuffledOrder(num_examples=self.num_examples, seed=self.seed)

    def prefetch(self, steps: Iterable[Int64Array]) -> None:  # noqa: B027  # most read what is at hand
        """Fetch in the background what a worker needs, by the indices of the examples of each step."""

    @abstractmethod
    def batch(self, epochs: npt.ArrayLike, indices: npt.ArrayLike) -> dict[str, npt.NDArray[Any]]:
        """Return the examples ``indices`` of ``epochs``, each ``[B]``; a pure function."""

    @abstractmethod
    def micro_batch(self, arrays: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Return some examples of a batch in the form that models take."""

    def __len__(self) -> int:
        return self.num_examples

    def __getitem__(self, index: int) -> Arrays:
        """Return one example of ``epoch``: the rows of ``batch`` without their first dimension.

        Raises:
            IndexError: there is no such example.
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Arrays]:
        """Return several examples of ``epoch``, made together; a DataLoader calls this once per batch.

        Raises:
            IndexError: there is no such example.
        """
        if not all(0 <= index < len(self) for index in indices):
            raise IndexError(f"examples {list(indices)} of {len(self)}")
        arrays = self.batch(self.epoch, indices)
        return [{name: array[row] for name, array in arrays.items()} for row in range(len(indices))]


class SizedReader(Reader):
    """A reader of large examples, which are prefetched by bytes instead of steps."""

    @property
    @abstractmethod
    def example_bytes(self) -> int:
        """Bytes of one example in a batch."""


def example_names(epochs: npt.ArrayLike, indices: npt.ArrayLike) -> tuple[Int64Array, Int64Array]:
    """Return both as new int64 vectors ``[B]``, which may go into a batch; ``epochs`` may be a scalar."""
    indices_ = np.array(indices, dtype=np.int64, ndmin=1)
    epochs_ = np.empty_like(indices_)
    epochs_[:] = epochs
    return epochs_, indices_


def evenly_spread(num_examples: int, limit: int | None) -> Int64Array:
    """Return at most ``limit`` indices spread evenly over all examples: a fixed choice, in order."""
    count = num_examples if limit is None else min(limit, num_examples)
    return np.arange(count, dtype=np.int64) * num_examples // max(count, 1)


@dataclass(frozen=True, kw_only=True)
class DataShard:
    """The part of each global batch that a worker reads, and the size of its micro-batches."""

    global_batch_size: int
    micro_batch_size: int
    rank: int = 0
    num_workers: int = 1
    shares: tuple[int, ...] = ()
    """Samples of each worker, by rank; default: equal shares."""

    @property
    def part(self) -> range:
        """The worker's samples within a global batch."""
        return worker_part(self.global_batch_size, self.rank, self.num_workers, self.shares)

    @property
    def num_micro_batches(self) -> int:
        """The worker's micro-batches per step."""
        return -(-len(self.part) // self.micro_batch_size)


@dataclass(frozen=True, kw_only=True)
class StepReader:
    """Reads the worker's micro-batches of a step. Step 0 begins after ``samples_consumed`` samples.

    The order is the full shuffle by the reader's seed unless another one is given.
    """

    reader: Reader
    share: DataShard
    samples_consumed: int = 0
    order: Order | None = None

    @property
    def steps_at_once(self) -> int:
        """The number of steps per call of ``read`` that fills a block."""
        return max(1, _BLOCK_TOKENS // (max(len(self.share.part), 1) * self.reader.example_tokens))

    def read(self, steps: range) -> list[list[Arrays]]:
        """Return the micro-batches of each of consecutive steps, in order.

        Examples are made in blocks of several micro-batches, which does not change them.
        """
        share, part = self.share, self.share.part
        per_step = micro_batches(range(len(part)), share.micro_batch_size)
        firsts = self.samples_consumed + np.asarray(steps, dtype=np.int64) * share.global_batch_size
        epochs, indices = self._examples((firsts[:, None] + np.asarray(part, dtype=np.int64)).ravel())
        cuts = [
            slice(step * len(part) + cut.start, step * len(part) + cut.stop)
            for step in range(len(steps))
            for cut in per_step
        ]
        block_size = max(1, _BLOCK_TOKENS // (share.micro_batch_size * self.reader.example_tokens))
        made: list[Arrays] = []
        for first in range(0, len(cuts), block_size):
            block = cuts[first : first + block_size]
            begin = block[0].start
            arrays = self.reader.batch(epochs[begin : block[-1].stop], indices[begin : block[-1].stop])
            made += [
                self.reader.micro_batch(
                    {name: a[cut.start - begin : cut.stop - begin] for name, a in arrays.items()}
                )
                for cut in block
            ]
        return [made[i * len(per_step) : (i + 1) * len(per_step)] for i in range(len(steps))]

    def read_one(self, step: int, number: int) -> Arrays:
        """Return micro-batch ``number`` of a step alone, the same that ``read`` returns."""
        cut = micro_batches(self.share.part, self.share.micro_batch_size)[number]
        first = self.samples_consumed + step * self.share.global_batch_size
        epochs, indices = self._examples(first + np.asarray(cut, dtype=np.int64))
        return self.reader.micro_batch(self.reader.batch(epochs, indices))

    def indices(self, step: int) -> Int64Array:
        """Return the indices of the worker's examples of a step, in order."""
        first = self.samples_consumed + step * self.share.global_batch_size
        return self._examples(first + np.asarray(self.share.part, dtype=np.int64))[1]

    def _examples(self, numbers: Int64Array) -> tuple[Int64Array, Int64Array]:
        return (self.order or self.reader.full_shuffle).examples_of(numbers)


def loader_processes(steps: StepReader, num_processes: int) -> ProcessPoolExecutor:
    """Return a pool of processes for ``submit``; each opens the shards itself.

    They are spawned: a fork would copy the locks of the worker's threads (gradient exchange, CUDA) in any
    state, and a fork server dies of a signal that is sent to every process of a job.
    """
    return ProcessPoolExecutor(
        num_processes, mp_context=get_context("spawn"), initializer=_start_process, initargs=(steps,)
    )


def submit(processes: ProcessPoolExecutor, read: Callable[..., _Read], *args: range | int) -> Future[_Read]:
    """Call ``StepReader.read`` or ``StepReader.read_one`` of the reader of one of ``processes``."""
    with _signals_blocked():
        return processes.submit(_read_in_process, read, *args)


_LEFT_TO_WORKER = (signal.SIGINT, signal.SIGTERM, *WARNING_SIGNALS)
"""A launcher may signal every process of a job. The worker decides; loader processes end when it does."""


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block signals while a process may be started, which inherits the mask for its whole life."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_WORKER)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_steps: StepReader  # of this loader process


def _start_process(steps: StepReader) -> None:
    global _steps
    _steps = steps
    threading.Thread(target=exit_with_parent, daemon=True).start()


def exit_with_parent() -> None:
    """Wait for the end of the process that spawned this one, then exit at once."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _read_in_process(read: Callable[..., _Read], *args: range | int) -> _Read:
    return read(_steps, *args)
