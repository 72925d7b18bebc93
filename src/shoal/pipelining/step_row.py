"""A pipeline's step as a row of the record: what was predicted of it, and what was traced."""

from __future__ import annotations

from shoal.decide.actions import Schedule
from shoal.decide.pipeline_simulator import Timeline, recorded
from shoal.record import PipelineStep


def step_row(
    schedule: Schedule, predicted: Timeline, traced: Timeline | None = None, *, step: int = 0
) -> PipelineStep:
    """Return the row; without ``traced`` it is a prediction only, of step 0."""
    return PipelineStep(
        step=step,
        schedule=schedule.name,
        placement=list(schedule.placement),
        num_micro_batches=schedule.num_micro_batches,
        predicted=recorded(predicted),
        traced=recorded(traced) if traced else [],
        predicted_peak_bytes=list(predicted.peak_saved_bytes),
        traced_peak_bytes=[],
    )
