"""The form of a residual network. No torch."""

# Annotations are types here, not texts: the command line resolves texts in the module of the subclass.

from dataclasses import dataclass
from typing import Literal

from shoal.errors import UsageError, require_positive

Network = Literal["resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnet8"]

BLOCKS: dict[str, tuple[int, int, int, int]] = {
    "resnet18": (2, 2, 2, 2),
    "resnet34": (3, 4, 6, 3),
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
    "resnet152": (3, 8, 36, 3),
}
"""Blocks of each of the four stages (He et al. 2015, arXiv 1512.03385, table 1)."""

BOTTLENECKED = frozenset({"resnet50", "resnet101", "resnet152"})
"""Networks whose blocks are 1×1, 3×3, 1×1 convolutions; those of the others are two of 3×3."""


@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """Which residual network."""

    network: Network = "resnet50"
    """resnet18 to resnet152 for images from about 96 pixels on, resnet8 for small ones (32 pixels)."""
    num_classes: int | None = None
    """Classes to tell apart; default: those of the data."""
    width: int | None = None
    """Channels of the first convolution (resnet8: first stage), all others in proportion; default: 64."""
    zero_gamma: bool = True
    """Begin with 0 as the scale of each residual branch's last norm, so that each block is the identity
    (not in resnet8, whose scales stay 1)."""
    norm_momentum: float = 0.1
    """What a micro-batch's statistics weigh in the running ones of the norms."""
    norm_eps: float = 1e-5
    """Added to the variance in the norms."""
    logit_scale: float = 1.0
    """The logits are multiplied by this."""

    def __post_init__(self) -> None:
        require_positive("model", self, "num_classes", "width")
        if not 0 < self.norm_momentum <= 1:
            raise UsageError(f"model.norm_momentum {self.norm_momentum} must be above 0 and at most 1")
        if not (self.norm_eps > 0 and self.logit_scale > 0):
            raise UsageError("model.norm_eps and model.logit_scale must be above 0")

    @property
    def first_width(self) -> int:
        """Channels of the first convolution, or of resnet8's first stage."""
        return self.width or 64
