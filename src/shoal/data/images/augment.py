"""Draws the augmentation of a training image, a pure function of (seed, epoch, index of the image).

``draws`` turns a key into the crop, the flip, the factors of the colour jitter and their order, the lighting
noise, the blur and the erased box; ``transform`` applies them. All numbers of an image come from one call of
the counter-based generator (``shoal.decide.rng``), each from a counter of its own, so that every worker,
thread or process makes the same image, and disabling one part changes no other.

Sources: crops by area and aspect ratio, Szegedy et al., "Going deeper with convolutions", 2015, section 6;
lighting noise, Krizhevsky et al., "ImageNet classification with deep convolutional neural networks", 2012,
section 4.1; erasing, Zhong et al., "Random erasing data augmentation", 2017. Ranges, tries and fallbacks are
those of torchvision's ``RandomResizedCrop``, ``ColorJitter`` and ``RandomErasing``.
"""

import math
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

import numpy as np

from shoal.decide.rng import Stream, draw, random_keys, uniform
from shoal.errors import UsageError, require_positive

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

Jitter = Literal["brightness", "contrast", "saturation", "hue"]
JITTERS: tuple[Jitter, ...] = ("brightness", "contrast", "saturation", "hue")

# Square roots of the eigenvalues (for values from 0 to 1) and the eigenvectors (columns) of the covariance of
# ImageNet's RGB values, as the ResNet training code of fb.resnet.torch and MXNet publish them.
_LIGHT_SCALES = np.array([0.2175, 0.0188, 0.0045])
_LIGHT_VECTORS = np.array(
    [[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]]
)
_SIZE_STEP = 32  # a ResNet halves the side five times

_TRIES = 10
# counters of an image's draws; each try of a crop or a box takes two
_CROP, _OFFSET, _FLIP, _ORDER, _FACTORS, _LIGHT, _ERASE, _BOX, _BOX_OFFSET = 0, 20, 22, 23, 24, 28, 32, 33, 53
_BLUR = 55
_COUNTERS = np.arange(57)
_ORDERS = tuple(permutations(range(len(JITTERS))))
_ERASED_AREA, _ERASED_RATIO = (0.02, 0.33), (0.3, 3.3)
_SIGMAS = (0.1, 2.0)  # Chen et al., "A simple framework for contrastive learning", 2020, appendix A


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Augmentation of training images. Colours are jittered as by torchvision's ``ColorJitter``."""

    size: int = 224
    """Side of the square images that are the model's input, in pixels."""
    first_size: int | None = None
    """Progressive resolution: the side in the first epochs; it grows to size by multiples of 32."""
    growth: tuple[float, float] = (0.0, 0.0)
    """Epochs between which the side grows from first_size to size."""
    crop: Literal["resized", "padded"] = "resized"
    """resized: a box of random area and aspect ratio, resized; padded: the image reflected on each side, and
    a box of size from it (for small images, CIFAR)."""
    area: tuple[float, float] = (0.08, 1.0)
    """Area of a resized crop, as a fraction of the image."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Width / height of a resized crop."""
    padding: int = 4
    """Pixels on each side of a padded image."""
    flip: float = 0.5
    """Probability of the mirror image."""
    brightness: float = 0.0
    """Range of the factor: 1 ± this; 0 disables it. The same for contrast and saturation."""
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    """Range of the shift: ± this fraction of the colour circle; at most 0.5."""
    lighting: float = 0.0
    """Standard deviation of the noise along the principal components of ImageNet's colours (AlexNet: 0.1)."""
    blur: float = 0.0
    """Probability of a Gaussian blur with a deviation from 0.1 to 2 pixels, before the jitter of colours."""
    erase: float = 0.0
    """Probability that a random box is overwritten with the mean colour."""
    mean: tuple[float, float, float] = IMAGENET_MEAN
    """Subtracted from red, green, blue (values from 0 to 1)."""
    std: tuple[float, float, float] = IMAGENET_STD
    """Divisor of red, green, blue after the subtraction."""

    def __post_init__(self) -> None:
        require_positive("", self, "size", "first_size")
        if self.first_size is not None and self.crop == "padded":
            raise UsageError("first_size needs crop 'resized': a padded crop has one size; leave it out")
        require_positive("", self, "flip", "blur", "erase", least=0, most=1)
        require_positive("", self, "hue", least=0, most=0.5)
        for name in ("padding", "brightness", "contrast", "saturation", "lighting"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name} {getattr(self, name)} must be finite and at least 0")
        for name, limits, highest in (("area", self.area, 1.0), ("ratio", self.ratio, math.inf)):
            if not (0 < limits[0] <= limits[1] <= highest and math.isfinite(limits[1])):
                rule = "above 0 and at most 1" if name == "area" else "above 0"
                raise UsageError(f"{name} {limits[0]} {limits[1]} must be a range (low, high), {rule}")
        if not 0 <= self.growth[0] <= self.growth[1]:
            raise UsageError(
                f"growth {self.growth[0]} {self.growth[1]} must be epochs (from, to), at least 0"
            )
        check_normalisation(self.mean, self.std)

    @property
    def is_in_bytes(self) -> bool:
        """True if augmentation changes no colours, so that pixels are integers until they are normalised."""
        return not any((self.brightness, self.contrast, self.saturation, self.hue, self.lighting, self.erase))

    def size_at(self, epoch: int) -> int:
        """Return the side of the images of an epoch (from 0), in pixels."""
        begin, end = self.growth
        if self.first_size is None or epoch >= end:
            return self.size
        if epoch <= begin:
            return self.first_size
        side = self.first_size + (self.size - self.first_size) * (epoch - begin) / (end - begin)
        return max(1, round(side / _SIZE_STEP)) * _SIZE_STEP


