"""Pretrains ALBERT: read from top to bottom.

One optimizer step: every worker takes its part of the global batch as micro-batches, the workers agree on
how many masked tokens the whole batch has, forward and backward run with losses divided by that number, the
last backward averages the gradients, then clip, step, and now and then a line in the record, an evaluation,
a checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial

import torch
from torch import Tensor

from shoal import record
from shoal.data.loader import Batch, LoaderConfig, held_out_batches, training_steps
from shoal.decide.draws import random_keys
from shoal.decide.order import samples
from shoal.env import Joined
from shoal.errors import EXIT_OK, EXIT_STOPPED
from shoal.models.albert_config import num_parameters
from shoal.optim.schedules import learning_rate
from shoal.recipes.albert.config import FIXED, AlbertPretrainConfig
from shoal.recipes.albert.export import write_export
from shoal.recipes.albert.job import Job, build, share_of
from shoal.recipes.albert.scores import (
    NUM_SUMS,
    evaluate,
    metrics_of,
    reference_lines,
    total_loss,
    verdict,
)
from shoal.train.checkpoint import Restored
from shoal.train.config import as_tree, required
from shoal.train.gradients import accumulate, average_and_clip, loss_weight, norm_of
from shoal.train.health import NonFiniteWatch, memory_advice
from shoal.train.optimizers import set_learning_rate
from shoal.train.progress import Progress
from shoal.train.run_dir import open_run_dir
from shoal.train.run_log import RunLog, device_name, versions
from shoal.train.signals import StopRequest
from shoal.train.window import StepWindow, peak_memory_bytes
from shoal.train.world import World, join_world

DROPOUT = 7  # this script's word among the uses of one seed
INPUTS = (
    "input_ids",
    "token_type_ids",
    "attention_mask",
    "masked_positions",
    "masked_ids",
    "masked_weights",
    "labels",
)


def pretrain(config: AlbertPretrainConfig, *, joined: Joined, command: list[str]) -> int:
    """Train until the last step, a signal, or a loss that stays not finite; return the exit code.

    Raises:
        UsageError: settings that cannot work together, or with the data or the run that is there.
        ShoalError: damaged data or checkpoints, a lost worker, no memory, a loss that is not finite.
    """
    stop = StopRequest()
    with join_world(joined, config.distributed) as world, ExitStack() as stack:
        if world.is_main:
            open_run_dir(required(config.run.dir), as_tree(config), FIXED)
        world.barrier()
        job = build(config, world)
        restored = job.checkpointer.restore(job.state(0))
        if restored:
            job.scale.load_state_dict(restored.values["loss_scale"])
        first_step = restored.step if restored else 0
        if first_step >= config.train.total_steps:
            return say_finished(config, first_step, world)
        log = stack.enter_context(open_log(job, restored, command)) if world.is_main else None
        with memory_advice(job.batch.micro_batch_size):
            warm_up(job)
            return run_steps(job, first_step, stop, log)


def open_log(job: Job, restored: Restored | None, command: list[str]) -> RunLog:
    """Begin the record: the settings, the arithmetic of the batch, the world, where it goes on from."""
    config, world, batch = job.config, job.world, job.batch
    first_step = restored.step if restored else 0
    log = RunLog(required(config.run.dir), Progress(config.train.total_steps, first_step))
    held_out_whole = list(held_out(job, whole=True))
    log.start(
        record.Start(
            run=required(config.run.name),
            recipe="albert",
            command=command,
            config=as_tree(config),
            num_workers=world.num_workers,
            num_hosts=world.num_hosts,
            backend=world.backend,
            device=device_name(world.device),
            precision=job.precision.name,
            versions=versions(),
            num_parameters=num_parameters(config.model),
            total_steps=config.train.total_steps,
            global_batch_size=batch.global_batch_size,
            micro_batch_size=batch.micro_batch_size,
            accumulation_steps=batch.accumulation_steps,
            references=reference_lines(iter(held_out_whole)),
        )
    )
    log.say(f"batch: {batch}")
    log.say(
        f"data: {job.train_reader.num_examples:,} training examples an epoch, "
        f"{sum(len(part['labels']) for part in held_out_whole):,} held out"
    )
    if restored:
        log.resume(record.Resume(step=restored.step, path=str(restored.path), damaged=restored.damaged))
    return log


def say_finished(config: AlbertPretrainConfig, step: int, world: World) -> int:
    """Tell that there is nothing left to do, and how to go on or begin anew."""
    if world.is_main:
        print(
            f"{config.run.dir} is finished: {step:,} of {config.train.total_steps:,} steps. To train longer, "
            f"raise --train.total-steps; to begin anew, name another --run.dir or remove {config.run.dir}"
        )
    return EXIT_OK


# --------------------------------------------------------------------------------------------- one step


def losses_of(job: Job, batch: Batch, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return a micro-batch's summed losses (masked-LM, sentence order); add its figures to ``sums``."""
    inputs = (batch[name].to(job.world.device, non_blocking=True) for name in INPUTS)
    with job.precision.autocast():
        mlm_loss, mlm_correct, sop_loss, sop_correct = job.ddp(*inputs)
    sums += torch.stack([mlm_loss.detach(), mlm_correct, sop_loss.detach(), sop_correct]).double()
    return mlm_loss, sop_loss


