"""Trained weights to begin with: a classifier's, a whole detector's, and files that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor

from shoal.errors import ShoalError, UsageError
from shoal.models.detection.config import MaskRCNNConfig
from shoal.models.detection.mask_rcnn import MaskRCNN, load_weights

CONFIG = MaskRCNNConfig(backbone="resnet18", channels=8, weights=Path("named"))
BY_CLASS = ("box_predictor", "mask_fcn_logits")


def written(path: Path, tensors: dict[str, Tensor]) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


@pytest.fixture(scope="module")
def classifier() -> dict[str, Tensor]:
    torch.manual_seed(4)
    network = torchvision.models.resnet18()
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean = torch.randn_like(module.weight)
    return dict(network.state_dict())


def test_a_classifier_fills_the_backbone(classifier: dict[str, Tensor], tmp_path: Path) -> None:
    model = MaskRCNN(CONFIG, 3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    said = load_weights(model, written(tmp_path / "r.safetensors", classifier))
    assert said == f"the backbone from {tmp_path / 'r.safetensors'}"
    for name, tensor in model.state_dict().items():
        theirs = name.removeprefix("backbone.body.")
        assert torch.equal(tensor, before[name] if theirs == name else classifier[theirs]), name


@pytest.mark.parametrize("num_categories", [3, 7])
def test_a_detector_fills_all_but_what_depends_on_categories(num_categories: int, tmp_path: Path) -> None:
    torch.manual_seed(5)
    source, model = MaskRCNN(CONFIG, num_categories), MaskRCNN(CONFIG, 3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    said = load_weights(model, written(tmp_path / "d.safetensors", dict(source.state_dict())))
    assert ("new predictors" in said) == (num_categories == 7)
    theirs = source.state_dict()
    for name, tensor in model.state_dict().items():
        kept = num_categories == 7 and any(part in name for part in BY_CLASS)
        assert torch.equal(tensor, before[name] if kept else theirs[name]), name


def test_files_that_do_not_fit(classifier: dict[str, Tensor], tmp_path: Path) -> None:
    model = MaskRCNN(CONFIG, 3)
    path = tmp_path / "w.safetensors"
    with pytest.raises(UsageError, match="does not exist"):
        load_weights(model, path)
    path.write_bytes(b"no such thing")
    with pytest.raises(ShoalError, match="as safetensors"):
        load_weights(model, path)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    narrow = {**classifier, "layer4.1.conv2.weight": torch.zeros(512, 512, 1, 1)}
    with pytest.raises(UsageError, match=r"layer4\.1\.conv2\.weight has shape .*resnet18"):
        load_weights(model, written(path, narrow))
    renamed = {name.replace("layer4.1.conv2", "layer4.1.conv3"): t for name, t in classifier.items()}
    with pytest.raises(UsageError, match=r"does not hold layer4\.1\.conv2\.weight.*Did you mean"):
        load_weights(model, written(path, renamed))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
