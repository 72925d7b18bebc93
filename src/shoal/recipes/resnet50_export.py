"""Writes and reads trained networks: a directory of ``model.safetensors`` and ``config.json``.

The weights have torchvision's names (``torchvision.models.resnet50(…).load_state_dict`` takes them); the
configuration has the form of the network, the names of its classes, and the sizes and mean of its images.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import nn

from shoal.data.images.augment import check_normalisation
from shoal.data.images.shards import ImageShards
from shoal.errors import UsageError
from shoal.models.resnet import new_resnet
from shoal.models.resnet_config import ResNetConfig
from shoal.recipes.images import MADE, WEIGHTS, read_tree, reading, write_directory
from shoal.train.checkpoint import load_model
from shoal.train.config import load_toml
from shoal.train.run_dir import CONFIG_FILE, run_dir_of

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
    """Return what :func:`write_export` wrote.

    Raises:
        UsageError: ``directory`` is no such directory.
        ShoalError: its files are damaged.
    """
    with reading(directory):
        tree = read_tree(directory, FORMAT)
        network = ResNetConfig(**tree["model"])
        classes = tuple(map(str, tree["classes"]))
        model = new_resnet(network, network.num_classes or len(classes))
        model.load_state_dict(load_file(directory / WEIGHTS))
        mean, std = tree["mean"], tree["std"]
        check_normalisation(mean, std)
        size, resize, mirror = int(tree["size"]), int(tree["resize"]), bool(tree["mirror"])
    return Exported(
        model=model,
        network=network,
        classes=classes,
        size=size,
        resize=resize,
        mirror=mirror,
        mean=tuple(mean),
        std=tuple(std),
    )


def read_checkpoint(source: Path) -> tuple[Exported, int]:
    """Return the network of a run's newest checkpoint, or of one of its checkpoints, and the step.

    The weights are their average where the run keeps one; the norms have their running statistics.

    Raises:
        UsageError: ``source`` is neither a run of this recipe nor a checkpoint in one.
        ShoalError: there is no checkpoint, or it is damaged.
    """
    run_dir = run_dir_of(source)
    config = load_toml(run_dir / CONFIG_FILE)
    try:
        network = ResNetConfig(**config["model"])
        validation, augment, train = (config[name] for name in ("validation", "augment", "train"))
        key = "average" if train["average_decay"] else "model"
        mean, std = tuple(augment["mean"]), tuple(augment["std"])
    except (KeyError, TypeError) as error:
        raise UsageError(f"{run_dir} is not a run of `shoal train resnet50` ({error})") from None
    classes = ImageShards(config["data"].get("path", run_dir / MADE), "train").manifest.classes
    model = new_resnet(network, network.num_classes or len(classes))
    step = load_model(source, model, key=key)
    what = Exported(
        model=model,
        network=network,
        classes=classes,
        size=validation["size"],
        resize=validation["resize"],
        mirror=validation["mirror"],
        mean=mean,
        std=std,
    )
    return what, step
