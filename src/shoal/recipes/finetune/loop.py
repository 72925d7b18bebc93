"""What every finetuning does, from joining the workers to the last file; the tasks differ in ``Task`` alone.

One optimizer step: every worker takes its part of the global batch as packed micro-batches, forward and
backward run with losses divided by the targets of the whole batch, the last backward averages the
gradients, then clip and step. The same command continues from the newest checkpoint.
"""

from __future__ import annotations

import math
import time
from contextlib import closing
from functools import partial

import torch
from torch import Tensor

from shoal import record
from shoal.data.loader import Batch, to_device
from shoal.data.text.task_batches import global_batch, training_batches
from shoal.errors import EXIT_OK
from shoal.optim.lr_schedules import learning_rate
from shoal.recipes.finetune.job import Job
from shoal.train import step as train_step
from shoal.train import telling
from shoal.train.checkpoint import Restored
from shoal.train.config import as_tree, required
from shoal.train.gradients import accumulate, loss_weight
from shoal.train.health import NonFiniteWatch, memory_advice
from shoal.train.reporting import Progress, RunLog, has_ended
from shoal.train.signals import StopRequest
from shoal.train.telling import report_checkpoints, start_row
from shoal.train.window import StepWindow

EXPORT = "transformers"
"""Folder of the run directory with the finetuned model."""


def run(job: Job, stop: StopRequest, command: list[str]) -> int:
    """Train until the last step or a signal, evaluate, save; return the exit code.

    Raises:
        ShoalError: damaged checkpoints, a lost worker, no memory, a loss that is not finite.
    """
    assert job.checkpointer is not None
    restored = job.checkpointer.restore(job.state(0))
    if restored:
        job.trained.scale.load_state_dict(restored.values["loss_scale"])
    first_step = restored.step if restored else 0
    if first_step >= job.plan.total_steps and has_ended(required(job.config.run.dir), first_step, job.world):
        run_dir = job.config.run.dir
        return telling.say_finished(
            run_dir, first_step, job.plan.total_steps, job.world, longer="--train.epochs"
        )
    if not job.world.is_main:
        return train_and_finish(job, first_step, stop, None)
    with RunLog(required(job.config.run.dir), Progress(job.plan.total_steps, first_step)) as log:
        begin_log(job, log, restored, command)
        return train_and_finish(job, first_step, stop, log)


def begin_log(job: Job, log: RunLog, restored: Restored | None, command: list[str]) -> None:
    """Begin the record: the settings, the arithmetic of the batch, the world, where it goes on from."""
    config, world, batch = job.config, job.world, job.plan.batch
    log.start(
        start_row(
            run=required(config.run.name),
            recipe=job.task.name,
            command=command,
            config=as_tree(config),
            world=world,
            precision=job.precision,
            num_parameters=sum(p.numel() for p in job.task.model.parameters()),
            total_steps=job.plan.total_steps,
            batch=batch,
            references={},
        )
    )
    log.say(f"batch: {batch}")
    for note in job.task.notes():
        log.say(note)
    if restored:
        log.resume(record.Resume(step=restored.step, path=str(restored.path), damaged=restored.damaged))


# --------------------------------------------------------------------------------------------- one step


def weighted_loss(job: Job, num_targets: int, sums: Tensor, batch: Batch) -> Tensor:
    """Return this micro-batch's part of the mean loss over the global batch, scaled for fp16."""
    with job.precision.autocast():
        loss = job.task.loss(job.trained.ddp, to_device(batch, job.world.device))
    sums += loss.detach().double()
    return loss * (loss_weight(job.world, num_targets) * job.trained.scale.value)


def warm_up(job: Job) -> None:
    """Run one micro-batch forward and backward without using its gradient.

    It compiles, finds a lack of memory before the first step (the first micro-batch has the longest
    sequences), and lets DistributedDataParallel arrange its buckets, so that from step 1 on the order of
    addition is that of a run that was never interrupted.
    """
    with closing(training_batches(job.task.data, job.deal, range(1))) as steps:
        first = next(steps)[:1]
    sums = torch.zeros(1, dtype=torch.float64, device=job.world.device)
    with job.trained.ddp.rehearsal():
        accumulate(job.trained.ddp, first, partial(weighted_loss, job, 1, sums), job.trained.clock)
    job.trained.optimizer.zero_grad()


def take_step(job: Job, step: int, micro_batches: list[Batch], num_targets: int, sums: Tensor) -> float:
    """Do optimizer step ``step``; return the norm of its gradient, not finite if it was skipped.

    Args:
        num_targets: what the loss is a mean over, on all workers together.
    """
    return train_step.take_step(
        job.trained,
        micro_batches,
        partial(weighted_loss, job, num_targets, sums),
        job.config.optim,
        learning_rate=learning_rate(job.schedule, step - 1),
        dropout_seed=train_step.dropout_seed(job.config.train.seed, step, job.world.place.rank),
    )


