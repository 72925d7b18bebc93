"""``shoal pipeline show``: a step of a pipeline as an SVG file of its own."""

from __future__ import annotations

from pathlib import Path

from shoal.errors import UsageError
from shoal.record import PipelineStep, read_record
from shoal.report.page import write_whole
from shoal.report.pipeline_timeline import draw_pipeline_step

FILE_NAME = "pipeline.svg"


def recorded_step(run_dir: Path, step: int | None = None) -> PipelineStep:
    """Return a run's last step whose timeline was recorded, or that of ``step``.

    Raises:
        UsageError: the run has none, or not of that step.
        ShoalError: there is no record.
    """
    rows = [row for row in read_record(run_dir) if isinstance(row, PipelineStep)]
    if not rows:
        raise UsageError(
            f"the record of {run_dir} has no step of a pipeline: only runs with --parallel.pipeline 2 or "
            "more have one"
        )
    if step is None:
        return rows[-1]
    for row in reversed(rows):
        if row.step == step:
            return row
    known = ", ".join(f"{row.step:,}" for row in rows)
    raise UsageError(f"--step {step} was not recorded in {run_dir}; these were: {known}")


def write_figure(row: PipelineStep, out: Path) -> Path:
    """Write the figure, predicted above traced, as an SVG that stands alone; return its path.

    Raises:
        ShoalError: it cannot be written.
    """
    write_whole(out, draw_pipeline_step(row, background=True) + "\n")
    return out
