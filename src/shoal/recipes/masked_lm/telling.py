"""What a pretraining run writes: its record, held-out scores, checkpoints, and how it ends."""

from __future__ import annotations

from shoal import record
from shoal.errors import EXIT_OK
from shoal.recipes.masked_lm.config import PretrainConfig
from shoal.recipes.masked_lm.export import is_exportable, write_export
from shoal.recipes.masked_lm.job import Job
from shoal.recipes.masked_lm.scores import held_out, metrics_of, reference_lines, score, total_loss, verdict
from shoal.train import telling
from shoal.train.checkpoint import Restored
from shoal.train.config import as_tree, required
from shoal.train.progress import Progress
from shoal.train.run_log import RunLog, has_ended
from shoal.train.signals import StopRequest
from shoal.train.step import step_row
from shoal.train.telling import report_checkpoints, start_row
from shoal.train.window import Meter
from shoal.train.world import World


def open_log(job: Job, restored: Restored | None, command: list[str]) -> RunLog:
    """Begin the record: the settings, the arithmetic of the batch, the world, where it goes on from."""
    config, world, batch = job.config, job.world, job.batch
    first_step = restored.step if restored else 0
    log = RunLog(required(config.run.dir), Progress(config.total_steps, first_step))
    references, num_held_out = held_out_facts(job)
    log.start(
        start_row(
            run=required(config.run.name),
            recipe=config.recipe,
            command=command,
            config=as_tree(config),
            world=world,
            precision=job.precision,
            num_parameters=config.num_parameters,
            total_steps=config.total_steps,
            batch=batch,
            references=references,
        )
    )
    say_data(job, log, num_held_out)
    if restored:
        log.resume(record.Resume(step=restored.step, path=str(restored.path), damaged=restored.damaged))
    return log


def held_out_facts(job: Job) -> tuple[dict[str, float], int]:
    """Return the reference lines of the held-out examples, and how many examples they are."""
    whole = list(held_out(job, whole=True))
    return reference_lines(job.config.sentence_task, whole), sum(len(batch["labels"]) for batch in whole)


def say_data(job: Job, log: RunLog, num_held_out: int) -> None:
    """Print the arithmetic of the batch and how much data there is."""
    log.say(f"batch: {job.batch}")
    log.say(f"data: {job.train_reader.num_examples:,} training examples an epoch, {num_held_out:,} held out")


def tell_next_phase(job: Job, log: RunLog) -> None:
    """Print what the phase that the run has come to is made of; its held-out examples are other ones."""
    log.references, num_held_out = held_out_facts(job)
    say_data(job, log, num_held_out)


def phase_row(job: Job) -> record.Phase:
    """Return the line of the record that a phase begins with."""
    phase, batch = job.phase, job.batch
    return record.Phase(
        step=phase.steps_before + 1,
        last_step=phase.last_step,
        name=phase.section,
        sequence_length=phase.max_seq_length,
        global_batch_size=batch.global_batch_size,
        micro_batch_size=batch.micro_batch_size,
        accumulation_steps=batch.accumulation_steps,
    )


def is_over(job: Job, step: int) -> bool:
    """Whether nothing is left to do after ``step``, not even the end; all workers call it."""
    total_steps = job.config.total_steps
    return step > total_steps or (
        step == total_steps and has_ended(required(job.config.run.dir), step, job.world)
    )


def say_finished(config: PretrainConfig, step: int, world: World) -> int:
    """Tell that there is nothing left to do."""
    longer = f"--{config.phases[-1].section}.total-steps"
    return telling.say_finished(config.run.dir, step, config.total_steps, world, longer=longer)


def after_step(job: Job, meter: Meter, step: int, log: RunLog | None) -> None:
    """Write what is due after ``step``: a line, a checkpoint, an evaluation (not the run's last)."""
    run, last = job.config.run, job.phase.last_step
    if log:
        log.advance(step)
    if step % run.log_frequency == 0 or step == last:
        write_line(job, meter, step, log)
    if step % run.checkpoint_frequency == 0 or step == last:
        job.checkpointer.save(step, job.state(step))
    if (step % run.validation_frequency == 0 or step == last) and step != job.config.total_steps:
        scores = score(job, step)
        if log:
            log.evaluation(scores)
    report_checkpoints(job.checkpointer, log)
    job.clock.begin_step()


def write_line(job: Job, meter: Meter, step: int, log: RunLog | None) -> None:
    """Write the averages since the last line, and begin anew."""
    window, size = meter.window, job.batch.global_batch_size
    job.world.sum_values(window.sums)
    num_sequences = len(window.grad_norms) * size
    metrics = metrics_of(job.config.sentence_task, window.sums, window.count, num_sequences)
    if log:
        row = step_row(
            job.trained,
            window,
            step=step,
            samples=job.phase.samples(step),
            global_batch_size=size,
            learning_rate=job.phase.learning_rate(step),
            loss=total_loss(metrics),
            metrics=metrics,
        )
        log.step(row)
    window.reset()
    job.clock.reset()


def leave(job: Job, step: int, stop: StopRequest, log: RunLog | None) -> int:
    """Save after ``step`` because a signal asked some worker to stop."""
    return telling.leave(job.checkpointer, step, job.state(step), stop, log)


def finish(job: Job, seconds: float, log: RunLog | None) -> int:
    """Wait for the last checkpoint, evaluate, export the model, write the summary."""
    scores = score(job, job.phase.last_step)
    job.checkpointer.finish()
    report_checkpoints(job.checkpointer, log)
    if log:
        log.evaluation(scores)
        run_dir = required(job.config.run.dir)
        if is_exportable(job.model):
            write_export(job.model, job.train_reader.shards.directory, run_dir / "transformers")
        log.end(record.End(step=job.phase.last_step, seconds=seconds, metrics=scores.metrics))
        log.say(verdict(job.config.sentence_task, scores, log.references))
    return EXIT_OK
