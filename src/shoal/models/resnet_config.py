"""Defines the settings of a residual network. Does not import torch."""

# Annotations are types here, not texts: the command line resolves texts in the module of the subclass.

from dataclasses import dataclass
from typing import Literal

from shoal.errors import UsageError, require_positive

Network = Literal["resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnet8"]


@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """Structure of a residual network."""

    network: Network = "resnet50"
    """resnet18 to resnet152 for images from about 96 pixels on, resnet8 for small images (32 pixels)."""
    num_classes: int | None = None
    """Number of classes; default: that of the data."""
    width: int | None = None
    """Channels of resnet8's first stage, the others in proportion; default: 64."""
    zero_gamma: bool = True
    """Initialize the scale of each residual branch's last norm to 0, so that each block is the identity (not
    in resnet8, whose scales stay 1)."""
    norm_momentum: float = 0.1
    """Weight of a micro-batch's statistics in the running statistics of norms."""
    norm_eps: float = 1e-5
    """Added to the variance in the norms."""
    logit_scale: float = 1.0
    """Factor of the logits."""

    def __post_init__(self) -> None:
        require_positive("model", self, "num_classes", "width")
        if not 0 < self.norm_momentum <= 1:
            raise UsageError(f"model.norm_momentum {self.norm_momentum} must be above 0 and at most 1")
        if not (self.norm_eps > 0 and self.logit_scale > 0):
            raise UsageError("model.norm_eps and model.logit_scale must be above 0")
        if self.width and self.network != "resnet8":
            raise UsageError(f"model.width is for model.network resnet8; leave it out with {self.network}")
