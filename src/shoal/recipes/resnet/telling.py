"""What a training writes: its record, held-out scores, checkpoints, and how it ends."""

from __future__ import annotations

from torch import nn

from shoal import record
from shoal.errors import EXIT_OK
from shoal.recipes.images import telling as images
from shoal.recipes.images.export import EXPORT
from shoal.recipes.resnet.evaluation import TOP1, evaluate, scored_model
from shoal.recipes.resnet.export import exported, write_export
from shoal.recipes.resnet.job import Job
from shoal.train import telling
from shoal.train.checkpoint import Restored
from shoal.train.config import required
from shoal.train.reporting import RunLog, speed_line
from shoal.train.signals import StopRequest
from shoal.train.telling import report_checkpoints
from shoal.train.window import Meter


def open_log(job: Job, restored: Restored | None, command: list[str]) -> RunLog:
    """Begin the record."""
    lines = [
        *job.plan.lines(job.config.train.total_epochs),
        f"held out     {job.held_out_reader.num_examples:,} images",
    ]
    return images.open_log(
        job,
        restored,
        command,
        lines=lines,
        epoch_samples=job.plan.epochs.num_examples,
        references={TOP1: 1 / required(job.config.model.num_classes)},
    )


def after_step(job: Job, meter: Meter, step: int, log: RunLog | None) -> None:
    """Write what is due after ``step``: a line, a checkpoint, an evaluation (the last is ``finish``'s)."""
    config, epochs, last = job.config, job.plan.epochs, job.plan.total_steps
    if log:
        log.advance(step)
    if step % config.run.log_frequency == 0 or epochs.ends_multiple(step, 1) or step == last:
        write_line(job, meter, step, log)
    if epochs.ends_multiple(step, config.run.checkpoint_every_epochs) or step == last:
        job.checkpointer.save(step, job.state(step))
    if epochs.ends_multiple(step, config.validation.every_epochs) and step != last:
        scores = score(job, step, scored_model(job))
        if log:
            log.evaluation(scores)
    report_checkpoints(job.checkpointer, log)
    job.clock.begin_step()


def score(job: Job, step: int, model: nn.Module) -> record.Evaluation:
    """Return the scores of ``model`` on the held-out images."""
    return evaluate(
        model,
        job.held_out_reader,
        job.world,
        job.precision,
        batch_size=job.config.validation.batch_size,
        mirror=job.config.validation.mirror,
        step=step,
    )


def write_line(job: Job, meter: Meter, step: int, log: RunLog | None) -> None:
    """Write the averages since the last line, and begin anew."""
    window = meter.window
    job.world.sum_values(window.sums)
    loss, right, replaced = (float(value) for value in window.sums)
    metrics = {TOP1: right / window.count, **({"replaced_images": replaced} if replaced else {})}
    images.write_line(job, meter, step, log, loss=loss / window.count, metrics=metrics)


def leave(job: Job, step: int, stop: StopRequest, log: RunLog | None) -> int:
    """Save after ``step`` because a signal asked some worker to stop."""
    return telling.leave(job.checkpointer, step, job.state(step), stop, log)


def finish(job: Job, seconds: float, log: RunLog | None) -> int:
    """Wait for the last checkpoint, evaluate, export the model, write the summary."""
    step = job.plan.total_steps
    model = scored_model(job)
    scores = score(job, step, model)
    job.checkpointer.finish()
    report_checkpoints(job.checkpointer, log)
    if log:
        log.evaluation(scores)
        directory = required(job.config.run.dir) / EXPORT
        write_export(exported(model, job.config, job.train_reader.shards.manifest.classes), directory)
        log.say(speed_line(required(job.config.run.dir), job.world, job.plan.batch.unit))
        log.end(record.End(step=step, seconds=seconds, metrics=scores.metrics))
        right = round(scores.metrics[TOP1] * scores.num_samples)
        log.say(
            f"top-1 {100 * scores.metrics[TOP1]:.2f} %: {right:,} of {scores.num_samples:,} held-out images; "
            f"the model is in {directory}"
        )
    return EXIT_OK
