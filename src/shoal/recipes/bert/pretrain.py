"""Pretrains BERT: read from top to bottom.

Two phases, the first with short sequences, the second with long ones: the second begins with the weights of
the first, a fresh optimizer, and examples, batch and schedule of its own. A checkpoint at the border belongs
to both: whoever continues from it begins the second phase as a run that was never interrupted does.

One optimizer step is that of ALBERT (``recipes/albert/pretrain.py``); what both share is in
``recipes/masked_lm``.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

from shoal.env import WorkerEnv
from shoal.models.pretraining import BertPretraining
from shoal.recipes.bert.config import BertPretrainConfig
from shoal.recipes.masked_lm.finetuning import finetune_if_due
from shoal.recipes.masked_lm.job import Job, build, enter_phase, restore
from shoal.recipes.masked_lm.losses import NUM_SUMS
from shoal.recipes.masked_lm.model import make_model
from shoal.recipes.masked_lm.step import agree, batches_after, take_step, warm_up
from shoal.recipes.masked_lm.telling import (
    after_step,
    finish,
    is_over,
    leave,
    open_log,
    phase_row,
    say_finished,
    tell_next_phase,
)
from shoal.train.config import as_tree, required
from shoal.train.health import memory_advice
from shoal.train.owner import owned
from shoal.train.run_dir import open_run_dir
from shoal.train.run_log import RunLog
from shoal.train.signals import StopRequest
from shoal.train.window import Meter
from shoal.train.world import join_world


def pretrain(config: BertPretrainConfig, joined: WorkerEnv, command: list[str]) -> int:
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
        job = build(config, world, make_model(config, world, BertPretraining))
        restored = restore(job)
        first_step = restored.step if restored else 0
        if is_over(job, first_step):
            return say_finished(config, first_step, world)
        job = enter_phase(job, config.phase_after(first_step), after_step=first_step)
        log = stack.enter_context(open_log(job, restored, command)) if world.is_main else None
        return run_phases(job, first_step, stop, log)


def run_phases(job: Job, first_step: int, stop: StopRequest, log: RunLog | None) -> int:
    """Run what is left of each phase after ``first_step``; return the exit code."""
    began = time.monotonic()
    step = first_step
    finetune_if_due(job, step, stop, log)
    for phase in job.config.phases:
        if step >= phase.last_step:
            continue
        if phase != job.phase:
            job = enter_phase(job, phase, after_step=step)
            if log:
                tell_next_phase(job, log)
        if log and step == phase.steps_before:
            log.phase(phase_row(job))
        with memory_advice(job.batch.micro_batch_size, section=phase.section):
            warm_up(job)
            step = run_steps(job, step, stop, log)
        if step < phase.last_step:
            return leave(job, step, stop, log)
    return finish(job, time.monotonic() - began, log)


def run_steps(job: Job, first_step: int, stop: StopRequest, log: RunLog | None) -> int:
    """Run the phase's steps after ``first_step``; return the last one done, an earlier one after a signal."""
    meter = Meter.of(job.config.train, NUM_SUMS)
    with batches_after(job, first_step) as batches:
        for step, micro_batches in batches:
            num_masked, must_stop = agree(job, meter, step, micro_batches, stop)
            if must_stop:
                return step - 1
            take_step(job, meter, step, micro_batches, num_masked)
            after_step(job, meter, step, log)
            finetune_if_due(job, step, stop, log)
    return job.phase.last_step
