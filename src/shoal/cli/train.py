"""Runs recipes: ``shoal train NAME``, with settings from options, a file and a preset."""

# Annotations are objects here, not texts: cyclopts reads those of the generated commands.

import tomllib
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import cyclopts
from cyclopts import App, Parameter

from shoal.cli.settings import this_command
from shoal.env import WorkerEnv
from shoal.recipes import RECIPES, load
from shoal.recipes.mask_rcnn import config as mask_rcnn
from shoal.recipes.start import Launch, start
from shoal.train.config import load_toml

train = App(
    name="train",
    help="Train a recipe; the same command again continues where the run stopped.",
    default_parameter=Parameter(consume_multiple=True),  # --finetune.at 5000 10000
)

everything = Parameter(name="*")
"""Options of the fields of a dataclass, without its own name before them."""
_DEFAULT_PRESETS = {"mask_rcnn": "coco-1x"}

_LAUNCHING = """Started alone, the command starts the workers; started by torchrun, mpirun or anything that
sets RANK and WORLD_SIZE, it joins them. Run it again to continue after a stop or a crash.

Parameters
----------
preset
    Settings to start from.
config
    TOML file with settings that go before the preset's; options go before both.
"""


def __getattr__(name: str) -> Callable[..., int]:
    """Return the command of a recipe; cyclopts asks for it when it is used."""
    if name not in RECIPES:
        raise AttributeError(name)
    return command_for(name)


def command_for(name: str) -> Callable[..., int]:
    """Return ``shoal train NAME`` as a function with the recipe's settings as options."""
    recipe, module = RECIPES[name], load(name)
    Config, presets = getattr(module, recipe.config), module.PRESETS

    def command(
        *,
        preset: Literal[presets] = recipe.preset,  # type: ignore[valid-type]
        config: Path | None = None,
        settings: Annotated[Config, everything] = Config(),  # type: ignore[valid-type]  # noqa: B008
        launch: Annotated[Launch, everything] = Launch(),  # noqa: B008
    ) -> int:
        return run_recipe(name, settings, launch, preset)

    command.__doc__ = f"{recipe.help}\n\n{_LAUNCHING}"
    return command


def run_recipe(name: str, config: Any, launch: Launch, preset: str) -> int:
    """Join the workers if this process is one, else start them; return the exit code.

    Raises:
        UsageError: settings that do not go together, or with the data.
        ShoalError: a worker failed.
    """
    module = load(name)
    run = config.run
    run_name = run.name or (run.dir.name if run.dir else f"{name}-{preset}")
    config = replace(config, run=replace(run, name=run_name, dir=run.dir or Path("runs") / run_name))
    return start(
        launch,
        command=this_command(),
        run_dir=config.run.dir,
        describe=lambda num_workers: module.check(config, num_workers, launch.dry_run),
        work=lambda worker: module.main(config, worker),
    )


def fill_settings(app: App, commands: tuple[str, ...], arguments: cyclopts.ArgumentCollection) -> None:
    """Fill in settings that the command line left open: from ``--config``, then from ``--preset``.

    Keys are checked like options, so that a misspelt one in a file fails with a suggestion too.
    """
    given = {argument.name: argument.tokens[0].value for argument in arguments if argument.tokens}
    trees: list[tuple[str, dict[str, Any]]] = []
    if path := given.get("--config"):
        trees.append((path, load_toml(Path(path))))
    name = commands[-1]
    default = RECIPES[name].preset if name in RECIPES else _DEFAULT_PRESETS.get(name, "base")
    preset = given.get("--preset", default)
    folder = f"presets/{name}" if name in RECIPES else f"{name}/presets"
    if folder:
        file = resources.files("shoal.recipes") / folder / f"{preset}.toml"
        if file.is_file():
            trees.append((f"preset {preset}", tomllib.loads(file.read_text(encoding="utf-8"))))
    for source, tree in trees:
        for command in reversed(commands):
            tree = {command: tree}
        cyclopts.config.Dict(tree, source=source)(app, commands, arguments)


train.config = (fill_settings,)
for _name, _recipe in RECIPES.items():
    train.command(f"{__name__}:{_name}", name=_name, help=_recipe.help)


@train.command(name="mask_rcnn")
def train_mask_rcnn(
    *,
    preset: Literal[mask_rcnn.PRESETS] = "coco-1x",  # type: ignore[valid-type]
    config: Path | None = None,
    settings: Annotated[mask_rcnn.MaskRCNNTrainConfig, everything] = mask_rcnn.MaskRCNNTrainConfig(),  # noqa: B008
    how: Annotated[Launch, everything] = Launch(),  # noqa: B008
) -> int:
    """Train Mask R-CNN to find objects in images, each with its box and mask.

    Held-out images are scored by COCO's rules, with all workers. Started alone, the command starts the
    workers; started by torchrun, mpirun or anything that sets RANK and WORLD_SIZE, it joins them. Run it
    again to continue after a stop or a crash.

    Parameters
    ----------
    preset
        Settings to start from.
    config
        TOML file with settings that go before the preset's; options go before both.
    """
    from shoal.recipes.mask_rcnn import images_start as start
    from shoal.recipes.mask_rcnn.start import describe

    def work(resolved: mask_rcnn.MaskRCNNTrainConfig, place: WorkerEnv, command: list[str]) -> int:
        from shoal.recipes.mask_rcnn.train import train

        return train(resolved, place, command)

    return start.run(settings, how, work, describe, preset=preset, command=this_command())
