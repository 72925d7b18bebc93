"""A worker's examples for each optimizer step, as NumPy arrays: what a thread or a loader process makes.

This module does not import torch, so that a loader process starts in a fraction of a second.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shoal.decide.order import Order, ShuffledOrder, micro_batches, worker_part
from shoal.decide.rng import Int64Array

_BLOCK_TOKENS = 1 << 14
"""NumPy's cost a call is most of a small batch: 32 × 128 tokens take 0.75 ms alone, 0.34 ms four at a time.
Beyond this, arrays leave the processor's caches and it gets slower again."""

Arrays = dict[str, Any]
"""A micro-batch as models take it: arrays, and numbers such as the ``max_seqlen`` of a packed one."""


class Reader(Protocol):
    """What makes examples: ``examples.ExampleReader``, ``span_corruption.SpanReader``. Picklable."""

    @property
    def num_examples(self) -> int:
        """Examples in one epoch."""

    @property
    def seed(self) -> int:
        """What decides the order of the examples."""

    @property
    def example_tokens(self) -> int:
        """Tokens that making one example goes through at most."""

    def batch(self, epochs: npt.ArrayLike, indices: npt.ArrayLike) -> dict[str, npt.NDArray[Any]]:
        """Return the examples ``indices`` as they are in ``epochs``, all ``[B]``; a pure function."""

    def micro_batch(self, arrays: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Return some examples of a batch in the form that models take."""


class SizedReader(Reader, Protocol):
    """A reader whose examples are large, so that how many are ready ahead is counted in bytes."""

    @property
    def example_bytes(self) -> int:
        """Bytes of one example in a batch."""


@dataclass(frozen=True, kw_only=True)
class DataShard:
    """Which part of each global batch a worker reads, and in which pieces."""

    global_batch_size: int
    micro_batch_size: int
    rank: int = 0
    num_workers: int = 1


@dataclass(frozen=True, kw_only=True)
class StepReader:
    """Step number → the worker's micro-batches of that step. Step 0 begins after ``samples_consumed``.

    The order is the full shuffle by the reader's seed unless another one is given.
    """

    reader: Reader
    share: DataShard
    samples_consumed: int
    order: Order | None = None

    @property
    def steps_at_once(self) -> int:
        """How many steps ``read`` should be asked for at once, so that they fill a block."""
        return max(1, _BLOCK_TOKENS // (max(len(self._part), 1) * self.reader.example_tokens))

    def read(self, steps: range) -> list[list[Arrays]]:
        """Return, for each of consecutive steps, its micro-batches in order.

        Examples are made in blocks of several micro-batches; that changes nothing in them.
        """
        share, part = self.share, self._part
        per_step = micro_batches(range(len(part)), share.micro_batch_size)
        firsts = self.samples_consumed + np.asarray(steps, dtype=np.int64) * share.global_batch_size
        numbers = (firsts[:, None] + np.asarray(part, dtype=np.int64)).ravel()
        epochs, indices = self._examples(numbers)
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

    @property
    def num_micro_batches(self) -> int:
        """The worker's micro-batches in each step."""
        return -(-len(self._part) // self.share.micro_batch_size)

    def read_one(self, step: int, number: int) -> Arrays:
        """Return micro-batch ``number`` of a step by itself, the same as ``read`` makes."""
        cut = micro_batches(self._part, self.share.micro_batch_size)[number]
        first = self.samples_consumed + step * self.share.global_batch_size
        epochs, indices = self._examples(first + np.asarray(cut, dtype=np.int64))
        return self.reader.micro_batch(self.reader.batch(epochs, indices))

    def _examples(self, numbers: Int64Array) -> tuple[Int64Array, Int64Array]:
        order = self.order
        if order is None:
            order = ShuffledOrder(num_examples=self.reader.num_examples, seed=self.reader.seed)
        return order.examples_of(numbers)

    @property
    def _part(self) -> range:
        return worker_part(self.share.global_batch_size, self.share.rank, self.share.num_workers)


def evenly_spread(num_examples: int, limit: int | None) -> Int64Array:
    """Return at most ``limit`` indices spread evenly over all examples: a fixed choice, in order."""
    count = num_examples if limit is None else min(limit, num_examples)
    return np.arange(count, dtype=np.int64) * num_examples // max(count, 1)


def loader_processes(steps: StepReader, num_processes: int) -> ProcessPoolExecutor:
    """Return processes for ``submit_read``; each opens the shards itself.

    They are spawned: a fork would copy the locks of the worker's threads (gradient exchange, CUDA) in
    whatever state they are, and a fork server dies of a signal that is sent to every process of a job.
    """
    return ProcessPoolExecutor(
        num_processes, mp_context=get_context("spawn"), initializer=_start_process, initargs=(steps,)
    )


def submit_read(processes: ProcessPoolExecutor, steps: range) -> Future[list[list[Arrays]]]:
    """Have one of ``processes`` read steps."""
    with _signals_left_to_worker():
        return processes.submit(_read_in_process, steps)


def submit_read_one(processes: ProcessPoolExecutor, step: int, number: int) -> Future[Arrays]:
    """Have one of ``processes`` read one micro-batch."""
    with _signals_left_to_worker():
        return processes.submit(_read_one_in_process, step, number)


_LEFT_TO_WORKER = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Who stops a job may signal every process of it. The worker decides; loader processes end when it does."""


@contextmanager
def _signals_left_to_worker() -> Iterator[None]:
    """A process may be started in this block. It inherits the mask for its whole life."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_WORKER)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_steps: StepReader  # of this loader process


def _start_process(steps: StepReader) -> None:
    global _steps
    _steps = steps
    threading.Thread(target=_end_with_worker, daemon=True).start()


def _end_with_worker() -> None:
    worker = parent_process()
    if worker is not None:
        worker.join()
        os._exit(1)


def _read_in_process(steps: range) -> list[list[Arrays]]:
    return _steps.read(steps)


def _read_one_in_process(step: int, number: int) -> Arrays:
    return _steps.read_one(step, number)