def weighted_loss(job: Job, num_masked: int, sums: Tensor, batch: Batch) -> Tensor:
    """Return this micro-batch's part of the mean losses over the global batch, scaled for fp16."""
    mlm_loss, sop_loss = losses_of(job, batch, sums)
    loss = mlm_loss * loss_weight(job.world, num_masked)
    loss = loss + sop_loss * loss_weight(job.world, job.batch.global_batch_size)
    return loss * job.scale.value


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
    accumulate(job.ddp, first, partial(weighted_loss, job, 1, sums), job.clock)
    job.optimizer.zero_grad()


def sample_names(job: Job, step: int) -> list[str]:
    """Return which examples global batch ``step`` is made of, as epoch:index."""
    size, reader = job.batch.global_batch_size, job.train_reader
    epochs, indices = samples((step - 1) * size, size, reader.num_examples, job.config.train.seed)
    return [f"{epoch}:{index}" for epoch, index in zip(epochs, indices, strict=True)]


def take_step(job: Job, step: int, micro_batches: list[Batch], num_masked: int, sums: Tensor) -> float:
    """Do optimizer step ``step``; return the norm of its gradient, not finite if it was skipped."""
    optim = job.config.optim
    torch.manual_seed(dropout_seed(job.config.train.seed, step, job.world.place.rank))
    set_learning_rate(job.optimizer, learning_rate(job.schedule, step - 1))
    accumulate(
        job.ddp,
        micro_batches,
        partial(weighted_loss, job, num_masked, sums),
        job.clock,
        average=optim.clip == "global",
    )
    grad_norm = average_and_clip(
        job.model.parameters(),
        job.world,
        max_norm=optim.max_grad_norm,
        per_worker=optim.clip == "worker",
        loss_scale=job.scale.value,
        clock=job.clock,
    )
    if math.isfinite(grad_norm):
        job.optimizer.step()
    job.scale.update(finite=math.isfinite(grad_norm))
    job.optimizer.zero_grad()
    job.clock.mark("optimizer")
    return grad_norm


def dropout_seed(seed: int, step: int, rank: int) -> int:
    """Return the seed of a worker's random draws in a step, so that no generator's state need be saved."""
    return int(random_keys(seed, DROPOUT, step, rank).item())


# --------------------------------------------------------------------------------------------- the loop


def run_steps(job: Job, first_step: int, stop: StopRequest, log: RunLog | None) -> int:
    """Run the steps after ``first_step`` and what comes between and after them; return the exit code."""
    config, world = job.config, job.world
    began = time.monotonic()
    watch = NonFiniteWatch(config.train.max_nonfinite_steps)
    window = StepWindow(NUM_SUMS)
    loss_was_finite = True
    steps = training_steps(
        job.train_reader,
        share_of(job),
        LoaderConfig(num_loader_processes=config.data.loader_processes),
        num_steps=config.train.total_steps - first_step,
        samples_consumed=first_step * job.batch.global_batch_size,
        pin_memory=world.device.type == "cuda",
    )
    with closing(steps):
        for step, micro_batches in enumerate(steps, start=first_step + 1):
            own_masked = sum(int(batch["masked_weights"].sum()) for batch in micro_batches)
            job.clock.mark("data")
            num_masked, num_bad, num_stops = world.sum_counts(
                own_masked, not loss_was_finite, stop.requested is not None
            )
            if watch.note(bad=num_bad > 0):
                raise watch.error(step - 1, sample_names(job, step - 1))
            if num_stops:
                return leave(job, step - 1, stop, log)
            sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=world.device)
            grad_norm = take_step(job, step, micro_batches, num_masked, sums)
            loss_was_finite = math.isfinite(float(sums.sum()))
            window.add(sums.cpu(), num_masked, grad_norm)
            job.clock.end_step()
            after_step(job, step, window, log)
            job.clock.begin_step()
    return finish(job, time.monotonic() - began, log)


