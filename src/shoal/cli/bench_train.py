"""Defines ``shoal bench train``, which times a few steps of a recipe."""

# Annotations are objects here, not texts: cyclopts reads those of the generated commands.

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from shoal.bench.step_timing import TrainBench
from shoal.cli.fill_memory import find_largest, is_on_cpu
from shoal.cli.settings import settings_from, this_command
from shoal.env.launcher import worker_env
from shoal.env.worker import WorkerEnv
from shoal.errors import EXIT_OK, UsageError
from shoal.recipes import RECIPES, bert, load
from shoal.recipes.finetuning import FinetuneConfig
from shoal.recipes.mask_rcnn_config import MaskRCNNTrainConfig
from shoal.recipes.resnet50_config import ResNetTrainConfig
from shoal.recipes.start import Launch, start

bench_train = App(
    name="train",
    default_parameter=Parameter(consume_multiple=True),
)
bench_train.config = (settings_from(lambda command: command[-1]),)

Settings = Parameter(name="*")
_TEXTS = {
    "albert": "Time ALBERT's pretraining.",
    "t5": "Time T5's pretraining, the whole model on each worker or a pipeline.",
    "resnet50": "Time ResNet-50's training, decoding of images included.",
    "mask_rcnn": "Time Mask R-CNN's training, decoding of images included.",
    "squad": "Time finetuning on SQuAD.",
    "classify": "Time finetuning on sentences with labels.",
    "t5_classify": "Time finetuning T5 on sentences with labels.",
}


def command_for(name: str) -> Callable[..., int]:
    """Return the command of a recipe as a function with the recipe's settings as options."""
    recipe, module = RECIPES[name], load(name)
    Config, presets = getattr(module, recipe.config), module.PRESETS

    def command(
        *,
        preset: Literal[presets] = recipe.preset,  # type: ignore[valid-type]
        config: Path | None = None,
        size: str | None = None,
        settings: Annotated[Config, Settings] = Config(),  # type: ignore[valid-type]  # noqa: B008
        launch: Annotated[Launch, Settings] = Launch(),  # noqa: B008
        what: Annotated[TrainBench, Settings] = TrainBench(),  # noqa: B008
    ) -> int:
        """Time it.

        Parameters
        ----------
        preset
            Settings to start from.
        config
            TOML file with settings, which override the preset's.
        size
            Sizes of a model to finetune, where none is named: base, large, tiny; default: base.
        """
        return _run(settings, launch, what, name=_name_of(name, preset, size, settings))

    return command


def _name_of(recipe: str, preset: str, size: str | None, settings: Any) -> str:
    """Return the name of what is timed, as the planner calls it where it knows it.

    Raises:
        UsageError: a size for a model that has sizes of its own.
    """
    if isinstance(settings, FinetuneConfig):
        if settings.model.path is not None:
            if size is not None:
                raise UsageError(
                    f"--size {size} is for a made model, and --model.path names one: leave one out"
                )
            return recipe
        architecture = "t5" if recipe == "t5_classify" else {"albert": "albert"}.get(preset, "bert")
        return f"{recipe}-{architecture}-{size or ('tiny' if preset == 'tiny' else 'base')}"
    if size is not None:
        raise UsageError(f"--size {size} is for finetuning: here choose a --preset")
    if isinstance(settings, ResNetTrainConfig):
        return settings.model.network
    return "mask-rcnn" if isinstance(settings, MaskRCNNTrainConfig) else f"{recipe}-{preset}"


for _name, _text in _TEXTS.items():
    bench_train.command(command_for(_name), name=_name, help=_text)


@bench_train.command(name="bert")
def bench_bert(
    *,
    preset: Literal[bert.PRESETS] = "base",  # type: ignore[valid-type]
    config: Path | None = None,
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
    config
        TOML file with settings, which override the preset's.
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
        ShoalError: a worker failed, or not even one sample fits the memory.
    """
    if what.json is not None and not what.json.parent.is_dir():
        raise UsageError(f"{what.json}: the folder {what.json.parent} is not there; make it first")
    command = this_command()
    if what.fill_memory:
        if worker_env() is not None:
            raise UsageError("--fill-memory starts its workers itself: start it without torchrun or mpirun")
        if launch.dry_run:
            print(f"would look for the largest micro-batch of {name}")
            return EXIT_OK
        command = find_largest(command, what, unit=settings.unit, on_cpu=is_on_cpu(settings))

    def work(place: WorkerEnv) -> int:
        from shoal.cli.bench_train_work import measure

        return measure(settings, place, what, name=name)

    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        return start(
            launch,
            command=command,
            run_dir=Path(folder),
            describe=lambda _: [f"would time {what.steps} steps of {name}"],
            work=work,
        )
