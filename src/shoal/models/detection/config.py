"""Defines the settings of a detector. Does not import torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoal.errors import UsageError, require_positive

BoxLoss = Literal["smooth_l1", "giou"]


@dataclass(frozen=True, kw_only=True)
class MaskRCNNConfig:
    """A detector and how it learns; the values are torchvision's."""

    weights: Path | None = None
    """Trained weights to begin with, a safetensors file with torchvision's names: of a residual network for
    classification, or of a whole detector."""
    masks: bool = True
    """Find the mask of an object beside its box; without, the network is Faster R-CNN (arXiv 1506.01497)."""
    backbone: Literal["resnet18", "resnet34", "resnet50", "resnet101"] = "resnet50"
    """The residual network below the pyramid."""
    channels: int = 256
    """Channels of the pyramid and of the heads; the boxes' head has four times as many features."""
    frozen_stages: int | None = None
    """So many of the backbone's five (the stem is the first) do not learn; default: 2 from trained weights,
    0 from random ones."""
    frozen_norms: bool | None = None
    """Freeze statistics and weights of the backbone's norms; default: with trained weights."""
    anchor_sizes: tuple[int, ...] = (32, 64, 128, 256, 512)
    """Side of the anchors on each of the five levels, in pixels."""
    proposal_samples: int = 256
    """Anchors of an image that the first stage learns from, at most half of them positive."""
    proposals_a_level: int = 2000
    """Boxes of each level before suppression, in training."""
    proposals: int = 2000
    """Boxes of an image after suppression, in training."""
    proposals_used: int = 1000
    """Both, when objects are to be found."""
    region_samples: int = 512
    """Regions of an image that the second stage learns from, at most a quarter of them positive."""
    box_loss: BoxLoss = "smooth_l1"
    """Loss of the second stage's boxes."""
    label_smoothing: float = 0.0
    """Part of the second stage's class labels that is spread over all classes."""
    least_score: float = 0.05
    """Detections are at least so sure."""
    detections: int = 100
    """The best of an image are kept."""

    def __post_init__(self) -> None:
        """Check each field.

        Raises:
            UsageError: a value is out of its range.
        """
        if not 0 <= self.stages_frozen <= 5:
            raise UsageError(f"model.frozen_stages {self.frozen_stages} must be from 0 to 5")
        if len(self.anchor_sizes) != 5 or min(self.anchor_sizes) < 1:
            raise UsageError(f"model.anchor_sizes {self.anchor_sizes} must be five sides of at least 1 pixel")
        require_positive("model", self, "channels", "proposals_used", "detections")
        require_positive("model", self, "proposal_samples", "proposals_a_level", "proposals", least=2)
        require_positive("model", self, "region_samples", least=4)
        require_positive("model", self, "label_smoothing", "least_score", least=0, below=1)

    @property
    def network(self) -> str:
        """Name of the network, as the planner has it."""
        return "mask-rcnn" if self.masks else "faster-rcnn"

    @property
    def stages_frozen(self) -> int:
        """Number of the backbone's stages that do not learn."""
        if self.frozen_stages is None:
            return 2 if self.weights else 0
        return self.frozen_stages

    @property
    def norms_frozen(self) -> bool:
        """True if the backbone's norms do not learn."""
        return self.weights is not None if self.frozen_norms is None else self.frozen_norms
