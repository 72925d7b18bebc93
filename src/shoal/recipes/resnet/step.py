"""The optimizer steps of a residual network; its average follows its weights."""

from __future__ import annotations

from functools import partial

from shoal.recipes.images import step as image_step
from shoal.recipes.images.step import MicroBatches
from shoal.recipes.resnet.job import Job
from shoal.recipes.resnet.losses import NUM_SUMS, weighted_loss
from shoal.train.window import Meter


def take_step(job: Job, meter: Meter, step: int, micro_batches: MicroBatches) -> None:
    """Do optimizer step ``step`` and measure it."""
    average = job.average
    image_step.take_step(
        job,
        meter,
        step,
        micro_batches,
        partial(weighted_loss, job),
        finish=(lambda: average.update(job.model, step)) if average else None,
    )


def warm_up(job: Job) -> None:
    """Run one micro-batch without using its gradient (:func:`shoal.recipes.images.step.warm_up`)."""
    image_step.warm_up(job, partial(weighted_loss, job), NUM_SUMS)
