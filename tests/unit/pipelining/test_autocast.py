"""A pipeline in 16 bits: autocast holds in the forward pass of each stage, and ends before backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shoal.pipelining.api import pipeline

pytestmark = pytest.mark.usefixtures("group")


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.layers(x).float() - y).square().mean()


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1.0), (torch.float16, 4096.0)], ids=str)
def test_only_the_forward_pass_is_in_16_bits(dtype: torch.dtype, scale: float, verify: bool) -> None:
    torch.manual_seed(1)
    model, batch = Regression(), {"x": torch.randn(4, 8), "y": torch.randn(4, 1)}
    parts = [{name: rows[n : n + 2] for name, rows in batch.items()} for n in (0, 2)]
    wanted_loss = torch.zeros(())
    for part in parts:
        with torch.autocast("cpu", dtype):
            loss = model(**part) / 2
        (loss * scale).backward()
        wanted_loss += loss.detach()
    wanted = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    exact = model(**batch).item()
    assert exact != wanted_loss.item()

    stage = pipeline(
        model, batch, microbatches=2, schedule="1f1b", autocast=dtype, verify=verify,
        device="cpu",
    )  # fmt: skip
    inside: list[bool] = []
    for parameter in stage.module.parameters():
        parameter.register_hook(lambda gradient: inside.append(torch.is_autocast_enabled("cpu")))
    stage.loss_scale = scale
    loss = stage.step(**batch)
    assert len(inside) >= 8 and not any(inside)
    assert loss.item() == pytest.approx(wanted_loss.item(), rel=1e-6)
    for name, parameter in stage.module.named_parameters():
        assert torch.equal(parameter.grad, wanted[name]), name
    found = stage.evaluate(**batch)
    assert found.loss.item() == pytest.approx(wanted_loss.item(), rel=1e-6)
    stage.close()


def test_a_gradient_of_fp16_needs_the_scale_and_the_loss_does_not_show_it() -> None:
    """A gradient of 1e-8 is zero in fp16; with a scale near the end of fp32 the loss is still finite."""

    class Faint(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return 100 + 1e-8 * (x @ self.weight).float().sum()

    batch = {"x": torch.ones(2, 4)}
    model = Faint()
    for scale, lost in ((1.0, True), (65_536.0, False), (3e38, False)):
        stage = pipeline(model, batch, microbatches=1, autocast=torch.float16, device="cpu")
        stage.loss_scale = scale
        loss = stage.step(**batch)
        (weight,) = stage.module.parameters()
        assert loss.item() == pytest.approx(100.0, rel=1e-6)
        if scale < 1e38:
            assert (weight.grad / scale).max().item() == pytest.approx(0.0 if lost else 2e-8, rel=2e-3, abs=0)
        else:
            assert not weight.grad.isfinite().any()
        stage.close()
