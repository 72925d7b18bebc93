"""Export refuses code with its line; on the meta device it allocates nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.detection import maskrcnn_resnet50_fpn

from pipeline_models import cases
from shoal.errors import UsageError
from shoal.pipelining.export_graph import alias_names, export_model


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.sum() > 0:  # depends on data
            x = self.second(x)
        return x


def test_refusal_names_line_reason_and_remedy() -> None:
    with pytest.raises(UsageError) as refusal:
        export_model(Branching(), {"x": torch.randn(2, 4)}, True)
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "depends on data" in text)
    message = str(refusal.value)
    assert message.startswith(f"Branching cannot be exported at {__file__}:{line} (if x.sum() > 0:")
    assert "data-dependent" in message and "modules=[['first'], ['second']]" in message
    assert "\n" not in message


@pytest.mark.slow
def test_mask_rcnn_is_refused_with_its_line() -> None:
    model = maskrcnn_resnet50_fpn(weights=None, weights_backbone=None)
    where = r"MaskRCNN cannot be exported at .*torchvision/models/detection/\w+\.py:\d+ \(.*data-dependent"
    with pytest.raises(UsageError, match=where):
        export_model(model, {"images": torch.rand(1, 3, 64, 64)}, False)


def test_wrong_inputs_are_refused() -> None:
    with pytest.raises(UsageError, match="input 'x' is a list"):
        export_model(Branching(), {"x": [1.0]}, True)
    with pytest.raises(UsageError, match="missing a required argument: 'x'"):
        export_model(Branching(), {"y": torch.randn(2, 4)}, True)


def test_modes_and_caches_stay_as_they_are() -> None:
    model, batch = cases()["gpt2"]()
    model.transformer.h[0].eval()
    before = [module.training for module in model.modules()]
    exported = export_model(model, batch, True)
    assert [module.training for module in model.modules()] == before
    assert model.config.use_cache is True
    assert len(exported.outputs) == 2  # loss and logits
    export_model(model, batch, False)
    assert [module.training for module in model.modules()] == before


def test_aliases_name_the_first() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    assert alias_names(model) == {"1.weight": "0.weight"}
