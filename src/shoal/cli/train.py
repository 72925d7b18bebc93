"""``shoal train …``: one command a recipe, settings from options, a file and a preset."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from shoal.cli.settings import settings_from, this_command
from shoal.env import WorkerEnv
from shoal.recipes.albert import config as albert
from shoal.recipes.bert import config as bert
from shoal.recipes.mask_rcnn import config as mask_rcnn
from shoal.recipes.masked_lm import start
from shoal.recipes.resnet import config as resnet
from shoal.recipes.start import Launch
from shoal.recipes.t5 import config as t5

_FOLDERS = {"resnet50": "resnet"}
"""Recipes whose folder is not called as their command."""
_DEFAULT_PRESETS = {"mask_rcnn": "coco-1x", "resnet50": "imagenet-16k"}
"""Presets of commands whose default is not ``base``."""

train = App(
    name="train",
    help="Train a recipe; the same command again continues where the run stopped.",
    default_parameter=Parameter(consume_multiple=True),  # --finetune.at 5000 10000
)


train.config = (
    settings_from(
        lambda command: f"{_FOLDERS.get(command, command)}/presets",
        lambda command: _DEFAULT_PRESETS.get(command, "base"),
    ),
)

Settings = Parameter(name="*")
"""Options of the fields of a dataclass, without its own name before them."""


@train.command(name="albert")
def train_albert(
    *,
    preset: Literal[albert.PRESETS] = "base",  # type: ignore[valid-type]
    config: Path | None = None,
    settings: Annotated[albert.AlbertPretrainConfig, Settings] = albert.AlbertPretrainConfig(),  # noqa: B008
    how: Annotated[Launch, Settings] = Launch(),  # noqa: B008
) -> int:
    """Pretrain ALBERT: masked language model and sentence order.

    Started alone, the command starts the workers; started by torchrun, mpirun or anything that sets RANK and
    WORLD_SIZE, it joins them. Run it again to continue after a stop or a crash.

    Parameters
    ----------
    preset
        Settings to start from.
    config
        TOML file with settings that go before the preset's; options go before both.
    """

    def work(resolved: albert.AlbertPretrainConfig, place: WorkerEnv, command: list[str]) -> int:
        from shoal.recipes.albert.pretrain import pretrain

        return pretrain(resolved, place, command)

    return start.run(settings, how, work, preset=preset, command=this_command())


@train.command(name="bert")
def train_bert(
    *,
    preset: Literal[bert.PRESETS] = "base",  # type: ignore[valid-type]
    config: Path | None = None,
    settings: Annotated[bert.BertPretrainConfig, Settings] = bert.BertPretrainConfig(),  # noqa: B008
    how: Annotated[Launch, Settings] = Launch(),  # noqa: B008
) -> int:
    """Pretrain BERT: masked language model and next sentence, in two phases.

    The second phase, with long sequences, begins with the weights of the first. Started alone, the command
    starts the workers; started by torchrun, mpirun or anything that sets RANK and WORLD_SIZE, it joins them.
    Run it again to continue after a stop or a crash, in either phase.

    Parameters
    ----------
    preset
        Settings to start from.
    config
        TOML file with settings that go before the preset's; options go before both.
    """

    def work(resolved: bert.BertPretrainConfig, place: WorkerEnv, command: list[str]) -> int:
        from shoal.recipes.bert.pretrain import pretrain

        return pretrain(resolved, place, command)

    return start.run(settings, how, work, preset=preset, command=this_command())


@train.command(name="t5")
def train_t5(
    *,
    preset: Literal[t5.PRESETS] = "base",  # type: ignore[valid-type]
    config: Path | None = None,
    devices: int | None = None,
    memory: str | None = None,
    settings: Annotated[t5.T5PretrainConfig, Settings] = t5.T5PretrainConfig(),  # noqa: B008
    how: Annotated[Launch, Settings] = Launch(),  # noqa: B008
) -> int:
    """Pretrain T5: span corruption, on one device a replica or on a pipeline of several.

    The workers are --parallel.pipeline × --parallel.data; a run may go on with another layout. Started alone,
    the command starts the workers; started by torchrun, mpirun or anything that sets RANK and WORLD_SIZE, it
    joins them. Run it again to continue after a stop or a crash.

    Parameters
    ----------
    preset
        Settings to start from.
    config
        TOML file with settings that go before the preset's; options go before both.
    devices
        For --parallel.layout auto: how many devices to plan for; default: the workers.
    memory
        For --parallel.layout auto: memory of a device, such as 40GB.
    """
    from shoal.recipes.t5 import start

    def work(resolved: t5.T5PretrainConfig, place: WorkerEnv, command: list[str]) -> int:
        from shoal.recipes.t5.pretrain import pretrain

        return pretrain(resolved, place, command)

    parallel = settings.parallel
    parallel = replace(parallel, devices=devices or parallel.devices, memory=memory or parallel.memory)
    return start.run(replace(settings, parallel=parallel), how, work, preset=preset, command=this_command())


@train.command(name="resnet50")
def train_resnet50(
    *,
    preset: Literal[resnet.PRESETS] = "imagenet-16k",  # type: ignore[valid-type]
    config: Path | None = None,
    settings: Annotated[resnet.ResNetTrainConfig, Settings] = resnet.ResNetTrainConfig(),  # noqa: B008
    how: Annotated[Launch, Settings] = Launch(),  # noqa: B008
) -> int:
    """Train ResNet-50, or another residual network, to tell classes of images apart.

    The run is defined in epochs; its optimizer steps follow from the batch and are printed. Started alone,
    the command starts the workers; started by torchrun, mpirun or anything that sets RANK and WORLD_SIZE, it
    joins them. Run it again to continue after a stop or a crash.

    Parameters
    ----------
    preset
        Settings to start from.
    config
        TOML file with settings that go before the preset's; options go before both.
    """
    from shoal.recipes.images import start
    from shoal.recipes.resnet.start import describe

    def work(resolved: resnet.ResNetTrainConfig, place: WorkerEnv, command: list[str]) -> int:
        from shoal.recipes.resnet.train import train

        return train(resolved, place, command)

    return start.run(settings, how, work, describe, preset=preset, command=this_command())


@train.command(name="mask_rcnn")
def train_mask_rcnn(
    *,
    preset: Literal[mask_rcnn.PRESETS] = "coco-1x",  # type: ignore[valid-type]
    config: Path | None = None,
    settings: Annotated[mask_rcnn.MaskRCNNTrainConfig, Settings] = mask_rcnn.MaskRCNNTrainConfig(),  # noqa: B008
    how: Annotated[Launch, Settings] = Launch(),  # noqa: B008
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
    from shoal.recipes.images import start
    from shoal.recipes.mask_rcnn.start import describe

    def work(resolved: mask_rcnn.MaskRCNNTrainConfig, place: WorkerEnv, command: list[str]) -> int:
        from shoal.recipes.mask_rcnn.train import train

        return train(resolved, place, command)

    return start.run(settings, how, work, describe, preset=preset, command=this_command())
