"""Defines ``shoal bench train``, which times a few steps of a recipe."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from shoal.bench.step_timing import TrainBench
from shoal.cli.settings import settings_from
from shoal.env import WorkerEnv
from shoal.errors import UsageError
from shoal.recipes import albert, bert, resnet50, t5
from shoal.recipes.start import Launch, start

bench_train = App(
    name="train",
    default_parameter=Parameter(consume_multiple=True),
)
bench_train.config = (settings_from(lambda command: command[-1]),)

Settings = Parameter(name="*")
Config = albert.AlbertConfig | bert.BertConfig | t5.T5Config | resnet50.ResNetTrainConfig


@bench_train.command(name="albert")
def bench_albert(
    *,
    preset: Literal[albert.PRESETS] = "base",  # type: ignore[valid-type]
    settings: Annotated[albert.AlbertConfig, Settings] = albert.AlbertConfig(),  # noqa: B008
    launch: Annotated[Launch, Settings] = Launch(),  # noqa: B008
    what: Annotated[TrainBench, Settings] = TrainBench(),  # noqa: B008
) -> int:
    """Time ALBERT's pretraining.

    Parameters
    ----------
    preset
        Settings to start from.
    """
    return _run(settings, launch, what, name=f"albert-{preset}")


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


@bench_train.command(name="t5")
def bench_t5(
    *,
    preset: Literal[t5.PRESETS] = "base",  # type: ignore[valid-type]
    settings: Annotated[t5.T5Config, Settings] = t5.T5Config(),  # noqa: B008
    launch: Annotated[Launch, Settings] = Launch(),  # noqa: B008
    what: Annotated[TrainBench, Settings] = TrainBench(),  # noqa: B008
) -> int:
    """Time T5's pretraining, the whole model on each worker.

    Parameters
    ----------
    preset
        Settings to start from.
    """
    if settings.parallel.pipeline > 1:
        raise UsageError(
            f"--parallel.pipeline {settings.parallel.pipeline}: bench train measures replicas of the whole "
            "model; leave it out"
        )
    return _run(settings, launch, what, name=f"t5-{preset}")


@bench_train.command(name="resnet50")
def bench_resnet50(
    *,
    preset: Literal[resnet50.PRESETS] = "imagenet-16k",  # type: ignore[valid-type]
    settings: Annotated[resnet50.ResNetTrainConfig, Settings] = resnet50.ResNetTrainConfig(),  # noqa: B008
    launch: Annotated[Launch, Settings] = Launch(),  # noqa: B008
    what: Annotated[TrainBench, Settings] = TrainBench(),  # noqa: B008
) -> int:
    """Time ResNet-50's training, decoding of images included.

    Parameters
    ----------
    preset
        Settings to start from.
    """
    return _run(settings, launch, what, name=settings.model.network)


def _run(settings: Config, launch: Launch, what: TrainBench, *, name: str) -> int:
    """Join the workers if this process is one, else start them; return the exit code.

    Raises:
        UsageError: settings that cannot work together.
        ShoalError: a worker failed.
    """
    if what.json is not None and not what.json.parent.is_dir():
        raise UsageError(f"{what.json}: the folder {what.json.parent} is not there; make it first")

    def work(place: WorkerEnv) -> int:
        from shoal.cli.bench_train_work import measure

        return measure(settings, place, what, name=name)

    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        return start(
            launch,
            command=[sys.executable, "-m", "shoal", *sys.argv[1:]],
            run_dir=Path(folder),
            describe=lambda _: [f"would time {what.steps} steps of {name}"],
            work=work,
        )
