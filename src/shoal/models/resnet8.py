"""Defines :class:`ResNet8`, a small residual network for images of 32 pixels.

It follows the networks of David Page for DAWNBench and of Jordan 2024 ("94% on CIFAR-10 in 3.29 Seconds on a
Single GPU", arXiv 2404.00498; without residual branches): a frozen first convolution computed from the
images, three stages with most channels at low resolution, and global max pooling.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.models.resnet_config import ResNetConfig

_SIDE = 2
_PIXELS = 3 * _SIDE**2
_EPS = 5e-4
"""Added to the variances of whitened patches (Jordan 2024, section 3.1)."""


class ResNet8(nn.Module):
    """A frozen 2×2 convolution, six of 3×3 and a classifier; the image's side is halved three times.

    Layers have PyTorch's initialisation, and the norms' scales stay 1 (Jordan 2024, section 3). With He's
    rule, whose weights are about twice as large, and trained scales, accuracy is 8 points lower after one
    epoch of CIFAR-10.

    Call :meth:`whiten` before training, with images of the training distribution.
    """

    def __init__(self, config: ResNetConfig, num_classes: int) -> None:
        super().__init__()
        width = config.width or 64
        self.logit_scale = config.logit_scale
        self.stem = Patches()
        self.stages = nn.Sequential()
        channels = self.stem.out_channels
        for out in (width, 4 * width, 4 * width):
            self.stages.append(Stage(channels, out, config))
            channels = out
        self.fc = nn.Linear(channels, num_classes, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        x: Tensor = self.stages(F.gelu(self.stem(images)))
        logits: Tensor = self.fc(x.amax(dim=(2, 3)))
        return logits * self.logit_scale

    def whiten(self, batches: Iterable[Tensor]) -> None:
        """Compute the first convolution from batches of images ``[B, 3, H, W]``: :meth:`Patches.whiten`."""
        self.stem.whiten(batches)


class Patches(nn.Module):
    """Maps each 2×2 patch to 24 channels: 12 filters and their negatives.

    The filters are a buffer. Initially each selects one value of the patch.
    """

    out_channels = 2 * _PIXELS

    def __init__(self) -> None:
        super().__init__()
        self.filters: Tensor
        self.register_buffer("filters", _both_signs(torch.eye(_PIXELS)))

    def forward(self, images: Tensor) -> Tensor:
        return F.conv2d(images, self.filters)

    @torch.no_grad()
    def whiten(self, batches: Iterable[Tensor]) -> None:
        """Make the filters' outputs uncorrelated on these images, each with a mean square of about 1.

        The filters are the eigenvectors of the patches' second moments, the largest first, each divided by
        the root of its eigenvalue and a little more (Jordan 2024, section 3.1). ``batches`` are images
        ``[B, 3, H, W]``; computed in float64.
        """
        moments = torch.zeros(_PIXELS, _PIXELS, dtype=torch.float64)
        count = 0
        for images in batches:
            patches = F.unfold(images.cpu().double(), _SIDE).transpose(1, 2).reshape(-1, _PIXELS)
            moments += patches.T @ patches
            count += len(patches)
        variances, vectors = torch.linalg.eigh(moments / count)
        vectors *= vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()  # of an eigenvector any is
        filters = (vectors / (variances + _EPS).sqrt()).T.flip(0)
        self.filters.copy_(_both_signs(filters))


class Stage(nn.Module):
    """A convolution with max pooling that halves the side, and one more as a residual branch.

    The first is initialised to pass its input channels through. Pooling comes before the norm, which then
    reads a quarter of the pixels: on CPUs norms are bound by memory.
    """

    def __init__(self, channels: int, out: int, config: ResNetConfig) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out, 3, padding=1, bias=False)
        nn.init.dirac_(self.conv.weight.data[:channels])
        self.norm = _norm(out, config)
        self.branch = nn.Sequential(nn.Conv2d(out, out, 3, padding=1, bias=False), _norm(out, config))

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm(F.max_pool2d(self.conv(x), 2)))
        return F.gelu(x + self.branch(x))


def _norm(channels: int, config: ResNetConfig) -> nn.BatchNorm2d:
    """Return a norm with a frozen scale."""
    norm = nn.BatchNorm2d(channels, eps=config.norm_eps, momentum=config.norm_momentum)
    norm.weight.requires_grad_(False)
    return norm


def _both_signs(filters: Tensor) -> Tensor:
    """Return filters ``[12, 12]`` over the values of a patch as weights ``[24, 3, 2, 2]``."""
    return torch.cat([filters, -filters]).reshape(-1, 3, _SIDE, _SIDE)
