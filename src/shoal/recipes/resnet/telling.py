"""What a training writes: its record, held-out scores, checkpoints, and how it ends."""

from __future__ import annotations

from torch import nn

from shoal import record
from shoal.errors import EXIT_OK
from shoal.recipes.resnet.evaluation import TOP1, evaluate, scored_model
from shoal.recipes.resnet.export import EXPORT, exported, write_export
from shoal.recipes.resnet.job import Job
from shoal.train import telling
from shoal.train.checkpoint import Restored
from shoal.train.config import as_tree, required
from shoal.train.progress import Progress
from shoal.train.run_log import RunLog
from shoal.train.signals import StopRequest
from shoal.train.step import step_row
from shoal.train.telling import report_checkpoints, speed_line, start_row
from shoal.train.window import Meter


def open_log(job: Job, restored: Restored | None, command: list[str]) -> RunLog:
    """Begin the record: the settings, the arithmetic of the run, the world, where it goes on from."""
    config, plan = job.config, job.plan
    first_step = restored.step if restored else 0
    log = RunLog(required(config.run.dir), Progress(plan.total_steps, first_step, unit=plan.batch.unit))
    log.start(
        start_row(
            run=required(config.run.name),
            recipe=config.recipe,
            command=command,
            config=as_tree(config),
            world=job.world,
            precision=job.precision,
            num_parameters=sum(p.numel() for p in job.model.parameters()),
            total_steps=plan.total_steps,
            batch=plan.batch,
            references={TOP1: 1 / required(config.model.num_classes)},
            epoch_samples=plan.epochs.num_examples,
        )
    )
    for line in plan.lines(config.train.total_epochs):
        log.say(line)
    log.say(f"held out     {job.held_out_reader.num_examples:,} images")
    if restored:
        log.resume(record.Resume(step=restored.step, path=str(restored.path), damaged=restored.damaged))
    return log


def after_step(job: Job, meter: Meter, step: int, log: RunLog | None) -> None:
    """Write what is due after ``step``: a line, a checkpoint, an evaluation (the last is ``finish``'s)."""
    config, epochs, last = job.config, job.plan.epochs, job.plan.total_steps
    if log:
        log.advance(step)
    if step % config.run.log_frequency == 0 or step == last:
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
        step=step,
    )


def write_line(job: Job, meter: Meter, step: int, log: RunLog | None) -> None:
    """Write the averages since the last line, and begin anew."""
    window = meter.window
    job.world.sum_values(window.sums)
    loss, right, replaced = (float(value) for value in window.sums)
    if log:
        row = step_row(
            job.trained,
            window,
            step=step,
            samples=job.plan.samples(step),
            global_batch_size=job.plan.batch.global_batch_size,
            learning_rate=job.plan.learning_rate(step),
            loss=loss / window.count,
            metrics={TOP1: right / window.count, **({"replaced_images": replaced} if replaced else {})},
        )
        log.step(row)
    window.reset()
    job.clock.reset()


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