def sample_names(job: Job, step: int) -> list[str]:
    """Return what global batch ``step`` is made of."""
    return [job.task.sample_name(int(index)) for index in global_batch(job.task.data, job.deal, step - 1)]


# --------------------------------------------------------------------------------------------- the loop


def run_steps(job: Job, first_step: int, stop: StopRequest | None, log: RunLog | None) -> int:
    """Run the steps after ``first_step``; return the last one done, not the run's last if a signal came."""
    watch = NonFiniteWatch(job.config.train.max_nonfinite_steps)
    window = StepWindow(1)
    loss_was_finite = True
    last = job.plan.total_steps
    job.trained.ddp.train()  # type: ignore[no-untyped-call]
    steps = training_batches(
        job.task.data, job.deal, range(first_step, last), pin_memory=job.world.device.type == "cuda"
    )
    with closing(steps):
        for step, micro_batches in enumerate(steps, start=first_step + 1):
            job.trained.clock.mark("data")
            stops = stop is not None and stop.requested is not None
            num_bad, num_stops = job.world.sum_counts(not loss_was_finite, stops)
            if watch.note(bad=num_bad > 0):
                raise watch.error(step - 1, sample_names(job, step - 1))
            if num_stops:
                return step - 1
            sums = torch.zeros(1, dtype=torch.float64, device=job.world.device)
            num_targets = job.task.data.num_targets(global_batch(job.task.data, job.deal, step - 1))
            grad_norm = take_step(job, step, micro_batches, num_targets, sums)
            loss_was_finite = math.isfinite(float(sums))
            window.add(sums.cpu(), num_targets, grad_norm)
            job.trained.clock.end_step()
            after_step(job, step, window, log)
            job.trained.clock.begin_step()
    return last


def after_step(job: Job, step: int, window: StepWindow, log: RunLog | None) -> None:
    """Write what is due after ``step``: a line, a checkpoint, an evaluation (the last is ``finish``'s)."""
    run, last = job.config.run, job.plan.total_steps
    if log:
        log.advance(step)
    if step % run.log_frequency == 0 or step == last:
        write_line(job, step, window, log)
    if job.checkpointer is None:
        return
    if step % run.checkpoint_frequency == 0 or step == last:
        job.checkpointer.save(step, job.state(step))
    if run.evaluation_frequency and step % run.evaluation_frequency == 0 and step != last:
        evaluate(job, step, log)
    report_checkpoints(job.checkpointer, log)


def write_line(job: Job, step: int, window: StepWindow, log: RunLog | None) -> None:
    """Write the averages since the last line, and begin anew."""
    job.world.sum_values(window.sums)
    if log:
        batch_size = job.plan.batch.global_batch_size
        row = train_step.step_row(
            job.trained,
            window,
            step=step,
            samples=step * batch_size,
            global_batch_size=batch_size,
            learning_rate=learning_rate(job.schedule, step - 1),
            loss=float(window.sums) / window.count,
            metrics={},
        )
        log.step(row)
    window.reset()
    job.trained.clock.reset()


def evaluate(job: Job, step: int, log: RunLog | None) -> list[record.Evaluation]:
    """Evaluate; the run directory gets the files, the record the scores."""
    job.trained.ddp.eval()
    rows = job.task.evaluate(job, step, required(job.config.run.dir))
    job.trained.ddp.train()  # type: ignore[no-untyped-call]
    for row in rows:
        if log:
            log.evaluation(row)
    return rows


# ------------------------------------------------------------------------------------------- how it ends


def train_and_finish(job: Job, first_step: int, stop: StopRequest, log: RunLog | None) -> int:
    """Run what is left of the steps and end as it must; return the exit code."""
    began = time.monotonic()
    with memory_advice(job.plan.batch.micro_batch_size):
        if first_step < job.plan.total_steps:
            warm_up(job)
        step = run_steps(job, first_step, stop, log)
        if step < job.plan.total_steps:
            return leave(job, step, stop, log)
        return finish(job, began, log)


def leave(job: Job, step: int, stop: StopRequest, log: RunLog | None) -> int:
    """Save after ``step`` because a signal asked some worker to stop."""
    assert job.checkpointer is not None
    return telling.leave(job.checkpointer, step, job.state(step), stop, log)


def finish(job: Job, began: float, log: RunLog | None) -> int:
    """Wait for the last checkpoint, evaluate, write the model and the summary."""
    assert job.checkpointer is not None
    step = job.plan.total_steps
    job.checkpointer.finish()
    report_checkpoints(job.checkpointer, log)
    rows = evaluate(job, step, log)
    if log:
        run_dir = required(job.config.run.dir)
        job.task.save(run_dir / EXPORT)
        metrics = {
            name if len(rows) == 1 else f"{row.split}/{name}": value
            for row in rows
            for name, value in row.metrics.items()
        }
        log.end(record.End(step=step, seconds=time.monotonic() - began, metrics=metrics))
        log.say(f"the finetuned model is in {run_dir / EXPORT}")
    return EXIT_OK
