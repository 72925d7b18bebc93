"""Defines ``shoal pipeline show``, which draws a measured or planned step of a pipeline."""

# Annotations are objects here, not texts: cyclopts reads those of the generated commands.

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from shoal.cli.settings import settings_from
from shoal.recipes import RECIPES, script

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


def __getattr__(name: str) -> Callable[..., None]:
    """Return the command of a recipe, such as ``show_t5``; cyclopts asks for it when it is used."""
    recipe = name.removeprefix("show_")
    if recipe == name or recipe not in RECIPES or not RECIPES[recipe].layouts:
        raise AttributeError(name)
    return _command_for(recipe)


def _command_for(recipe: str) -> Callable[..., None]:
    """Return the command as a function with the recipe's settings as options."""
    module: Any = script(recipe)
    kind = getattr(module, RECIPES[recipe].config)

    def show_layouts(
        *,
        devices: int,
        memory: str,
        preset: Literal[module.PRESETS] = RECIPES[recipe].preset,  # type: ignore[valid-type]
        config: Path | None = None,
        settings: Annotated[kind, Parameter(name="*")] = kind(),  # type: ignore[valid-type]  # noqa: B008
        svg: Path | None = None,
    ) -> None:
        """Find the fastest layout that fits, and explain it: stages, memory, timeline, predicted step.

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
        from shoal.pipelining.trace import step_row
        from shoal.report.page import write_figure

        recipe_settings: Any = settings
        layout: Literal["given", "auto"] = "given" if recipe_settings.parallel.pipeline > 1 else "auto"
        parallel = replace(recipe_settings.parallel, layout=layout, devices=devices, memory=memory)
        planned = replace(recipe_settings, parallel=parallel)
        layouts = module.find_layouts(planned, devices)
        print(module.explain(planned, layouts, devices))
        if svg is not None:
            best = layouts[0].choice
            print(write_figure(step_row(best.schedule, best.timeline), svg))

    return show_layouts


for _name, _recipe in RECIPES.items():
    if _recipe.layouts:
        show.command(
            f"{__name__}:show_{_name}", name=_name, help="Find the fastest layout that fits, and explain it."
        )
