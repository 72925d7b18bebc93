"""Reads and writes trained detectors: a directory of ``model.safetensors`` and ``config.json``.

The weights have torchvision's names (``torchvision.models.detection.maskrcnn_resnet50_fpn``, with one class
more than categories, takes those of the usual sizes); the configuration says which network it is, what its
categories are and how images are brought to its form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from shoal.data.coco.source import read_categories
from shoal.errors import ShoalError, UsageError, did_you_mean
from shoal.models.detection.config import MaskRCNNConfig
from shoal.models.detection.mask_rcnn import MaskRCNN
from shoal.recipes.images import WEIGHTS, read_tree, reading, write_directory
from shoal.recipes.model_source import find_run
from shoal.train.checkpoint import load_model
from shoal.train.config import load_toml
from shoal.train.run_dir import CONFIG_FILE, description_in

FORMAT = "shoal-mask-rcnn"


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A detector, its categories, and the sizes of its inputs; images are normalised as ImageNet's."""

    model: MaskRCNN
    categories: dict[int, str]
    """Names by id, in the order of the labels 1, 2, …."""
    shorter: int
    """Length of an image's shorter side, in pixels, unless the longer one would exceed its limit."""
    longer: int
    """Limit of the longer side, in pixels."""


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
    """Load an export of :func:`write_export`.

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
    run_dir = find_run(source, "--model")
    config = load_toml(run_dir / CONFIG_FILE)
    try:
        network, validation = _network(config["model"]), config["validation"]
        shorter, longer = int(validation["shorter"]), int(validation["longer"])
    except (KeyError, TypeError) as error:
        raise UsageError(f"{run_dir} is not a run of `shoal train mask_rcnn` ({error})") from None
    categories = read_categories(description_in(run_dir))
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


# ------------------------------------------------------------------------------------------ initial weights

BACKBONE = "backbone.body."
_COUNTER = "num_batches_tracked"
_BY_CLASS = ("roi_heads.box_predictor.", "roi_heads.mask_predictor.mask_fcn_logits.")
"""Tensors whose first dimension follows from the number of categories."""


@torch.no_grad()
def load_weights(model: MaskRCNN, path: Path) -> str:
    """Fill ``model`` with a file's weights; return in words which part they are.

    Names are torchvision's. Those of a classifier (``conv1.weight``, …) fill the backbone; a detector's
    fill everything, except what depends on categories where the file has another number of them.

    Raises:
        UsageError: the file is not there, lacks a tensor, or has one of another shape.
        ShoalError: it is damaged.
    """
    found = _read(path)
    is_detector = any(name.startswith(BACKBONE) for name in found)
    prefix = "" if is_detector else BACKBONE
    state = {
        name.removeprefix(prefix): tensor
        for name, tensor in model.state_dict().items()
        if name.startswith(prefix) and not name.endswith(_COUNTER)
    }
    num_new = 0
    for name, tensor in state.items():
        if name not in found:
            raise UsageError(
                f"model.weights {path} does not hold {name} of a {model.config.backbone}"
                f"{' detector' if is_detector else ''}.{did_you_mean(name, found)}"
            )
        if found[name].shape == tensor.shape:
            continue
        if not name.startswith(_BY_CLASS) or found[name].shape[1:] != tensor.shape[1:]:
            raise UsageError(
                f"model.weights {path}: {name} has shape {tuple(found[name].shape)}, the model's has "
                f"{tuple(tensor.shape)}; is model.backbone {model.config.backbone} the network of the file?"
            )
        num_new += 1
    for name, tensor in state.items():
        if found[name].shape == tensor.shape:
            tensor.copy_(found[name])
    part = "the detector" if is_detector else "the backbone"
    return f"{part} from {path}" + (", but new predictors for other categories" if num_new else "")


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise UsageError(f"model.weights {path} does not exist") from None
    except (SafetensorError, OSError) as error:
        raise ShoalError(f"model.weights {path} cannot be read as safetensors: {error}") from None
