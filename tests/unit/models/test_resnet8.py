"""The first convolution of the small network, and what its stages begin as."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoal.errors import UsageError
from shoal.models.resnet8 import Patches, ResNet8
from shoal.models.resnet_config import ResNetConfig
from shoal.recipes.resnet50 import ResNetTrainConfig, TrainConfig


def correlated_images(num_images: int, seed: int) -> torch.Tensor:
    """Images whose neighbouring pixels and colours are alike, as a camera's are."""
    noise = torch.randn(num_images, 3, 18, 18, generator=torch.Generator().manual_seed(seed))
    grey = noise.mean(dim=1, keepdim=True)
    return F.avg_pool2d(noise + 2 * grey, 3, stride=1)


def test_whitened_patches_are_uncorrelated_with_a_mean_square_of_one() -> None:
    images = correlated_images(512, seed=0)
    stem = Patches()
    stem.whiten(images.split(100))
    outputs = stem(images).transpose(0, 1).flatten(1)
    positive, negative = outputs.split(12)
    assert torch.equal(positive, -negative)
    moments = positive.double() @ positive.double().T / positive.shape[1]
    off_diagonal = moments - moments.diag().diag()
    assert float(off_diagonal.abs().max()) < 1e-4
    before = Patches()(images).transpose(0, 1).flatten(1)[:12].double()
    variances = torch.linalg.eigvalsh(before @ before.T / before.shape[1]).flip(0)
    torch.testing.assert_close(moments.diag(), variances / (variances + 5e-4), rtol=1e-3, atol=0)


def test_filters_do_not_depend_on_how_images_are_cut_into_batches() -> None:
    images = correlated_images(64, seed=1)
    one, other = Patches(), Patches()
    one.whiten([images])
    other.whiten(images.split(7))
    torch.testing.assert_close(one.filters, other.filters, rtol=1e-5, atol=1e-6)


def test_without_images_the_first_convolution_passes_each_pixel_on() -> None:
    images = torch.randn(2, 3, 6, 5, generator=torch.Generator().manual_seed(2))
    outputs = Patches()(images)
    assert torch.equal(outputs[:, :12].reshape(2, 3, 2, 2, 5, 4)[:, :, 1, 0], images[:, :, 1:, :-1])
    assert torch.equal(outputs[:, 12:], -outputs[:, :12])


def test_filters_do_not_learn_and_are_kept() -> None:
    model = ResNet8(ResNetConfig(network="resnet8", width=4), 3)
    assert "stem.filters" in model.state_dict()
    assert not [name for name, _ in model.named_parameters() if name.startswith("stem")]


def test_a_stage_begins_with_the_channels_that_come_in() -> None:
    stage = ResNet8(ResNetConfig(network="resnet8", width=32), 3).stages[0]
    x = torch.randn(8, 24, 10, 10, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(stage.conv(x)[:, :24], x)
    pooled = F.max_pool2d(stage.conv(x), 2)
    straight = F.gelu(F.batch_norm(pooled, None, None, training=True))
    branch = F.batch_norm(stage.branch[0](straight), None, None, training=True)
    torch.testing.assert_close(stage(x), F.gelu(straight + branch))


def test_scales_of_norms_stay_one_and_all_else_learns() -> None:
    model = ResNet8(ResNetConfig(network="resnet8", width=8), 3)
    scales = [norm.weight for norm in model.modules() if isinstance(norm, nn.BatchNorm2d)]
    assert len(scales) == 6 and all(bool((scale == 1).all()) for scale in scales)
    model(torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(4))).square().sum().backward()
    still = {parameter for parameter in model.parameters() if parameter.grad is None}
    assert still == set(scales)
    assert all(parameter.grad.any() for parameter in set(model.parameters()) - still)


def test_only_the_small_network_is_whitened() -> None:
    with pytest.raises(UsageError, match=r"train\.whiten_images 5 is for model\.network resnet8"):
        ResNetTrainConfig(train=TrainConfig(whiten_images=5))
    with pytest.raises(UsageError, match=r"train\.whiten_images -1 must be at least 0"):
        TrainConfig(whiten_images=-1)
