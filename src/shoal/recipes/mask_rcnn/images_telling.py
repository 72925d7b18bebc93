"""What a training on images writes: its record and its lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shoal import record
from shoal.recipes.mask_rcnn.images_job import ImageJob
from shoal.train.checkpoint import Restored
from shoal.train.config import as_tree, required
from shoal.train.reporting import Progress, RunLog
from shoal.train.step import step_row
from shoal.train.telling import start_row
from shoal.train.window import Meter


def open_log(
    job: ImageJob,
    restored: Restored | None,
    command: list[str],
    *,
    lines: Iterable[str],
    epoch_samples: int,
    references: Mapping[str, float],
) -> RunLog:
    """Begin the record: the settings, the arithmetic of the run, the world, where it goes on from.

    Args:
        lines: the arithmetic in words.
        epoch_samples: images in an epoch, 0 if the run is not defined in epochs.
        references: lines to draw in the plots of evaluation metrics.
    """
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
            references=references,
            epoch_samples=epoch_samples,
        )
    )
    for line in lines:
        log.say(line)
    if restored:
        log.resume(record.Resume(step=restored.step, path=str(restored.path), damaged=restored.damaged))
    return log


def write_line(
    job: ImageJob, meter: Meter, step: int, log: RunLog | None, *, loss: float, metrics: dict[str, float]
) -> None:
    """Write the averages since the last line (sums over all workers were taken), and begin anew."""
    if log:
        row = step_row(
            job.trained,
            meter.window,
            step=step,
            samples=job.plan.samples(step),
            global_batch_size=job.plan.batch.global_batch_size,
            learning_rate=job.plan.learning_rate(step),
            loss=loss,
            metrics=metrics,
        )
        log.step(row)
    meter.window.reset()
    job.clock.reset()
