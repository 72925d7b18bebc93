"""Writes and reads trained networks: a directory of ``model.safetensors`` and ``config.json``.

The weights have torchvision's names (``torchvision.models.resnet50(…).load_state_dict`` takes them); the
configuration has the form of the network, the names of its classes, and the sizes and mean of its images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import nn

from shoal.data.images.augment import check_normalisation
from shoal.data.images.manifest import ImageManifest
from shoal.errors import UsageError
from shoal.models.resnet import new_resnet
from shoal.models.resnet_config import ResNetConfig
from shoal.recipes.images import WEIGHTS, find_network, read_tree, reading, write_directory
from shoal.recipes.model_source import find_run
from shoal.train.checkpoint import load_model
from shoal.train.config import load_toml, required
from shoal.train.run_dir import CONFIG_FILE, description_in

FORMAT = "shoal-resnet"
_USE = ("size", "resize", "mirror", "mean", "std")


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A network, its classes, and the form of its inputs."""

    model: nn.Module
    network: ResNetConfig
    classes: tuple[str, ...]
    """Names in the order of the labels."""
    size: int
    """Side of the square in the middle of an image that the model sees, in pixels."""
    resize: int
    """Length of an image's shorter side before that."""
    mirror: bool
    """Score the mean of the logits of an image and of its mirror image."""
    mean: tuple[float, float, float]
    """Subtracted from red, green and blue, values from 0 to 1."""
    std: tuple[float, float, float]
    """They are divided by it."""


def write_export(what: Exported, out: Path) -> None:
    """Write a directory, whole or not at all; an older export in ``out`` is replaced."""
    tree = {
        "format": FORMAT,
        "model": asdict(what.network),
        "classes": what.classes,
        **{name: getattr(what, name) for name in _USE},
    }
    write_directory(out, what.model, tree)


def read_export(directory: Path) -> Exported:
    """Load an export of :func:`write_export`.

    Raises:
        UsageError: ``directory`` is no such directory.
        ShoalError: its files are damaged.
    """
    with reading(directory):
        tree = read_tree(directory, FORMAT)
        found = _made(tree["model"], tuple(map(str, tree["classes"])), tree)
        found.model.load_state_dict(load_file(directory / WEIGHTS))
    return found


def _made(network: dict[str, Any], classes: tuple[str, ...], use: Mapping[str, Any]) -> Exported:
    """Return a network with random weights; ``use`` has the form of its inputs."""
    config = ResNetConfig(**network)
    check_normalisation(use["mean"], use["std"])
    return Exported(
        model=new_resnet(config, config.num_classes or len(classes)),
        network=config,
        classes=classes,
        size=int(use["size"]),
        resize=int(use["resize"]),
        mirror=bool(use["mirror"]),
        mean=tuple(use["mean"]),
        std=tuple(use["std"]),
    )


def read_network(source: Path) -> Exported:
    """Return the network of an export (a run's own where it has one), else of a checkpoint.

    Raises:
        UsageError: ``source`` has no model of this recipe.
        ShoalError: it is damaged, or has no checkpoint yet.
    """
    found = find_network(source)
    return read_export(required(found.directory)) if found.checkpoint is None else read_checkpoint(source)[0]


def read_checkpoint(source: Path) -> tuple[Exported, int]:
    """Return the network of a run's newest checkpoint, or of one of its checkpoints, and the step.

    The weights are their average where the run keeps one; the norms have their running statistics.

    Raises:
        UsageError: ``source`` is neither a run of this recipe nor a checkpoint in one.
        ShoalError: there is no checkpoint, or it is damaged.
    """
    run_dir = find_run(source, "--model")
    config = load_toml(run_dir / CONFIG_FILE)
    try:
        use = {**config["augment"], **config["validation"]}
        classes = ImageManifest.load(description_in(run_dir)).classes
        found = _made(config["model"], classes, use)
        key = "average" if config["train"]["average_decay"] else "model"
    except (KeyError, TypeError) as error:
        raise UsageError(f"{run_dir} is not a run of `shoal train resnet50` ({error})") from None
    return found, load_model(source, found.model, key=key)
