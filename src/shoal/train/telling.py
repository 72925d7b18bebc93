"""What the record of every run says in the same words: how it begins, what is saved, how it is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal import record
from shoal.decide.batch import BatchPlan
from shoal.errors import EXIT_OK, EXIT_STOPPED
from shoal.train.checkpoint import Checkpointer
from shoal.train.gradients import Precision
from shoal.train.reporting import RunLog, device_name, versions
from shoal.train.stopping import StopRequest
from shoal.train.world import World


def start_row(
    *,
    run: str,
    recipe: str,
    command: Sequence[str],
    config: Mapping[str, Any],
    world: World,
    precision: Precision,
    num_parameters: int,
    total_steps: int,
    batch: BatchPlan,
    references: Mapping[str, float],
    epoch_samples: int = 0,
) -> record.Start:
    """Return the line that a record begins with: the settings, the arithmetic of the batch, the world."""
    return record.Start(
        run=run,
        recipe=recipe,
        command=list(command),
        config=dict(config),
        num_workers=world.num_workers,
        num_hosts=world.num_hosts,
        backend=world.backend,
        device=device_name(world.device),
        precision=precision.name,
        versions=versions(),
        num_parameters=num_parameters,
        total_steps=total_steps,
        global_batch_size=batch.global_batch_size,
        micro_batch_size=batch.micro_batch_size,
        accumulation_steps=batch.accumulation_steps,
        unit=batch.unit,
        epoch_samples=epoch_samples,
        references=dict(references),
    )


def report_checkpoints(checkpointer: Checkpointer, log: RunLog | None) -> None:
    """Write a line for each checkpoint that became complete."""
    completed = checkpointer.poll()
    if log:
        log.checkpoints(completed)


def say_finished(run_dir: Path | None, step: int, total_steps: int, world: World, *, longer: str) -> int:
    """Tell that there is nothing left to do, and how to go on or begin anew; return the exit code.

    ``longer`` is the option that makes the run longer.
    """
    if world.is_main:
        print(
            f"{run_dir} is finished: {step:,} of {total_steps:,} steps. To train longer, raise {longer}; to "
            f"begin anew, name another --run.dir or remove {run_dir}"
        )
    return EXIT_OK


def leave(
    checkpointer: Checkpointer, step: int, state: Mapping[str, Any], stop: StopRequest, log: RunLog | None
) -> int:
    """Save ``state`` after ``step`` because a signal asked some worker to stop; return the exit code."""
    checkpointer.save(step, state, wait=True)
    report_checkpoints(checkpointer, log)
    if log:
        reason = f"{stop.requested or 'a signal to another worker'}; the same command continues"
        log.stop(record.Stop(step=step, reason=reason, exit_code=EXIT_STOPPED))
    return EXIT_STOPPED
