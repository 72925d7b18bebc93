"""What a training writes: its record, held-out scores and results, checkpoints, and how it ends."""

from __future__ import annotations

import json

from shoal import record
from shoal.data.atomic_io import write_atomically
from shoal.data.coco.results import write_results
from shoal.data.coco.score import as_tree
from shoal.errors import EXIT_OK
from shoal.recipes.images import EXPORT
from shoal.recipes.mask_rcnn import images_telling as images
from shoal.recipes.mask_rcnn.evaluation import Scored, evaluate, gather_results
from shoal.recipes.mask_rcnn.export import exported, write_export
from shoal.recipes.mask_rcnn.job import Job
from shoal.recipes.mask_rcnn.losses import LOSSES
from shoal.train import telling
from shoal.train.checkpoint import Restored
from shoal.train.config import required
from shoal.train.reporting import RunLog, speed_line
from shoal.train.signals import StopRequest
from shoal.train.telling import report_checkpoints
from shoal.train.window import Meter

RESULTS, SCORES = "results.json", "scores.json"
"""Files of the run directory: what was found at the end, in COCO's form, and all figures."""


def open_log(job: Job, restored: Restored | None, command: list[str], weights: str) -> RunLog:
    """Begin the record; ``weights`` says what the model began with."""
    lines = [
        *job.plan.lines(),
        f"weights      {weights}; {learning(job)}",
        f"held out     {job.held_out_reader.num_examples:,} images of {len(job.train_reader.categories)} "
        "categories",
    ]
    return images.open_log(job, restored, command, lines=lines, epoch_samples=0, references={})


def learning(job: Job) -> str:
    """Return in words what of the backbone learns."""
    model = job.config.model
    stages = f"{model.stages_frozen} of 5 stages stay" if model.stages_frozen else "all stages learn"
    return f"{stages}, norms {'stay' if model.norms_frozen else 'learn'}"


def after_step(job: Job, meter: Meter, step: int, log: RunLog | None) -> None:
    """Write what is due after ``step``: a line, a checkpoint, an evaluation (the last is ``finish``'s)."""
    config, last = job.config, job.plan.total_steps
    if log:
        log.advance(step)
    if step % config.run.log_frequency == 0 or step == last:
        write_line(job, meter, step, log)
    if step % config.run.checkpoint_every_steps == 0 or step == last:
        job.checkpointer.save(step, job.state(step))
    if config.validation.every_steps and step % config.validation.every_steps == 0 and step != last:
        scored = score(job, step)
        if log and scored.row:
            log.evaluation(scored.row)
    report_checkpoints(job.checkpointer, log)
    job.clock.begin_step()


def score(job: Job, step: int) -> Scored:
    """Return the scores of the model on the held-out images."""
    return evaluate(
        job.model,
        job.held_out_reader,
        job.world,
        job.precision,
        batch_size=job.config.validation.batch_size,
        channels_last=job.config.train.channels_last,
        step=step,
    )


def write_line(job: Job, meter: Meter, step: int, log: RunLog | None) -> None:
    """Write the averages since the last line, and begin anew."""
    window = meter.window
    job.world.sum_values(window.sums)
    metrics = {name: float(value) / window.count for name, value in zip(LOSSES, window.sums, strict=True)}
    images.write_line(job, meter, step, log, loss=sum(metrics.values()), metrics=metrics)


def leave(job: Job, step: int, stop: StopRequest, log: RunLog | None) -> int:
    """Save after ``step`` because a signal asked some worker to stop."""
    return telling.leave(job.checkpointer, step, job.state(step), stop, log)


def finish(job: Job, seconds: float, log: RunLog | None) -> int:
    """Wait for the last checkpoint, evaluate, write results and model, then the summary."""
    step, run_dir = job.plan.total_steps, required(job.config.run.dir)
    scored = score(job, step)
    results = gather_results(job.world, scored.found)
    job.checkpointer.finish()
    report_checkpoints(job.checkpointer, log)
    if log and scored.row and scored.truth and results is not None:
        log.evaluation(scored.row)
        write_results(run_dir / RESULTS, results)
        tree = as_tree(scored.truth, scored.scores)
        write_atomically(run_dir / SCORES, json.dumps(tree, indent=2).encode() + b"\n")
        write_export(exported(job.model, job.config, job.train_reader.categories), run_dir / EXPORT)
        log.say(speed_line(run_dir, job.world, job.plan.batch.unit))
        log.end(record.End(step=step, seconds=seconds, metrics=scored.row.metrics))
        log.say(
            f"{len(results):,} objects in {run_dir / RESULTS}, all figures in {run_dir / SCORES}, "
            f"the model in {run_dir / EXPORT}"
        )
    return EXIT_OK
