"""Defines ``shoal bench train``, which times a few steps of a recipe."""

# Annotations are objects here, not texts: cyclopts reads those of the generated commands.

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from shoal.bench.step_timing import TrainBench
from shoal.cli.settings import settings_from, this_command
from shoal.env import WorkerEnv
from shoal.errors import UsageError
from shoal.recipes import RECIPES, bert, load
from shoal.recipes.mask_rcnn import MaskRCNNTrainConfig
from shoal.recipes.resnet50 import ResNetTrainConfig
from shoal.recipes.start import Launch, start
from shoal.recipes.t5 import T5Config

bench_train = App(
    name="train",
    default_parameter=Parameter(consume_multiple=True),
)
bench_train.config = (settings_from(lambda command: command[-1]),)

Settings = Parameter(name="*")


def command_for(name: str) -> Callable[..., int]:
    """Return the command of a recipe as a function with the recipe's settings as options."""
    recipe, module = RECIPES[name], load(name)
    Config, presets = getattr(module, recipe.config), module.PRESETS

    def command(
        *,
        preset: Literal[presets] = recipe.preset,  # type: ignore[valid-type]
        settings: Annotated[Config, Settings] = Config(),  # type: ignore[valid-type]  # noqa: B008
        launch: Annotated[Launch, Settings] = Launch(),  # noqa: B008
        what: Annotated[TrainBench, Settings] = TrainBench(),  # noqa: B008
    ) -> int:
        """Time it.

        Parameters
        ----------
        preset
            Settings to start from.
        """
        return _run(settings, launch, what, name=f"{name}-{preset}")

    return command


for _name, _text in (
    ("albert", "Time ALBERT's pretraining."),
    ("t5", "Time T5's pretraining, the whole model on each worker."),
    ("resnet50", "Time ResNet-50's training, decoding of images included."),
    ("mask_rcnn", "Time Mask R-CNN's training on made scenes of one size, decoding of images included."),
):
    bench_train.command(command_for(_name), name=_name, help=_text)


@bench_train.command(name="bert")
def bench_bert(
    *,
    preset: Literal[bert.PRESETS] = "base",  # type: ignore[valid-type]
    phase: Literal[1, 2] = 1,
    settings: Annotated[bert.BertConfig, Settings] = bert.BertConfig(),  # noqa: B008
    launch: Annotated[Launch, Settings] = Launch(),  # noqa: B008
    what: Annotated[TrainBench, Settings] = TrainBench(),  # noqa: B008
) -> int:
    """Time BERT's pretraining.

    Parameters
    ----------
    preset
        Settings to start from.
    phase
        1: short sequences; 2: long ones.
    """
    chosen = settings.phase1 if phase == 1 else settings.phase2
    alone = replace(settings, phase1=chosen, phase2=replace(chosen, total_steps=0))
    return _run(alone, launch, what, name=f"bert-{preset.removesuffix('-lans')}")


def _run(settings: Any, launch: Launch, what: TrainBench, *, name: str) -> int:
    """Join the workers if this process is one, else start them; return the exit code.

    Raises:
        UsageError: settings that cannot work together.
        ShoalError: a worker failed.
    """
    if isinstance(settings, ResNetTrainConfig):
        name = settings.model.network
    elif isinstance(settings, MaskRCNNTrainConfig):
        name = "mask-rcnn"  # as the planner calls it, whatever the preset
    elif isinstance(settings, T5Config) and settings.parallel.pipeline > 1:
        raise UsageError(
            f"--parallel.pipeline {settings.parallel.pipeline}: bench train measures replicas of the whole "
            "model; leave it out"
        )
    if what.json is not None and not what.json.parent.is_dir():
        raise UsageError(f"{what.json}: the folder {what.json.parent} is not there; make it first")

    def work(place: WorkerEnv) -> int:
        from shoal.cli.bench_train_work import measure

        return measure(settings, place, what, name=name)

    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        return start(
            launch,
            command=this_command(),
            run_dir=Path(folder),
            describe=lambda _: [f"would time {what.steps} steps of {name}"],
            work=work,
        )
