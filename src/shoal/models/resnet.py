"""Defines residual networks for classification.

:class:`ResNet` is that of He et al. 2015 (arXiv 1512.03385) in version 1.5: the first block of a stage has
its stride in the 3×3 convolution, not in the 1×1 before. Parameters and buffers have torchvision's names, so
either loads the other's weights. Weights are initialised as in Goyal et al. 2017 (arXiv 1706.02677, section
5.1): convolutions by He's rule with fan-out, the last norm of each residual branch with scale 0, the
classifier normal with standard deviation 0.01.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.models.resnet8 import ResNet8
from shoal.models.resnet_config import BLOCKS, BOTTLENECKED, ResNetConfig

_CLASSIFIER_STD = 0.01


def new_resnet(config: ResNetConfig, num_classes: int) -> nn.Module:
    """Return the network with weights initialised from torch's generator.

    Its ``forward`` takes images ``[B, 3, H, W]`` and returns logits ``[B, num_classes]``.
    """
    return ResNet8(config, num_classes) if config.network == "resnet8" else ResNet(config, num_classes)


class ResNet(nn.Module):
    """ResNet-18 to ResNet-152, version 1.5, for images from about 96 pixels on."""

    def __init__(self, config: ResNetConfig, num_classes: int) -> None:
        super().__init__()
        width = config.first_width
        self.logit_scale = config.logit_scale
        self.conv1 = _convolution(3, width, 7, 2)
        self.bn1 = _norm(width, config)
        channels = width
        for number, num_blocks in enumerate(BLOCKS[config.network]):
            blocks: list[Block] = []
            for block in range(num_blocks):
                stride = 2 if number > 0 and block == 0 else 1
                blocks.append(Block(channels, width << number, stride, config))
                channels = blocks[-1].out_channels
            self.add_module(f"layer{number + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(channels, num_classes)
        nn.init.normal_(self.fc.weight, std=_CLASSIFIER_STD)
        nn.init.zeros_(self.fc.bias)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(images)), inplace=True), 3, stride=2, padding=1)
        for number in range(1, 5):
            x = getattr(self, f"layer{number}")(x)
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits * self.logit_scale


class Block(nn.Module):
    """A residual branch of two or three convolutions, added to the input or its projection."""

    def __init__(self, channels: int, width: int, stride: int, config: ResNetConfig) -> None:
        super().__init__()
        if config.network in BOTTLENECKED:
            self.out_channels = 4 * width
            layers = [(1, width, 1), (3, width, stride), (1, self.out_channels, 1)]
        else:
            self.out_channels = width
            layers = [(3, width, stride), (3, width, 1)]
        self.num_layers = len(layers)
        into = channels
        for number, (kernel, out, step) in enumerate(layers, start=1):
            self.add_module(f"conv{number}", _convolution(into, out, kernel, step))
            self.add_module(f"bn{number}", _norm(out, config, last=number == len(layers)))
            into = out
        self.downsample = None
        if stride != 1 or channels != self.out_channels:
            self.downsample = nn.Sequential(
                _convolution(channels, self.out_channels, 1, stride), _norm(self.out_channels, config)
            )

    def forward(self, x: Tensor) -> Tensor:
        branch = x
        for number in range(1, self.num_layers + 1):
            branch = getattr(self, f"bn{number}")(getattr(self, f"conv{number}")(branch))
            if number < self.num_layers:
                branch = F.relu(branch, inplace=True)
        straight = x if self.downsample is None else self.downsample(x)
        return F.relu(branch + straight, inplace=True)


def _convolution(channels: int, out: int, kernel: int, stride: int) -> nn.Conv2d:
    layer = nn.Conv2d(channels, out, kernel, stride=stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


def _norm(channels: int, config: ResNetConfig, *, last: bool = False) -> nn.BatchNorm2d:
    """Return a norm; ``last`` marks the end of a residual branch."""
    norm = nn.BatchNorm2d(channels, eps=config.norm_eps, momentum=config.norm_momentum)
    if last and config.zero_gamma:
        nn.init.zeros_(norm.weight)
    return norm


def norms_of(model: nn.Module) -> list[nn.BatchNorm2d]:
    """Return the norms of ``model`` in their order."""
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


def running_statistics(norms: Sequence[nn.BatchNorm2d]) -> list[Tensor]:
    """Return the running means and variances of ``norms``, in their order.

    Each worker's norms see its own micro-batches. Averaged over the workers after each step (0.2 MB beside
    ResNet-50's 102 MB of gradients), a checkpoint and an evaluation find the same model on every worker,
    whenever they come and however the run was interrupted.
    """
    found = [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var)]
    return [buffer for buffer in found if isinstance(buffer, torch.Tensor)]
