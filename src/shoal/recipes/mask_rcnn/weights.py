"""Trained weights to begin with: of a residual network for classification, or of a whole detector."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from shoal.errors import ShoalError, UsageError, did_you_mean
from shoal.models.detection.mask_rcnn import MaskRCNN

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