def after_step(job: Job, step: int, window: StepWindow, log: RunLog | None) -> None:
    """Write what is due after ``step``: a line, an evaluation, a checkpoint."""
    run, last = job.config.run, job.config.train.total_steps
    if log:
        log.advance(step)
    if step % run.log_frequency == 0 or step == last:
        write_line(job, step, window, log)
    if step % run.checkpoint_frequency == 0 or step == last:
        job.checkpointer.save(step, job.state(step))
    if step % run.validation_frequency == 0 or step == last:
        scores = score(job, step)
        if log:
            log.evaluation(scores)
    report_checkpoints(job, log)


def write_line(job: Job, step: int, window: StepWindow, log: RunLog | None) -> None:
    """Write the averages since the last line, and begin anew."""
    job.world.sum_values(window.sums)
    steps = len(window.grad_norms)
    metrics = metrics_of(window.sums, window.count, steps * job.batch.global_batch_size)
    if log:
        log.step(
            record.Step(
                step=step,
                samples=step * job.batch.global_batch_size,
                loss=total_loss(metrics),
                metrics=metrics,
                learning_rate=learning_rate(job.schedule, step - 1),
                loss_scale=job.scale.value,
                grad_norm=window.mean_grad_norm(),
                weight_norm=norm_of(p.detach() for p in job.model.parameters()),
                samples_per_s=job.batch.global_batch_size / job.clock.step_s(),
                step_s=job.clock.step_s(),
                parts_s=job.clock.parts_s(),
                num_skipped=window.num_skipped(),
                peak_memory_bytes=peak_memory_bytes(job.world.device),
            )
        )
    window.reset()
    job.clock.reset()


def score(job: Job, step: int) -> record.Evaluation:
    """Evaluate on the held-out examples."""
    job.ddp.eval()
    row = evaluate(job.world, step, partial(held_out, job), partial(losses_of, job))
    job.ddp.train()  # type: ignore[no-untyped-call]
    return row


def held_out(job: Job, *, whole: bool = False) -> Iterator[Batch]:
    """Yield this worker's part of the held-out examples, or all of them."""
    return held_out_batches(
        job.held_out_reader,
        micro_batch_size=job.batch.micro_batch_size,
        limit=job.config.run.validation_samples,
        rank=0 if whole else job.world.place.rank,
        num_workers=1 if whole else job.world.num_workers,
    )


def report_checkpoints(job: Job, log: RunLog | None) -> None:
    """Write a line for each checkpoint that became complete."""
    for done in job.checkpointer.poll():
        if log:
            log.checkpoint(
                record.Checkpoint(
                    step=done.step,
                    path=str(done.path),
                    num_bytes=done.num_bytes,
                    blocked_s=done.blocked_s,
                    written_s=done.written_s,
                )
            )


# ------------------------------------------------------------------------------------------- how it ends


def leave(job: Job, step: int, stop: StopRequest, log: RunLog | None) -> int:
    """Save after ``step`` because a signal asked some worker to stop."""
    job.checkpointer.save(step, job.state(step), wait=True)
    report_checkpoints(job, log)
    if log:
        reason = f"{stop.requested or 'a signal to another worker'}; the same command continues"
        log.stop(record.Stop(step=step, reason=reason, exit_code=EXIT_STOPPED))
    return EXIT_STOPPED


def finish(job: Job, seconds: float, log: RunLog | None) -> int:
    """Wait for the last checkpoint, export the model, write the summary."""
    job.checkpointer.finish()
    report_checkpoints(job, log)
    step = job.config.train.total_steps
    if log:
        run_dir = required(job.config.run.dir)
        if not job.config.model.pre_layer_norm:
            write_export(job.model, job.train_reader.shards.directory, run_dir / "transformers")
        scores = log.last_evaluation
        assert scores is not None
        log.end(record.End(step=step, seconds=seconds, metrics=scores.metrics))
        log.say(verdict(scores, log.references))
    return EXIT_OK
