"""Pretrains ALBERT: read from top to bottom.

One optimizer step: every worker takes its part of the global batch as packed micro-batches, the workers agree
on how many masked tokens the whole batch has, forward and backward run with losses divided by that number,
the last backward averages the gradients, then clip, step, and now and then a line in the record, an
evaluation, a checkpoint. What BERT does in the same way is in ``recipes/masked_lm``.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

from shoal.env import WorkerEnv
from shoal.models.pretraining import AlbertPretraining
from shoal.recipes.albert.config import AlbertPretrainConfig
from shoal.recipes.masked_lm.finetuning import finetune_if_due
from shoal.recipes.masked_lm.job import Job, build, restore
from shoal.recipes.masked_lm.losses import NUM_SUMS
from shoal.recipes.masked_lm.model import make_model
from shoal.recipes.masked_lm.step import agree, batches_after, take_step, warm_up
from shoal.recipes.masked_lm.telling import after_step, finish, is_over, leave, open_log, say_finished
from shoal.train.config import as_tree, required
from shoal.train.health import memory_advice
from shoal.train.owner import owned
from shoal.train.run_dir import open_run_dir
from shoal.train.run_log import RunLog
from shoal.train.signals import StopRequest
from shoal.train.window import Meter
from shoal.train.world import join_world


def pretrain(config: AlbertPretrainConfig, joined: WorkerEnv, command: list[str]) -> int:
    """Train until the last step, a signal, or a loss that stays not finite; return the exit code.

    Raises:
        UsageError: settings that cannot work together, or with the data or the run that is there.
        ShoalError: damaged data or checkpoints, a lost worker, no memory, a loss that is not finite.
    """
    stop = StopRequest()
    with join_world(joined, config.distributed) as world, ExitStack() as stack:
        stack.enter_context(owned(required(config.run.dir), world))
        if world.is_main:
            open_run_dir(required(config.run.dir), as_tree(config), config.fixed)
        world.barrier()
        job = build(config, world, make_model(config, world, AlbertPretraining))
        restored = restore(job)
        first_step = restored.step if restored else 0
        if is_over(job, first_step):
            return say_finished(config, first_step, world)
        log = stack.enter_context(open_log(job, restored, command)) if world.is_main else None
        with memory_advice(job.batch.micro_batch_size):
            if first_step < config.total_steps:
                warm_up(job)
            return run_steps(job, first_step, stop, log)


def run_steps(job: Job, first_step: int, stop: StopRequest, log: RunLog | None) -> int:
    """Run the steps after ``first_step`` and what comes between and after them; return the exit code."""
    began = time.monotonic()
    meter = Meter.of(job.config.train, NUM_SUMS)
    finetune_if_due(job, first_step, stop, log)
    with batches_after(job, first_step) as batches:
        for step, micro_batches in batches:
            num_masked, must_stop = agree(job, meter, step, micro_batches, stop)
            if must_stop:
                return leave(job, step - 1, stop, log)
            take_step(job, meter, step, micro_batches, num_masked)
            after_step(job, meter, step, log)
            finetune_if_due(job, step, stop, log)
    return finish(job, time.monotonic() - began, log)
