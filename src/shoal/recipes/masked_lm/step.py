"""The steps of a phase: which batches, what all workers agree on before each, forward, backward, update."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial

import torch

from shoal.data.loader import Batch, LoaderConfig, training_steps
from shoal.recipes.masked_lm.job import Job, share_of
from shoal.recipes.masked_lm.losses import NUM_SUMS, weighted_loss
from shoal.train import step as train_step
from shoal.train.gradients import accumulate
from shoal.train.signals import StopRequest
from shoal.train.window import Meter


@contextmanager
def batches_after(job: Job, step: int) -> Iterator[Iterator[tuple[int, list[Batch]]]]:
    """Give (number, this worker's micro-batches) of each step of the phase that follows ``step``."""
    done = step - job.phase.steps_before
    steps = training_steps(
        job.train_reader,
        share_of(job),
        LoaderConfig(num_loader_processes=job.config.data.loader_processes),
        num_steps=job.phase.num_steps - done,
        samples_consumed=done * job.batch.global_batch_size,
        pin_memory=job.world.device.type == "cuda",
    )
    with closing(steps):
        yield enumerate(steps, start=step + 1)


def agree(
    job: Job, meter: Meter, step: int, micro_batches: Sequence[Batch], stop: StopRequest
) -> tuple[int, bool]:
    """Return, over all workers, how many tokens ``step`` predicts and whether somebody wants to stop.

    Raises:
        ShoalError: the loss of the steps before was not finite too often in a row.
    """
    own_masked = sum(len(batch["masked_ids"]) for batch in micro_batches)
    job.clock.mark("data")
    num_masked, num_bad, num_stops = job.world.sum_counts(
        own_masked, not meter.loss_was_finite, stop.requested is not None
    )
    if meter.watch.note(bad=num_bad > 0):
        section = "optim" if job.phase.section == "train" else job.phase.section
        raise meter.watch.error(step - 1, sample_names(job, step - 1), section=section)
    return num_masked, num_stops > 0


def take_step(job: Job, meter: Meter, step: int, micro_batches: Sequence[Batch], num_masked: int) -> None:
    """Do optimizer step ``step`` and measure it."""
    sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=job.world.device)
    grad_norm = train_step.take_step(
        job.trained,
        micro_batches,
        partial(weighted_loss, job, num_masked, sums),
        job.config.optim,
        learning_rate=job.phase.learning_rate(step),
        dropout_seed=train_step.dropout_seed(job.config.train.seed, step, job.world.place.rank),
    )
    meter.loss_was_finite = math.isfinite(float(sums.sum()))
    meter.window.add(sums.cpu(), num_masked, grad_norm)
    job.clock.end_step()


def warm_up(job: Job) -> None:
    """Run one micro-batch forward and backward without using its gradient.

    It compiles, finds a lack of memory before the first step, and lets DistributedDataParallel arrange its
    buckets, which it does after the first backward pass: from step 1 on the order of addition is that of a
    run that was never interrupted.
    """
    steps = training_steps(job.train_reader, share_of(job), LoaderConfig(), num_steps=1, pin_memory=False)
    with closing(steps):
        first = next(steps)[:1]
    sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=job.world.device)
    with job.ddp.rehearsal():
        accumulate(job.ddp, first, partial(weighted_loss, job, 1, sums), job.clock)
    job.trained.optimizer.zero_grad()


def sample_names(job: Job, step: int) -> list[str]:
    """Return which examples global batch ``step`` is made of, as epoch:index."""
    size, reader = job.batch.global_batch_size, job.train_reader
    first = (step - 1 - job.phase.steps_before) * size
    return train_step.sample_names(first, size, reader.num_examples, job.config.train.seed)
