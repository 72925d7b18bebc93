"""A trained detector as a directory: ``model.safetensors`` and ``config.json``, and back.

The weights have torchvision's names (``torchvision.models.detection.maskrcnn_resnet50_fpn``, with one class
more than categories, takes those of the usual sizes); the configuration says which network it is, what its
categories are and how images are brought to its form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from shoal.data.coco.source import read_categories
from shoal.errors import UsageError
from shoal.models.detection.config import MaskRCNNConfig
from shoal.models.detection.mask_rcnn import MaskRCNN
from shoal.recipes.images import MADE, WEIGHTS, read_tree, reading, write_directory
from shoal.recipes.mask_rcnn.config import MaskRCNNTrainConfig
from shoal.train.checkpoint import load_model
from shoal.train.config import load_toml
from shoal.train.run_dir import CONFIG_FILE, run_dir_of

FORMAT = "shoal-mask-rcnn"


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A detector and what it needs to be used; images are normalised as ImageNet's."""

    model: MaskRCNN
    categories: dict[int, str]
    """Names by id, in the order of the labels 1, 2, …."""
    shorter: int
    """Length of an image's shorter side, in pixels, unless the longer one would exceed its limit."""
    longer: int
    """That limit."""


def exported(model: MaskRCNN, config: MaskRCNNTrainConfig, categories: Mapping[int, str]) -> Exported:
    """Return a trained ``model`` with what its run's settings say about its use."""
    validation = config.validation
    return Exported(
        model=model,
        categories=dict(categories),
        shorter=validation.shorter,
        longer=validation.longer,
    )


def write_export(what: Exported, out: Path) -> None:
    """Write a directory, whole or not at all; an older export in ``out`` is replaced."""
    tree = {
        "format": FORMAT,
        "model": {name: value for name, value in asdict(what.model.config).items() if name != "weights"},
        "categories": [{"id": number, "name": name} for number, name in what.categories.items()],
        "shorter": what.shorter,
        "longer": what.longer,
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
        categories = {int(one["id"]): str(one["name"]) for one in tree["categories"]}
        model = MaskRCNN(_network(tree["model"]), len(categories))
        model.load_state_dict(load_file(directory / WEIGHTS))
        shorter, longer = int(tree["shorter"]), int(tree["longer"])
    return Exported(model=model, categories=categories, shorter=shorter, longer=longer)


def read_checkpoint(source: Path) -> tuple[Exported, int]:
    """Return the detector of a run's newest checkpoint, or of one of its checkpoints, and the step.

    Raises:
        UsageError: ``source`` is neither a run of this recipe nor a checkpoint in one.
        ShoalError: there is no checkpoint, or it is damaged.
    """
    run_dir = run_dir_of(source)
    config = load_toml(run_dir / CONFIG_FILE)
    try:
        network, validation = _network(config["model"]), config["validation"]
        shorter, longer = int(validation["shorter"]), int(validation["longer"])
    except (KeyError, TypeError) as error:
        raise UsageError(f"{run_dir} is not a run of `shoal train mask_rcnn` ({error})") from None
    categories = read_categories(config["data"].get("path", run_dir / MADE))
    model = MaskRCNN(network, len(categories))
    step = load_model(source, model)
    return Exported(model=model, categories=categories, shorter=shorter, longer=longer), step


def _network(tree: Mapping[str, Any]) -> MaskRCNNConfig:
    """Return the form of a network that was written; what depends on ``weights`` is spelt out."""
    known = {one.name for one in fields(MaskRCNNConfig)}
    if strange := [name for name in tree if name not in known]:
        raise TypeError(f"no setting of a detector is called {strange[0]}")
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in tree.items()
    }
    weights = values.pop("weights", None)
    config = MaskRCNNConfig(**values, weights=Path(weights) if weights else None)
    return replace(config, weights=None, frozen_stages=config.stages_frozen, frozen_norms=config.norms_frozen)
