"""Trains a residual network: read from top to bottom.

One optimizer step: every worker takes its part of the global batch as micro-batches, which threads have
decoded and varied ahead; forward and backward run with losses divided by the images of the whole batch, the
last backward averages the gradients, then the optimizer's update, and the norms' running statistics become
the mean of all workers'. Norms compute with the statistics of a micro-batch, so its size is part of the
recipe, and the number of workers is not. Now and then a line in the record, at the end of epochs a
checkpoint and the scores on held-out images. The same command continues from the newest checkpoint, in the
middle of an epoch too.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

from shoal.env import WorkerEnv
from shoal.recipes.images.job import restore
from shoal.recipes.images.step import agree, batches_after
from shoal.recipes.resnet.config import ResNetTrainConfig
from shoal.recipes.resnet.data import make_images_if_due, with_classes
from shoal.recipes.resnet.job import Job, build
from shoal.recipes.resnet.losses import NUM_SUMS
from shoal.recipes.resnet.step import take_step, warm_up
from shoal.recipes.resnet.telling import after_step, finish, leave, open_log
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


def train(config: ResNetTrainConfig, joined: WorkerEnv, command: list[str]) -> int:
    """Train until the last step, a signal, or a loss that stays not finite; return the exit code.

    Raises:
        UsageError: settings that cannot work together, or with the images or the run that is there.
        ShoalError: damaged images or checkpoints, a lost worker, no memory, a loss that is not finite.
    """
    stop = StopRequest()
    with join_world(joined, config.distributed) as world, ExitStack() as stack:
        stack.enter_context(owned(required(config.run.dir), world))
        config = prepare(config, world)
        job = build(config, world)
        restored = restore(job)
        first_step, last = restored.step if restored else 0, job.plan.total_steps
        run_dir = required(config.run.dir)
        if first_step > last or (first_step == last and has_ended(run_dir, first_step, world)):
            return say_finished(run_dir, first_step, last, world, longer="--train.total-epochs")
        log = stack.enter_context(open_log(job, restored, command)) if world.is_main else None
        began = time.monotonic()
        with memory_advice(job.plan.batch.micro_batch_size, unit="images", remedy="--train.precision bf16"):
            step = run_steps(job, first_step, stop, log)
            if step < last:
                return leave(job, step, stop, log)
            return finish(job, time.monotonic() - began, log)


def prepare(config: ResNetTrainConfig, world: World) -> ResNetTrainConfig:
    """Open the run directory, and make images in it where none are named; return the complete settings."""
    together(world.control, lambda: make_images_if_due(config) if world.is_main else None)
    config = with_classes(config)

    def open_dir() -> None:
        if world.is_main:
            open_run_dir(required(config.run.dir), as_tree(config), config.fixed)

    together(world.control, open_dir)
    return config


def run_steps(job: Job, first_step: int, stop: StopRequest, log: RunLog | None) -> int:
    """Run the steps after ``first_step``; return the last one done, an earlier one after a signal."""
    if first_step == job.plan.total_steps:  # only the end is left to do
        return first_step
    meter = Meter.of(job.config.train, NUM_SUMS)
    warm_up(job)
    with batches_after(job, first_step) as batches:
        for step, micro_batches in batches:
            if agree(job, meter, step, stop):
                return step - 1
            take_step(job, meter, step, micro_batches)
            after_step(job, meter, step, log)
    return job.plan.total_steps
