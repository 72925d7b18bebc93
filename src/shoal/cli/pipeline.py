"""Defines ``shoal pipeline show``, which draws a measured or planned step of a pipeline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from shoal.cli.settings import settings_from
from shoal.recipes import t5

pipeline = App(name="pipeline", help="Show pipelines: models that are split over several devices.")
show = App(
    name="show",
    help="""Show a step of a pipeline: predicted and measured of a run, or predicted of a layout.

    shoal pipeline show runs/t5 --svg step.svg

    shoal pipeline show t5 --preset 3b --devices 2048 --memory 40GB --svg step.svg
    """,
)
show.config = (settings_from(lambda command: command[-1]),)
pipeline.command(show)


@show.default
def show_run(run: Path, /, *, step: int | None = None, svg: Path | None = None) -> None:
    """Draw a recorded step of a run, predicted above measured.

    Parameters
    ----------
    run
        A run directory.
    step
        Number of a recorded step; default: the last.
    svg
        Output file; default: pipeline.svg in the run directory.
    """
    from shoal.report.page import write_figure
    from shoal.report.pipeline_timeline import describe_pipeline_step
    from shoal.report.runs import recorded_step

    row = recorded_step(run, step)
    print(describe_pipeline_step(row))
    print(write_figure(row, svg or run / "pipeline.svg"))


@show.command(name="t5")
def show_t5(
    *,
    devices: int,
    memory: str,
    preset: Literal[t5.PRESETS] = "base",  # type: ignore[valid-type]
    config: Path | None = None,
    settings: Annotated[t5.T5Config, Parameter(name="*")] = t5.T5Config(),  # noqa: B008
    svg: Path | None = None,
) -> None:
    """Find the fastest layout of a T5 that fits, and explain it: stages, memory, timeline, predicted step.

    The model is split on the meta device and its costs are estimated, so this works for any number of
    devices. Without --parallel.pipeline every number of stages is tried.

    Parameters
    ----------
    devices
        Number of devices: pipeline × data.
    memory
        Memory of a device, such as 40GB.
    preset
        Settings to start from.
    config
        TOML file with settings, which override the preset's; options override both.
    svg
        Draw the predicted step of the best layout.
    """
    from shoal.pipelining.explain import explain_layouts
    from shoal.pipelining.trace import step_row
    from shoal.report.page import write_figure

    layout: Literal["given", "auto"] = "given" if settings.parallel.pipeline > 1 else "auto"
    parallel = replace(settings.parallel, layout=layout, devices=devices, memory=memory)
    layouts = t5.find_layouts(replace(settings, parallel=parallel), devices)
    title = f"T5 on {devices:,} {parallel.device.upper()}s of {memory}, by a cost model, not measured"
    print(explain_layouts(layouts, title=title))
    if svg is not None:
        best = layouts[0].choice
        print(write_figure(step_row(best.schedule, best.timeline), svg))
