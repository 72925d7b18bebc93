"""The optimizer steps: which images, what all workers agree on before each, forward, backward, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.data.loader import Batch, LoaderConfig, streamed_steps
from shoal.recipes.mask_rcnn.images_job import ImageJob
from shoal.train import step as train_step
from shoal.train.clock import StepClock
from shoal.train.gradients import accumulate
from shoal.train.signals import StopRequest
from shoal.train.window import Meter

WeightedLoss = Callable[[int, Tensor, Batch], Tensor]
"""Takes a step, sums of figures ``[n]`` to add to, and a micro-batch; returns the latter's part of the mean
loss over the global batch, times the number of workers and the loss scale."""


@dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """A step's micro-batches as they become ready; the clock counts the waiting for each."""

    batches: Iterator[Batch]
    count: int
    clock: StepClock

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            self.clock.mark("data")
            yield batch


@contextmanager
def batches_after(job: ImageJob, step: int) -> Iterator[Iterator[tuple[int, MicroBatches]]]:
    """Give (number, this worker's micro-batches) of each step that follows ``step``."""
    steps = streamed_steps(
        job.train_reader,
        job.share,
        job.loader,
        num_steps=job.plan.total_steps - step,
        samples_consumed=job.plan.samples(step),
        order=job.order,
        pin_memory=job.world.device.type == "cuda",
    )
    count, clock = job.plan.batch.accumulation_steps, job.clock
    with closing(steps):
        yield (
            (number, MicroBatches(batches=batches, count=count, clock=clock))
            for number, batches in enumerate(steps, start=step + 1)
        )


def agree(job: ImageJob, meter: Meter, step: int, stop: StopRequest) -> bool:
    """Return, the same on all workers, whether somebody wants to stop before ``step``.

    Raises:
        ShoalError: the loss of the steps before was not finite too often in a row.
    """
    num_bad, num_stops = job.world.sum_counts(not meter.loss_was_finite, stop.requested is not None)
    if meter.watch.note(bad=num_bad > 0):
        epochs, indices = job.order.examples_of(
            np.arange(job.plan.samples(step - 2), job.plan.samples(step - 1))
        )
        names = [f"{epoch}:{index}" for epoch, index in zip(epochs, indices, strict=True)]
        raise meter.watch.error(step - 1, names)
    return num_stops > 0


def take_step(
    job: ImageJob,
    meter: Meter,
    step: int,
    micro_batches: MicroBatches,
    loss: WeightedLoss,
    *,
    finish: Callable[[], None] | None = None,
) -> None:
    """Do optimizer step ``step`` and measure it.

    Args:
        finish: what follows the update; counted as the optimizer's.
    """
    sums = torch.zeros(len(meter.window.sums), dtype=torch.float64, device=job.world.device)
    grad_norm = train_step.take_step(
        job.trained,
        micro_batches,
        partial(loss, step, sums),
        job.config.optim,
        learning_rate=job.plan.learning_rate(step),
        dropout_seed=train_step.dropout_seed(job.config.train.seed, step, job.world.place.rank),
    )
    average_over_workers(job.statistics)
    job.clock.mark("gradient_wait")
    if finish:
        finish()
        job.clock.mark("optimizer")
    meter.loss_was_finite = math.isfinite(float(sums.sum()))
    meter.window.add(sums.cpu(), job.plan.batch.global_batch_size, grad_norm)
    job.clock.end_step()


def average_over_workers(tensors: list[Tensor]) -> None:
    """Replace each of ``tensors`` by its mean over all workers.

    Each worker's norms see its own micro-batches. With their running statistics made one after each step
    (0.2 MB beside ResNet-50's 102 MB of gradients), a checkpoint and an evaluation find the same model on
    every worker, whenever they come and however the run was interrupted.
    """
    if not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    torch._foreach_copy_(tensors, [part.view_as(t) for part, t in zip(parts, tensors, strict=True)])


def warm_up(job: ImageJob, loss: WeightedLoss, num_sums: int) -> None:
    """Run one micro-batch forward and backward without using its gradient, and put the statistics back.

    It compiles, finds a lack of memory before the first step, and lets DistributedDataParallel arrange its
    buckets, which it does after the first backward pass: from step 1 on the order of addition is that of a
    run that was never interrupted.
    """
    buffers = list(job.model.buffers())
    before = [buffer.clone() for buffer in buffers]
    config = LoaderConfig(max_prefetched_bytes=0)
    steps = streamed_steps(job.train_reader, job.share, config, num_steps=1, order=job.order)
    with closing(steps):
        first = next(next(steps))
    sums = torch.zeros(num_sums, dtype=torch.float64, device=job.world.device)
    with job.ddp.rehearsal():
        accumulate(job.ddp, [first], partial(loss, 1, sums), job.clock)
    job.trained.optimizer.zero_grad()
    for buffer, value in zip(buffers, before, strict=True):
        buffer.copy_(value)
