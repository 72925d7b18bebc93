"""Writes the page of ``shoal report`` and the figure of ``shoal pipeline show``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shoal.atomic_io import write_atomically
from shoal.errors import UsageError
from shoal.record import PipelineStep, read_record
from shoal.report import charts, plots, tables
from shoal.report.pipeline_timeline import draw_pipeline_step
from shoal.report.runs import Read, RecordedRun, load_runs
from shoal.report.templates import fill_template
from shoal.report.timeline import timeline

FILE_NAME = "report.html"


def write_report(runs: Sequence[Path | str], out: Path | None = None, read: Read = read_record) -> Path:
    """Write one self-contained HTML page about one or several runs and return its path.

    The page contains its style and figures; it needs neither a network nor JavaScript. The default path is in
    the first run's directory. An older page is replaced atomically. ``runs`` and ``read`` are those of
    :func:`~shoal.report.runs.load_runs`.

    Raises:
        UsageError: ``runs`` is empty.
        ShoalError: a directory is not a run's, its record is damaged, or ``out`` cannot be written.
    """
    if not runs:
        raise UsageError("a report needs at least one run directory: shoal report RUN [RUN…]")
    target = out if out is not None else Path(runs[0]) / FILE_NAME
    write_atomically(target, render(load_runs(runs, read)).encode())
    return target


def render(runs: Sequence[RecordedRun]) -> str:
    """Return the page as HTML text."""
    return fill_template(
        "page.html.jinja",
        tables=tables,
        runs=runs,
        run_colours=[plots.css_colour(plots.run_colour(index)) for index in range(len(runs))],
        by_epoch=charts.by_epoch(runs),
        curves=charts.curve_charts(runs),
        throughput=charts.throughput_chart(runs),
        parts=charts.parts_charts(runs),
        pipelines=charts.pipeline_charts(runs),
        timeline=timeline(runs),
    )


def write_figure(row: PipelineStep, out: Path) -> Path:
    """Write the timeline of a pipeline's step as a separate SVG file and return its path.

    Raises:
        ShoalError: it cannot be written.
    """
    write_atomically(out, (draw_pipeline_step(row, background=True) + "\n").encode())
    return out
