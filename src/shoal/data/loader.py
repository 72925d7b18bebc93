"""Batches for a worker: its part of each global batch, ready before the step that needs it.

The state of training data is one integer, the number of samples consumed: the next global batch is the
next ``global_batch_size`` samples of the endless stream (``shoal.decide.order``), and a worker's part and
its micro-batches follow from sizes alone. Nothing else is remembered, so resuming with another number of
workers or loader processes continues with the same global batches.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from shoal.data.examples import ExampleReader, evenly_spread
from shoal.decide.order import micro_batches, samples, worker_part
from shoal.errors import ShoalError, UsageError

_DEADLINE_S = 600.0
"""A step's batches take milliseconds; a loader process that is silent for so long hangs."""

Batch = dict[str, torch.Tensor]
"""What ``ExampleReader.batch`` makes, as tensors."""


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """How batches are made ready; none of it changes which batches.

    With ``num_loader_processes=0`` a thread of the worker makes them, which is enough for text: a
    micro-batch of 32 × 128 tokens takes less than a millisecond.
    """

    num_loader_processes: int = 0
    num_prefetched_steps: int = 2

    def __post_init__(self) -> None:
        if self.num_loader_processes < 0:
            raise UsageError(f"num_loader_processes {self.num_loader_processes} must be at least 0")
        if self.num_prefetched_steps < 1:
            raise UsageError(f"num_prefetched_steps {self.num_prefetched_steps} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Share:
    """Which part of each global batch a worker reads, and in which pieces."""

    global_batch_size: int
    micro_batch_size: int
    rank: int = 0
    num_workers: int = 1


class StepReader(Dataset[list[Batch]]):
    """Step number → the worker's micro-batches of that step, in order. A map without state."""

    def __init__(self, reader: ExampleReader, share: Share, samples_consumed: int) -> None:
        self._reader = reader
        self._share = share
        self._samples_consumed = samples_consumed

    def __getitem__(self, step: int) -> list[Batch]:
        share = self._share
        part = worker_part(share.global_batch_size, share.rank, share.num_workers)
        first = self._samples_consumed + step * share.global_batch_size + part.start
        epochs, indices = samples(first, len(part), self._reader.num_examples, self._reader.config.seed)
        return [
            _tensors(self._reader, epochs[cut], indices[cut])
            for cut in (
                slice(m.start, m.stop) for m in micro_batches(range(len(part)), share.micro_batch_size)
            )
        ]


class _ErrorsAsValues(Dataset[list[Batch] | ShoalError]):
    """Hands errors over as they are; DataLoader would put a traceback into their message."""

    def __init__(self, steps: StepReader) -> None:
        self._steps = steps

    def __getitem__(self, step: int) -> list[Batch] | ShoalError:
        try:
            return self._steps[step]
        except ShoalError as error:
            return error


def training_steps(
    reader: ExampleReader,
    share: Share,
    config: LoaderConfig,
    *,
    num_steps: int,
    samples_consumed: int = 0,
    pin_memory: bool = False,
) -> Iterator[list[Batch]]:
    """Yield, for each of ``num_steps`` optimizer steps, this worker's micro-batches.

    The first step begins after ``samples_consumed`` samples; after step ``i`` (from 0) the state is
    ``samples_consumed + (i + 1) * global_batch_size``. Batches are made ahead, in ``pin_memory`` if asked
    (for copies to a GPU that do not wait). Closing the iterator ends its thread or processes.

    Raises:
        ShoalError: a shard turned out to be damaged while it was read; a loader process died or hangs.
    """
    steps = StepReader(reader, share, samples_consumed)
    if config.num_loader_processes:
        return _from_processes(steps, config, num_steps, pin_memory)
    return _from_thread(steps, config, num_steps, pin_memory)


def held_out_batches(
    reader: ExampleReader,
    *,
    micro_batch_size: int,
    limit: int | None = None,
    rank: int = 0,
    num_workers: int = 1,
) -> Iterator[Batch]:
    """Yield this worker's part of a fixed set of examples, the same whenever it is called.

    The set is at most ``limit`` examples, spread evenly over the split, as epoch 0 draws them. Workers
    share it without padding or repetition, so the last micro-batch may be smaller, and workers may differ
    by a micro-batch: sum over workers after the loop, not inside it.
    """
    indices = evenly_spread(reader.num_examples, limit)
    for cut in micro_batches(worker_part(len(indices), rank, num_workers), micro_batch_size):
        part = indices[cut.start : cut.stop]
        yield _tensors(reader, 0, part)


def _tensors(reader: ExampleReader, epochs: npt.ArrayLike, indices: npt.ArrayLike) -> Batch:
    return {name: torch.from_numpy(array) for name, array in reader.batch(epochs, indices).items()}


def _from_thread(
    steps: StepReader, config: LoaderConfig, num_steps: int, pin_memory: bool
) -> Iterator[list[Batch]]:
    def make(step: int) -> list[Batch]:
        batches = steps[step]
        if pin_memory:
            batches = [{name: t.pin_memory() for name, t in batch.items()} for batch in batches]
        return batches

    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shoal-loader")
    numbers = iter(range(num_steps))
    ahead: deque[Future[list[Batch]]] = deque()
    try:
        ahead.extend(thread.submit(make, step) for step in islice(numbers, config.num_prefetched_steps))
        while ahead:
            ready = ahead.popleft().result()
            ahead.extend(thread.submit(make, step) for step in islice(numbers, 1))
            yield ready
    finally:
        thread.shutdown(cancel_futures=True)


def _from_processes(
    steps: StepReader, config: LoaderConfig, num_steps: int, pin_memory: bool
) -> Iterator[list[Batch]]:
    # A fork would copy the locks of the worker's threads (gradient exchange, CUDA) in whatever state they
    # are; the fork server is started clean and imports torch once for all loader processes.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["shoal.data.loader"])
    loader = DataLoader(
        _ErrorsAsValues(steps),
        batch_size=None,
        sampler=range(num_steps),
        num_workers=config.num_loader_processes,
        prefetch_factor=config.num_prefetched_steps,
        multiprocessing_context=context,
        pin_memory=pin_memory,
        timeout=_DEADLINE_S,
    )
    try:
        for result in loader:
            if isinstance(result, ShoalError):
                raise result
            yield result
    except RuntimeError as error:
        if "DataLoader" not in str(error):
            raise
        raise ShoalError(
            f"a loader process failed: {str(error).splitlines()[0]}; if memory ran out, ask for fewer with "
            "num_loader_processes (0 uses a thread)"
        ) from error
