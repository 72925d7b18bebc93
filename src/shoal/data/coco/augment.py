"""Draws the augmentation of an image and its objects for a detector, a pure function of (seed, epoch, index).

Either the shorter side is resized to one of some lengths, with a limit of the longer one (the rule of Mask
R-CNN and torchvision), or, with ``scales``, the image is resized by a random factor and cropped or padded to
a square (large-scale jitter: Ghiasi et al., arXiv 2012.07177). This module does not import torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from shoal.decide.rng import Stream, draw, random_keys, uniform
from shoal.errors import UsageError

SIZE_STEP = 32
"""Sides of batches are multiples of it: the coarsest feature map of a ResNet has a stride of 32."""
_RATIOS = (4 / 3, 3 / 2)
"""Of the sides of most photographs."""
_FLIP, _SHORTER, _SCALE, _TOP, _LEFT = range(5)


@dataclass(frozen=True, kw_only=True)
class DetectionAugmentConfig:
    """Augmentation of an image and its objects."""

    shorter: tuple[int, ...] = (800,)
    """Length of the shorter side in pixels; one of several is drawn."""
    longer: int = 1333
    """Limit of the longer side in pixels; the shorter one is reduced if necessary."""
    flip: float = 0.5
    """Probability of a horizontal flip."""
    scales: tuple[float, float] | None = None
    """Smallest and largest factor of large-scale jitter (.1 and 2, say), instead of shorter and longer."""
    canvas: int = 1024
    """Side of the square that large-scale jitter crops or pads to."""

    def __post_init__(self) -> None:
        """Check each field.

        Raises:
            UsageError: a value is out of its range.
        """
        if not self.shorter or min(self.shorter) < 1 or self.longer < 1 or self.canvas < 1:
            raise UsageError(
                f"shorter={self.shorter}, longer={self.longer}, canvas={self.canvas}: each must be at "
                "least 1 pixel"
            )
        if not 0 <= self.flip <= 1:
            raise UsageError(f"flip={self.flip} must be from 0 to 1")
        if self.scales is not None and not 0 < self.scales[0] <= self.scales[1]:
            raise UsageError(f"scales={self.scales} must be two factors above 0, the smaller first")

    @property
    def largest_batch(self) -> tuple[int, int]:
        """Height and width of the largest batch, in pixels."""
        sides = (min(max(self.shorter), self.longer), self.longer)
        if self.scales is not None:
            sides = (self.canvas, self.canvas)
        return in_steps(sides)

    @property
    def canvases(self) -> tuple[tuple[int, int], ...]:
        """Heights and widths of training batches, at most 6: of 4:3, of 3:2 and the largest, wide and tall.

        They are few, since compiled layers have code for each.
        """
        if self.scales is not None:
            return (self.largest_batch,)
        shorter = min(max(self.shorter), self.longer)
        longer = {min(math.ceil(shorter * ratio), self.longer) for ratio in _RATIOS} | {self.longer}
        wide = sorted({in_steps((shorter, each)) for each in longer})
        return tuple(dict.fromkeys([*wide, *((width, height) for height, width in wide)]))


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Geometry of an augmentation: resize, shift, crop or pad to the frame, flip, in this order."""

    resized: tuple[int, int]
    """Height and width of the resized image."""
    top: int
    left: int
    """Offset of the frame in the resized image, in pixels."""
    frame: tuple[int, int]
    """Height and width of the result; pixels beyond the image are padding."""
    flip: bool


def in_steps(sides: tuple[int, int]) -> tuple[int, int]:
    """Return height and width as the least multiples of :data:`SIZE_STEP` that hold ``sides``."""
    height, width = (-(-side // SIZE_STEP) * SIZE_STEP for side in sides)
    return height, width


def placement(
    config: DetectionAugmentConfig, key: tuple[int, int, int], height: int, width: int
) -> Placement:
    """Draw the geometry for an image of ``height`` × ``width``; ``key`` is (seed, epoch, index)."""
    seed, epoch, index = key
    u = uniform(draw(random_keys(seed, Stream.DETECTION_AUGMENTATION, epoch, index), np.arange(5))).tolist()
    flip = u[_FLIP] < config.flip
    if config.scales is None:
        shorter = config.shorter[int(u[_SHORTER] * len(config.shorter))]
        scale = min(shorter / min(height, width), config.longer / max(height, width))
        # plus an epsilon: 480 * (800 / 480) is 799.9999… in floats
        size = (max(1, math.floor(height * scale + 1e-6)), max(1, math.floor(width * scale + 1e-6)))
        return Placement(resized=size, top=0, left=0, frame=size, flip=flip)
    low, high = config.scales
    scale = (low + u[_SCALE] * (high - low)) * config.canvas / max(height, width)
    size = (max(1, round(height * scale)), max(1, round(width * scale)))
    top, left = (
        int(u[n] * (max(side - config.canvas, 0) + 1)) for n, side in zip((_TOP, _LEFT), size, strict=True)
    )
    return Placement(resized=size, top=top, left=left, frame=(config.canvas, config.canvas), flip=flip)
