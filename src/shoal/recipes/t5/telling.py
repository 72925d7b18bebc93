"""What a T5 pretraining writes: its record, held-out scores, checkpoints, and how it ends."""

from __future__ import annotations

import time
from contextlib import closing
from operator import itemgetter

from shoal import record
from shoal.data.loader import Batch, LoaderConfig, Stream, training_steps
from shoal.data.text.examples import unigram_entropy
from shoal.errors import EXIT_OK
from shoal.optim.lr_schedules import learning_rate
from shoal.recipes.export import export_run
from shoal.recipes.t5.job import Job, model_inputs
from shoal.recipes.t5.start import in_words
from shoal.train.checkpoint import Restored
from shoal.train.config import as_tree, required
from shoal.train.reporting import Progress, RunLog
from shoal.train.telling import report_checkpoints, start_row
from shoal.train.window import StepWindow, peak_memory_bytes

LOSS, ACCURACY = "span_loss", "span_accuracy"
"""Cross-entropy a target token, and how many of them are the likeliest token; held-out without z-loss."""


def open_log(job: Job, restored: Restored | None, command: list[str]) -> RunLog:
    """Begin the record: the settings, the arithmetic of the batch, the world, where it goes on from."""
    config, spans = job.config, job.config.spans()
    log = RunLog(
        required(config.run.dir), Progress(config.train.total_steps, restored.step if restored else 0)
    )
    log.start(
        start_row(
            run=required(config.run.name),
            recipe=config.recipe,
            command=command,
            config=as_tree(config),
            world=job.world,
            precision=job.precision,
            num_parameters=config.num_parameters,
            total_steps=config.train.total_steps,
            batch=job.batch,
            references={LOSS: reference_loss(job)},
        )
    )
    log.say(f"batch: {in_words(job.batch)}")
    log.say(
        f"data: {job.reader.num_examples:,} training examples an epoch, {job.held_out_reader.num_examples:,} "
        f"held out; {spans.num_tokens} tokens of text each, as {spans.input_length} and {spans.target_length}"
    )
    if restored:
        log.resume(record.Resume(step=restored.step, path=str(restored.path), damaged=restored.damaged))
    return log


def after_step(job: Job, step: int, window: StepWindow, log: RunLog | None) -> None:
    """Write what is due after ``step``: a line, a checkpoint, an evaluation (the last is ``finish``'s)."""
    run, last = job.config.run, job.config.train.total_steps
    if log:
        log.advance(step)
    if step % run.log_frequency == 0 or step == last:
        write_line(job, step, window, log)
    if step % run.checkpoint_frequency == 0 or step == last:
        job.checkpointer.save(step, job.state(step))
    if step % run.validation_frequency == 0 and step != last:
        scores = score(job, step)
        if log:
            log.evaluation(scores)
    report_checkpoints(job.checkpointer, log)
    job.clock.begin_step()


def write_line(job: Job, step: int, window: StepWindow, log: RunLog | None) -> None:
    """Write the averages since the last line, and begin anew."""
    loss, weight_norm = float(window.sums) / window.count, job.norm(gradients=False)
    if log:
        row = record.Step(
            step=step,
            samples=step * job.batch.global_batch_size,
            loss=loss,
            metrics={LOSS: loss},
            learning_rate=learning_rate(job.config.schedule, step - 1),
            loss_scale=1.0,
            grad_norm=window.mean_grad_norm(),
            weight_norm=weight_norm,
            samples_per_s=job.batch.global_batch_size / job.clock.step_s(),
            step_s=job.clock.step_s(),
            parts_s=job.clock.parts_s(),
            num_skipped=window.num_skipped(),
            peak_memory_bytes=peak_memory_bytes(job.world.device),
        )
        log.step(row)
    window.reset()
    job.clock.reset()


def finish(job: Job, seconds: float, log: RunLog | None) -> int:
    """Wait for the last checkpoint, evaluate, export the model, write the summary."""
    step = job.config.train.total_steps
    scores = score(job, step)
    job.checkpointer.finish()
    report_checkpoints(job.checkpointer, log)
    if log:
        log.evaluation(scores)
        run_dir = required(job.config.run.dir)
        export_run(run_dir, run_dir / "transformers")  # from the checkpoint: no worker has all stages
        log.end(record.End(step=step, seconds=seconds, metrics=scores.metrics))
        loss, reference = scores.metrics[LOSS], log.references[LOSS]
        log.say(
            f"held-out loss {loss:.3f}: {abs(reference - loss):.2f} nats "
            f"{'below' if loss < reference else 'above'} a model that knows how often tokens occur "
            f"and where sentinels stand ({reference:.3f})"
        )
    return EXIT_OK


# ------------------------------------------------------------------------------------------ held-out scores


def score(job: Job, step: int) -> record.Evaluation:
    """Return the scores on the held-out batches."""
    began = time.monotonic()
    losses: list[float] = []
    num_correct = num_targets = 0
    with closing(held_out(job)) as batches:
        for batch in batches:
            with job.precision.autocast():
                found = job.stage.evaluate(**model_inputs(job, batch))
            losses.append(float(found.loss))
            if found.outputs is not None:  # on the workers of the last stage
                num_correct += sum(int(output.num_correct.sum()) for output in found.outputs)
                num_targets += batch["labels"].numel()
    num_correct, num_targets = job.world.sum_counts(num_correct, num_targets)
    return record.Evaluation(
        step=step,
        split="validation",
        num_samples=len(losses) * job.batch.global_batch_size,
        metrics={LOSS: sum(losses) / len(losses), ACCURACY: num_correct / num_targets},
        seconds=time.monotonic() - began,
    )


def held_out(job: Job) -> Stream[Batch]:
    """Yield this replica's part of the first global batches of the held-out stream, always the same.

    Whole global batches, so that they do not depend on the layout and stages see the shapes of training; a
    split that is smaller than one is gone through more than once, each time with other spans.
    """
    wanted = min(job.config.run.validation_samples, job.held_out_reader.num_examples)
    num_batches = max(wanted // job.batch.global_batch_size, 1)
    steps = training_steps(job.held_out_reader, job.share, LoaderConfig(), num_steps=num_batches)
    return steps.map(itemgetter(0))


def reference_loss(job: Job) -> float:
    """Return the loss of a model that knows where sentinels stand and how often each token of text occurs.

    What lies below has learnt from the context.
    """
    spans, vocab_size = job.config.spans(), job.reader.shards.manifest.vocab_size
    examples = job.held_out_reader.batch(0, range(min(job.held_out_reader.num_examples, 2_048)))
    targets = examples["labels"][:, :-1]
    share_of_text = spans.num_noise / spans.target_length
    return share_of_text * unigram_entropy(targets[targets < vocab_size])
