"""Trains Mask R-CNN: read from top to bottom.

One optimizer step: every worker takes its part of the global batch as micro-batches of images of one aspect,
which threads have decoded and varied ahead with their boxes and masks; forward and backward run with losses
that are means over the images of the whole batch, the last backward averages the gradients, then the
optimizer's update. Now and then a line in the record, a checkpoint, and COCO's scores of what all workers
find in the held-out images. The same command continues from the newest checkpoint, in the middle of an epoch
too.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial

from shoal.env import WorkerEnv
from shoal.recipes.mask_rcnn.config import MaskRCNNTrainConfig
from shoal.recipes.mask_rcnn.data import make_images_if_due
from shoal.recipes.mask_rcnn.images_job import restore
from shoal.recipes.mask_rcnn.images_step import agree, batches_after, take_step, warm_up
from shoal.recipes.mask_rcnn.job import Job, begin_with_weights, build
from shoal.recipes.mask_rcnn.losses import NUM_SUMS, weighted_loss
from shoal.recipes.mask_rcnn.telling import after_step, finish, leave, open_log
from shoal.train.config import as_tree, required
from shoal.train.exchange import together
from shoal.train.health import memory_advice
from shoal.train.owner import owned
from shoal.train.reporting import RunLog, has_ended
from shoal.train.run_dir import open_run_dir
from shoal.train.signals import StopRequest
from shoal.train.telling import say_finished
from shoal.train.window import Meter
from shoal.train.world import World, join_world


def train(config: MaskRCNNTrainConfig, joined: WorkerEnv, command: list[str]) -> int:
    """Train until the last step, a signal, or a loss that stays not finite; return the exit code.

    Raises:
        UsageError: settings that cannot work together, or with the images or the run that is there.
        ShoalError: damaged images or checkpoints, a lost worker, no memory, a loss that is not finite.
    """
    stop = StopRequest()
    with join_world(joined, config.distributed) as world, ExitStack() as stack:
        stack.enter_context(owned(required(config.run.dir), world))
        prepare(config, world)
        job = build(config, world)
        restored = restore(job)
        weights = "the checkpoint" if restored else begin_with_weights(job)
        first_step, last = restored.step if restored else 0, job.plan.total_steps
        run_dir = required(config.run.dir)
        if first_step > last or (first_step == last and has_ended(run_dir, first_step, world)):
            return say_finished(run_dir, first_step, last, world, longer="--train.total-steps")
        log = stack.enter_context(open_log(job, restored, command, weights)) if world.is_main else None
        began = time.monotonic()
        with memory_advice(job.plan.batch.micro_batch_size, unit="images", remedy="--train.precision bf16"):
            step = run_steps(job, first_step, stop, log)
            if step < last:
                return leave(job, step, stop, log)
            return finish(job, time.monotonic() - began, log)


def prepare(config: MaskRCNNTrainConfig, world: World) -> None:
    """Open the run directory, and make images in it where none are named."""

    def on_main() -> None:
        if world.is_main:
            make_images_if_due(config)
            open_run_dir(required(config.run.dir), as_tree(config), config.fixed)

    together(world.control, on_main)


def run_steps(job: Job, first_step: int, stop: StopRequest, log: RunLog | None) -> int:
    """Run the steps after ``first_step``; return the last one done, an earlier one after a signal."""
    if first_step == job.plan.total_steps:  # only the end is left to do
        return first_step
    meter, loss = Meter.of(job.config.train, NUM_SUMS), partial(weighted_loss, job)
    warm_up(job, loss, NUM_SUMS)
    with batches_after(job, first_step) as batches:
        for step, micro_batches in batches:
            if agree(job, meter, step, stop):
                return step - 1
            take_step(job, meter, step, micro_batches, loss)
            after_step(job, meter, step, log)
    return job.plan.total_steps
