"""What all residual networks here are made of: convolutions and norms, and how they begin."""

from __future__ import annotations

from torch import nn

from shoal.models.resnet_config import ResNetConfig


def convolution(channels: int, out: int, kernel: int, stride: int) -> nn.Conv2d:
    """Return a convolution without a bias that begins by He's rule on what goes out of it."""
    layer = nn.Conv2d(channels, out, kernel, stride=stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


def norm(channels: int, config: ResNetConfig, *, last: bool = False) -> nn.BatchNorm2d:
    """Return a norm; ``last`` says that it ends a residual branch."""
    layer = nn.BatchNorm2d(channels, eps=config.norm_eps, momentum=config.norm_momentum)
    if last and config.zero_gamma:
        nn.init.zeros_(layer.weight)
    return layer