def check_normalisation(mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    """Check the mean and the deviation of a normalisation.

    Raises:
        UsageError: there are not three of each, a mean is not finite or a deviation not above 0.
    """
    if len(mean) != 3 or not all(map(math.isfinite, mean)):
        raise UsageError(f"mean {mean} must be three finite numbers: red, green, blue, from 0 to 1")
    if len(std) != 3 or not all(0 < value < math.inf for value in std):
        raise UsageError(f"std {std} must be three numbers above 0: red, green, blue")


@dataclass(frozen=True)
class Box:
    """A rectangle of pixels; a padded crop that reaches into the padding has ``top`` or ``left`` below 0."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True)
class Draws:
    """Parameters of the augmentation of one image, in the order of their application.

    Attributes:
        crop: box of the decoded image.
        flip: whether it is mirrored.
        jitter: adjustments of the colours in their order, with torchvision's factors (hue: shift).
        light: added to red, green, blue, for values from 0 to 1.
        blur: deviation of the blur in pixels of the crop; 0: none.
        erased: box of the finished image that gets the mean colour.
    """

    crop: Box
    flip: bool
    jitter: tuple[tuple[Jitter, float], ...]
    light: tuple[float, float, float]
    blur: float
    erased: Box | None


Key = tuple[int, int, int]
"""(seed, epoch, index of the image)."""


def draws(config: AugmentConfig, key: Key, height: int, width: int, size: int) -> Draws:
    """Draw the augmentation of an image of ``height`` × ``width`` pixels to ``size`` × ``size``.

    Raises:
        UsageError: a padded crop does not fit into the image with its padding.
    """
    seed, epoch, index = key
    keys = random_keys(seed, Stream.IMAGE_AUGMENTATION, epoch, index)
    u: list[float] = uniform(draw(keys, _COUNTERS)).tolist()
    if config.crop == "resized":
        crop = _resized_crop(u, height, width, config)
    else:
        crop = _padded_crop(u, height, width, size, config.padding)
    return Draws(
        crop=crop,
        flip=u[_FLIP] < config.flip,
        jitter=_jitter(u, config),
        light=_light(u, config.lighting),
        blur=_between(u[_BLUR + 1], *_SIGMAS) if u[_BLUR] < config.blur else 0.0,
        erased=_erased(u, size) if u[_ERASE] < config.erase else None,
    )


def _between(u: float, low: float, high: float) -> float:
    return low + (high - low) * u


def _sides(
    u_area: float, u_ratio: float, pixels: int, area: tuple[float, float], log_ratio: tuple[float, float]
) -> tuple[int, int]:
    """Return (√(area·ratio), √(area/ratio)) in whole pixels."""
    target, ratio = pixels * _between(u_area, *area), math.exp(_between(u_ratio, *log_ratio))
    return round(math.sqrt(target * ratio)), round(math.sqrt(target / ratio))


def _resized_crop(u: list[float], height: int, width: int, config: AugmentConfig) -> Box:
    lowest, highest = config.ratio
    log_ratio = (math.log(lowest), math.log(highest))
    for at in range(_CROP, _CROP + 2 * _TRIES, 2):
        w, h = _sides(u[at], u[at + 1], height * width, config.area, log_ratio)
        if 0 < w <= width and 0 < h <= height:
            return Box(int(u[_OFFSET] * (height - h + 1)), int(u[_OFFSET + 1] * (width - w + 1)), h, w)
    # none fits: the largest centred box with an allowed ratio
    h, w = height, width
    if width < lowest * height:
        h = round(width / lowest)
    elif width > highest * height:
        w = round(height * highest)
    return Box((height - h) // 2, (width - w) // 2, h, w)


def _padded_crop(u: list[float], height: int, width: int, size: int, padding: int) -> Box:
    spare_rows, spare_columns = height + 2 * padding - size, width + 2 * padding - size
    if min(spare_rows, spare_columns) < 0 or padding >= min(height, width):
        raise UsageError(
            f"a padded crop of {size} × {size} with a padding of {padding} does not fit an image of "
            f"{width} × {height}: the padding must be below its sides, and its sides with it at least the "
            "crop; choose another size or padding, or crop 'resized'"
        )
    top, left = int(u[_OFFSET] * (spare_rows + 1)), int(u[_OFFSET + 1] * (spare_columns + 1))
    return Box(top - padding, left - padding, size, size)


def _jitter(u: list[float], config: AugmentConfig) -> tuple[tuple[Jitter, float], ...]:
    amounts = (config.brightness, config.contrast, config.saturation, config.hue)
    if not any(amounts):
        return ()
    order = _ORDERS[int(u[_ORDER] * len(_ORDERS))]
    return tuple((JITTERS[k], _factor(u[_FACTORS + k], k, amounts[k])) for k in order if amounts[k])


def _factor(u: float, kind: int, amount: float) -> float:
    if JITTERS[kind] == "hue":
        return _between(u, -amount, amount)
    return _between(u, max(0.0, 1.0 - amount), 1.0 + amount)


def _light(u: list[float], deviation: float) -> tuple[float, float, float]:
    if not deviation:
        return (0.0, 0.0, 0.0)
    # Box and Muller, 1958: two normal numbers from two uniform ones; 1 - u is above 0.
    normals = []
    for at in (_LIGHT, _LIGHT + 2):
        radius, angle = math.sqrt(-2.0 * math.log(1.0 - u[at])), 2.0 * math.pi * u[at + 1]
        normals += [radius * math.cos(angle), radius * math.sin(angle)]
    red, green, blue = (_LIGHT_VECTORS @ (_LIGHT_SCALES * deviation * normals[:3])).tolist()
    return (red, green, blue)


def _erased(u: list[float], size: int) -> Box | None:
    lowest, highest = _ERASED_RATIO
    log_ratio = (math.log(lowest), math.log(highest))
    for at in range(_BOX, _BOX + 2 * _TRIES, 2):
        h, w = _sides(u[at], u[at + 1], size * size, _ERASED_AREA, log_ratio)
        if h < size and w < size:
            return Box(int(u[_BOX_OFFSET] * (size - h + 1)), int(u[_BOX_OFFSET + 1] * (size - w + 1)), h, w)
    return None
