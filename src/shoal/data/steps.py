"""A worker's examples for each optimizer step, as NumPy arrays: what a thread or a loader process makes.

This module does not import torch, so that a loader process starts in a fraction of a second.
"""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from typing import Any

import numpy.typing as npt

from shoal.data.examples import ExampleReader
from shoal.decide.order import micro_batches, samples, worker_part

Arrays = dict[str, npt.NDArray[Any]]
"""One micro-batch, as ``ExampleReader.batch`` makes it."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """Which part of each global batch a worker reads, and in which pieces."""

    global_batch_size: int
    micro_batch_size: int
    rank: int = 0
    num_workers: int = 1


@dataclass(frozen=True, kw_only=True)
class StepReader:
    """Step number → the worker's micro-batches of that step. Step 0 begins after ``samples_consumed``."""

    reader: ExampleReader
    share: Share
    samples_consumed: int

    def read(self, step: int) -> list[Arrays]:
        """Return the micro-batches of a step, in order."""
        share = self.share
        part = worker_part(share.global_batch_size, share.rank, share.num_workers)
        first = self.samples_consumed + step * share.global_batch_size + part.start
        epochs, indices = samples(first, len(part), self.reader.num_examples, self.reader.config.seed)
        cuts = micro_batches(range(len(part)), share.micro_batch_size)
        return [
            self.reader.batch(epochs[cut], indices[cut]) for cut in (slice(c.start, c.stop) for c in cuts)
        ]


def loader_processes(steps: StepReader, num_processes: int) -> ProcessPoolExecutor:
    """Return processes to which ``read_in_process`` can be submitted; each opens the shards itself.

    They are spawned: a fork would copy the locks of the worker's threads (gradient exchange, CUDA) in
    whatever state they are, and a fork server dies of a signal that is sent to every process of a job.
    """
    return ProcessPoolExecutor(
        num_processes, mp_context=get_context("spawn"), initializer=_start_process, initargs=(steps,)
    )


_steps: StepReader  # of this loader process


def _start_process(steps: StepReader) -> None:
    global _steps
    _steps = steps
    # Who stops a job may signal every process of it. The worker decides; we end when it does.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_worker, daemon=True).start()


def _end_with_worker() -> None:
    worker = parent_process()
    if worker is not None:
        worker.join()
        os._exit(1)


def read_in_process(step: int) -> list[Arrays]:
    """Return the micro-batches of a step, in a process of ``loader_processes``."""
    return _steps.read(step)
