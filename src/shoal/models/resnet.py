"""Makes residual networks for classification.

Those of He et al. 2015 (arXiv 1512.03385) are torchvision's, in version 1.5: the first block of a stage has
its stride in the 3×3 convolution, not in the 1×1 before. Weights are initialised as in Goyal et al. 2017
(arXiv 1706.02677, section 5.1): convolutions by He's rule with fan-out, the last norm of each residual branch
with scale 0, the classifier normal with standard deviation 0.01.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from shoal.errors import import_extra
from shoal.models.resnet8 import ResNet8
from shoal.models.resnet_config import ResNetConfig

_CLASSIFIER_STD = 0.01


def new_resnet(config: ResNetConfig, num_classes: int) -> nn.Module:
    """Return the network with weights initialised from torch's generator.

    Its ``forward`` takes images ``[B, 3, H, W]`` and returns logits ``[B, num_classes]``.
    """
    if config.network == "resnet8":
        return ResNet8(config, num_classes)
    networks = import_extra("torchvision.models", "vision", "residual networks are torchvision's")
    model = getattr(networks, config.network)(
        num_classes=num_classes,
        zero_init_residual=config.zero_gamma,
        norm_layer=partial(nn.BatchNorm2d, eps=config.norm_eps, momentum=config.norm_momentum),
    )
    model.fc = ScaledLinear(model.fc.in_features, num_classes, config.logit_scale)
    assert isinstance(model, nn.Module)
    return model


class ScaledLinear(nn.Linear):
    """A classifier whose logits are multiplied by a constant."""

    def __init__(self, channels: int, num_classes: int, scale: float) -> None:
        super().__init__(channels, num_classes)
        self.scale = scale
        nn.init.normal_(self.weight, std=_CLASSIFIER_STD)
        nn.init.zeros_(self.bias)

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features) * self.scale
