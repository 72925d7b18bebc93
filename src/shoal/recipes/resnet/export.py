"""A trained network as a directory: ``model.safetensors`` and ``config.json``, and back.

The weights have torchvision's names (``torchvision.models.resnet50(…).load_state_dict`` takes them); the
configuration says which network it is, what its classes are called and how images are brought to its form.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from shoal.data.files import write_atomically
from shoal.errors import ShoalError, UsageError
from shoal.models.resnet import new_resnet
from shoal.models.resnet_config import ResNetConfig
from shoal.recipes.resnet.config import ResNetTrainConfig

WEIGHTS, CONFIG = "model.safetensors", "config.json"
FORMAT = "shoal-resnet"


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A network and what it needs to be used."""

    model: nn.Module
    classes: tuple[str, ...]
    size: int
    """Side of the square in the middle of an image that the model sees."""
    resize: int
    """Length of an image's shorter side before that."""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


def write_export(model: nn.Module, config: ResNetTrainConfig, classes: Sequence[str], out: Path) -> None:
    """Write ``model``, whole or not at all; an older export in ``out`` is replaced."""
    temporary = out.with_name(f"{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
    tree = {
        "format": FORMAT,
        "model": asdict(config.model),
        "classes": list(classes),
        "size": config.validation.size,
        "resize": config.validation.resize,
        "mean": list(config.augment.mean),
        "std": list(config.augment.std),
    }
    write_atomically(temporary / CONFIG, (json.dumps(tree, indent=1, ensure_ascii=False) + "\n").encode())
    shutil.rmtree(out, ignore_errors=True)
    temporary.rename(out)


def read_export(directory: Path) -> Exported:
    """Return what :func:`write_export` wrote.

    Raises:
        UsageError: ``directory`` is no such directory.
        ShoalError: its files are damaged.
    """
    path = directory / CONFIG
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        if tree.get("format") != FORMAT:
            raise UsageError(f"{path} is not that of a network that shoal trained")
        classes = tuple(map(str, tree["classes"]))
        settings = replace(ResNetConfig(), **tree["model"])
        model = new_resnet(settings, settings.num_classes or len(classes))
        model.load_state_dict(load_file(directory / WEIGHTS))
        mean, std = (tuple(map(float, tree[name])) for name in ("mean", "std"))
        return Exported(
            model=model,
            classes=classes,
            size=int(tree["size"]),
            resize=int(tree["resize"]),
            mean=(mean[0], mean[1], mean[2]),
            std=(std[0], std[1], std[2]),
        )
    except FileNotFoundError as error:
        raise UsageError(
            f"{directory} is neither a run nor an exported network: {error.filename} is not there"
        ) from None
    except (SafetensorError, ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
        raise ShoalError(f"{directory} cannot be read: {' '.join(str(error).split())[:200]}") from None
