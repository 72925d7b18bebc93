"""Residual networks against torchvision's, and how their weights begin."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.errors import UsageError
from shoal.models.resnet import new_resnet
from shoal.models.resnet8 import ResNet8
from shoal.models.resnet_config import ResNetConfig
from shoal.optim.lamb import parameter_groups


@pytest.mark.parametrize("network", ["resnet18", "resnet50"])
def test_with_torchvisions_weights_the_logits_are_torchvisions(network: str) -> None:
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    theirs = getattr(models, network)(num_classes=7).eval()
    ours = new_resnet(ResNetConfig(network=network), 7).eval()  # type: ignore[arg-type]
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, 65, 65)  # odd: strides in the wrong convolution would show
    assert torch.equal(ours(images), theirs(images))


@pytest.mark.parametrize("network", ["resnet18", "resnet50"])
def test_each_residual_branch_begins_as_zero(network: str) -> None:
    torch.manual_seed(0)
    model = new_resnet(ResNetConfig(network=network), 5)  # type: ignore[arg-type]
    zeros = [name for name, p in model.named_parameters() if name.endswith("weight") and not p.any()]
    last, nums = ("bn3", (3, 4, 6, 3)) if network == "resnet50" else ("bn2", (2, 2, 2, 2))
    blocks = [f"layer{i + 1}.{j}" for i, num in enumerate(nums) for j in range(num)]
    assert zeros == [f"{block}.{last}.weight" for block in blocks]
    model(torch.randn(4, 3, 32, 32)).square().sum().backward()
    learn = dict(model.named_parameters())
    assert all(learn[name].grad is not None and learn[name].grad.any() for name in zeros)  # type: ignore[union-attr]


def test_weights_begin_by_hes_rule_on_what_goes_out() -> None:
    torch.manual_seed(0)
    model = new_resnet(ResNetConfig(), 1_000)
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 9_000:
            fan_out = module.out_channels * module.kernel_size[0] * module.kernel_size[1]
            assert float(module.weight.detach().std()) == pytest.approx((2 / fan_out) ** 0.5, rel=0.03), name
    assert float(model.fc.weight.detach().std()) == pytest.approx(0.01, rel=0.01)  # type: ignore[union-attr,operator]
    assert not model.fc.bias.any()  # type: ignore[union-attr,operator]


def test_settings_reach_norms_and_logits() -> None:
    images = torch.randn(2, 3, 64, 64)
    torch.manual_seed(0)
    model = new_resnet(ResNetConfig(network="resnet18", norm_eps=1e-3, norm_momentum=0.25), 3).eval()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(norms) == 20 and {(norm.eps, norm.momentum) for norm in norms} == {(1e-3, 0.25)}
    config = ResNetConfig(network="resnet18", norm_eps=1e-3, logit_scale=0.125)
    scaled = new_resnet(config, 3).eval()
    scaled.load_state_dict(model.state_dict())
    torch.testing.assert_close(scaled(images), model(images) * 0.125)


def test_norms_and_biases_do_not_decay() -> None:
    model = new_resnet(ResNetConfig(), 10)
    names = {parameter: name for name, parameter in model.named_parameters()}
    decayed, plain = parameter_groups(model.named_parameters(), 1e-4)
    assert {names[p] for p in plain["params"]} == {
        name for name in names.values() if "bn" in name or "downsample.1" in name or name == "fc.bias"
    }
    assert decayed["weight_decay"] == 1e-4 and plain["weight_decay"] == 0


def test_width_and_scale() -> None:
    torch.manual_seed(0)
    one = new_resnet(ResNetConfig(network="resnet8", width=4), 3).eval()
    scaled = new_resnet(ResNetConfig(network="resnet8", width=4, logit_scale=0.125), 3).eval()
    scaled.load_state_dict(one.state_dict())
    assert isinstance(one, ResNet8) and one.fc.in_features == 16
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(scaled(images), one(images) * 0.125)
    with pytest.raises(UsageError, match=r"model\.width 0 must be at least 1"):
        ResNetConfig(width=0)
    with pytest.raises(UsageError, match=r"model\.width is for model\.network resnet8"):
        ResNetConfig(width=32)
