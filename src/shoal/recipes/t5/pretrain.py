"""Pretrains T5: read from top to bottom.

One optimizer step: every replica takes its part of the global batch, all stages of a replica the same; the
stage runs forward and backward over its micro-batches, which it gets from and sends to its neighbours, and
averages the gradients over the replicas; then clip, step, and now and then a line in the record, an
evaluation, a checkpoint. One worker is a pipeline of one stage and one replica.
"""

from __future__ import annotations

import math
import time
from contextlib import ExitStack, closing, nullcontext

import torch

from shoal.data.loader import Batch, LoaderConfig, Stream, training_steps
from shoal.env import WorkerEnv
from shoal.optim.lr_schedules import learning_rate
from shoal.recipes.t5.config import T5PretrainConfig
from shoal.recipes.t5.job import Job, build, model_inputs, restore
from shoal.recipes.t5.layout import resolve
from shoal.recipes.t5.telling import after_step, finish, open_log
from shoal.train.config import as_tree, required
from shoal.train.gradients import clip_to
from shoal.train.health import NonFiniteWatch, memory_advice
from shoal.train.optimizers import set_learning_rate
from shoal.train.owner import owned
from shoal.train.reporting import RunLog, has_ended
from shoal.train.run_dir import open_run_dir
from shoal.train.signals import StopRequest
from shoal.train.step import sample_names as step_samples
from shoal.train.telling import leave, say_finished
from shoal.train.window import StepWindow
from shoal.train.world import join_world

TRACED_STEP = 3
"""Which step after its start a run on a pipeline measures action by action; the first ones allocate."""


def pretrain(config: T5PretrainConfig, joined: WorkerEnv, command: list[str]) -> int:
    """Train until the last step, a signal, or a loss that stays not finite; return the exit code.

    Raises:
        UsageError: settings that cannot work together, or with the data or the run that is there.
        ShoalError: damaged data or checkpoints, a lost worker, no memory, a loss that is not finite.
    """
    stop = StopRequest()
    with join_world(joined, config.distributed) as world, ExitStack() as stack:
        run_dir = required(config.run.dir)
        stack.enter_context(owned(run_dir, world))
        config = resolve(config, world.num_workers)
        if world.is_main:
            open_run_dir(run_dir, as_tree(config), config.fixed)
        world.barrier()
        job = build(config, world)
        stack.callback(job.stage.close)
        restored = restore(job)
        first_step = restored.step if restored else 0
        last = config.train.total_steps
        if first_step > last or (first_step == last and has_ended(run_dir, first_step, world)):
            return say_finished(run_dir, first_step, last, world, longer="--train.total-steps")
        log = stack.enter_context(open_log(job, restored, command)) if world.is_main else None
        with memory_advice(job.batch.micro_batch_size, remedy="a longer --parallel.pipeline"):
            return run_steps(job, first_step, stop, log)


def run_steps(job: Job, first_step: int, stop: StopRequest, log: RunLog | None) -> int:
    """Run the steps after ``first_step`` and what comes between and after them; return the exit code."""
    began = time.monotonic()
    window = StepWindow(1)
    watch = NonFiniteWatch(job.config.train.max_nonfinite_steps)
    loss = 0.0
    with closing(batches_after(job, first_step)) as batches:
        for step, batch in enumerate(batches, start=first_step + 1):
            job.clock.mark("data")
            (num_stops,) = job.world.sum_counts(stop.requested is not None)
            if watch.note(bad=not math.isfinite(loss)):
                raise watch.error(step - 1, sample_names(job, step - 1))
            if num_stops:
                return leave(job.checkpointer, step - 1, job.state(step - 1), stop, log)
            is_traced = step == first_step + TRACED_STEP and job.stage.plan.schedule.num_ranks > 1
            with job.stage.tracing() if is_traced else nullcontext():
                loss = take_step(job, step, batch, window)
            if is_traced and log:
                log.pipeline_step(job.stage.recorded(step))
            after_step(job, step, window, log)
    return finish(job, time.monotonic() - began, log)


def batches_after(job: Job, step: int) -> Stream[Batch]:
    """Yield this replica's part of each global batch after ``step``."""
    steps = training_steps(
        job.reader,
        job.share,
        LoaderConfig(num_loader_processes=job.config.data.loader_processes),
        num_steps=job.config.train.total_steps - step,
        samples_consumed=step * job.batch.global_batch_size,
        pin_memory=job.world.device.type == "cuda",
    )
    return steps.map(lambda batches: model_inputs(job, batches[0]))


def take_step(job: Job, step: int, batch: Batch, window: StepWindow) -> float:
    """Do optimizer step ``step``; return its loss, the mean over the targets of the global batch.

    The stage gives every worker the same loss, and every stage the same norm is computed from all of them: so
    all skip a step whose gradient is not finite, or none.
    """
    set_learning_rate(job.optimizer, learning_rate(job.config.schedule, step - 1))
    with job.precision.autocast():
        loss = float(job.stage.step(**batch))
    job.clock.mark("pipeline")
    grad_norm = job.norm(gradients=True)
    if math.isfinite(grad_norm):
        clip_to(job.stage.module.parameters(), grad_norm, job.config.optim.max_grad_norm)
        job.optimizer.step()
    job.optimizer.zero_grad()
    job.clock.mark("optimizer")
    window.add(torch.tensor([loss], dtype=torch.float64), 1, grad_norm)
    job.clock.end_step()
    return loss


def sample_names(job: Job, step: int) -> list[str]:
    """Return which examples global batch ``step`` is made of, as epoch:index."""
    size = job.batch.global_batch_size
    return step_samples((step - 1) * size, size, job.reader.num_examples, job.reader.seed)
