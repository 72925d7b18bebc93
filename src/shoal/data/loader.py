"""Batches for a worker: its part of each global batch, ready before the step that needs it.

The state of training data is one integer, the number of samples consumed: the next global batch is the
next ``global_batch_size`` samples of the endless stream (``shoal.decide.order``), and a worker's part and
its micro-batches follow from sizes alone. Nothing else is remembered, so resuming with another number of
workers or loader processes continues with the same global batches.

A thread of the worker makes batches ahead. With loader processes, it waits for theirs. (torch's DataLoader
is not used: with a deadline it notices only at the deadline that a loader process has died, without one it
never ends if a process hangs, and its errors come with a traceback in their text.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice

import torch

from shoal.data.examples import evenly_spread
from shoal.data.steps import Arrays, Reader, Share, StepReader, loader_processes, submit_read
from shoal.decide.order import micro_batches, worker_part
from shoal.errors import ShoalError, UsageError

Batch = dict[str, torch.Tensor]
"""A micro-batch as models take it (``steps.Reader.micro_batch``), as tensors."""

_DEADLINE_S = 600.0
"""A step's batches take milliseconds; a loader process that is silent for so long hangs."""


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


def training_steps(
    reader: Reader,
    share: Share,
    config: LoaderConfig,
    *,
    num_steps: int,
    samples_consumed: int = 0,
    pin_memory: bool = False,
) -> Generator[list[Batch]]:
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
    ahead: deque[Future[list[list[Batch]]]] = deque()

    def finish(block: range, elsewhere: Future[list[list[Arrays]]] | None) -> list[list[Batch]]:
        made = steps.read(block) if elsewhere is None else _wait(elsewhere)
        return [[_tensors(arrays, pin_memory) for arrays in step] for step in made]

    def begin(count: int) -> None:
        for block in islice(blocks, count):
            elsewhere = None if processes is None else submit_read(processes, block)
            ahead.append(thread.submit(finish, block, elsewhere))

    try:
        begin(-(-config.num_prefetched_steps // steps.steps_at_once) * max(config.num_loader_processes, 1))
        while ahead:
            ready = ahead.popleft().result()
            begin(1)
            yield from ready
    finally:
        if processes is not None:
            processes.shutdown(cancel_futures=True)
        thread.shutdown(cancel_futures=True)


def held_out_batches(
    reader: Reader,
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
        yield _tensors(reader.micro_batch(reader.batch(0, indices[cut.start : cut.stop])), False)


def _wait(elsewhere: Future[list[list[Arrays]]]) -> list[list[Arrays]]:
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


def _tensors(arrays: Arrays, pin_memory: bool) -> Batch:
    batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return {name: tensor.pin_memory() for name, tensor in batch.items()} if pin_memory else batch
