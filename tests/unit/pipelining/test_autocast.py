"""A pipeline in bf16: autocast holds in the forward pass of each stage, and ends before the backward pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shoal.pipelining.api import pipeline


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.layers(x).float() - y).square().mean()


@pytest.mark.parametrize("verify", [False, True])
def test_only_the_forward_pass_is_in_bf16(verify: bool) -> None:
    torch.manual_seed(1)
    model, batch = Regression(), {"x": torch.randn(4, 8), "y": torch.randn(4, 1)}
    parts = [{name: rows[n : n + 2] for name, rows in batch.items()} for n in (0, 2)]
    wanted_loss = torch.zeros(())
    for part in parts:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**part) / 2
        loss.backward()
        wanted_loss += loss.detach()
    wanted = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    exact = model(**batch).item()
    assert exact != wanted_loss.item()

    stage = pipeline(
        model, batch, microbatches=2, schedule="1f1b", autocast=torch.bfloat16, verify=verify,
        device="cpu",
    )  # fmt: skip
    inside: list[bool] = []
    for parameter in stage.module.parameters():
        parameter.register_hook(lambda gradient: inside.append(torch.is_autocast_enabled("cpu")))
    loss = stage.step(**batch)
    assert len(inside) >= 8 and not any(inside)
    assert loss.item() == pytest.approx(wanted_loss.item(), rel=1e-6)
    for name, parameter in stage.module.named_parameters():
        assert torch.equal(parameter.grad, wanted[name]), name
    found = stage.evaluate(**batch)
    assert found.loss.item() == pytest.approx(wanted_loss.item(), rel=1e-6)
    stage.close()
