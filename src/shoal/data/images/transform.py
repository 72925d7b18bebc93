"""Turns encoded images into inputs of a model: decode, crop and resize, then one pass over the pixels.

Decoding and resizing are torchvision's (libjpeg-turbo; torch's vectorised resize of uint8 with antialiasing,
on channels-last pixels), the pass is in ``pixels``. All three release the GIL, so threads of one process work
in parallel. Only the crop is resized. Both transforms are called as ``transform(encoded, out, key)``, are
picklable, and write to ``out`` of any side: that of ``size_at(epoch)`` for progressive resolution.

Measured on COCO's images (640 × 480, 154 kB, one core): decoding takes 1.8 ms with torchvision, 2.0 with
Pillow, and still 1.7 with Pillow's ``draft``, which reconstructs half the size only: most of the time goes
into entropy decoding, which has no shortcut.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shoal.data.images.augment import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    AugmentConfig,
    Box,
    Key,
    check_normalisation,
    draws,
)
from shoal.data.images.headers import JPEG_BEGIN, BadImage, check_jpeg, open_image
from shoal.data.images.pixels import Pixels, Triple, finish
from shoal.errors import ShoalError, UsageError, import_extra

Encoded = bytes | bytearray | memoryview
Output = npt.NDArray[Any]


class TrainTransform:
    """Decodes and augments training images by their keys (``augment``)."""

    def __init__(self, config: AugmentConfig) -> None:
        """Augment as ``config`` describes.

        Raises:
            ShoalError: torchvision is not installed.
        """
        _torchvision()
        self.config = config
        self._scale, self._shift = normalisation(config.mean, config.std)

    def size_at(self, epoch: int) -> int:
        """Return the side of the images of an epoch, in pixels."""
        return self.config.size_at(epoch)

    def __call__(self, encoded: Encoded, out: Output, key: Key) -> None:
        """Write the image of ``key`` = (seed, epoch, index) to ``out`` ``[3, S, S]``.

        ``out`` is float32, uint16 (the bits of bfloat16), both normalised, or uint8 (as decoded, for
        a model that normalises); channels first, or channels last by its strides.

        Raises:
            ShoalError: the bytes are not an image, or one that was cut short.
            UsageError: a padded crop does not fit the image.
        """
        pixels = decode(encoded)
        height, width, _ = pixels.shape
        size = out.shape[1]
        drawn = draws(self.config, key, height, width, size)
        if self.config.crop == "padded":
            pixels = _mirrored_crop(pixels, drawn.crop)
        else:
            pixels = resized(pixels, drawn.crop, size, size)
        if drawn.blur:
            pixels = blurred(pixels, drawn.blur)
        scale, shift = IDENTITY if out.dtype == np.uint8 else (self._scale, self._shift)
        red, green, blue = (s + 255.0 * k * x for s, k, x in zip(shift, scale, drawn.light, strict=True))
        finish(pixels, out, scale=scale, shift=(red, green, blue), flip=drawn.flip, jitter=drawn.jitter)
        if (box := drawn.erased) is not None:
            mean = np.rint(np.multiply(self.config.mean, 255.0)) if out.dtype == np.uint8 else np.zeros(3)
            out[:, box.top : box.top + box.height, box.left : box.left + box.width] = mean[:, None, None]


class CentreTransform:
    """Decodes validation images and crops the square at their centre."""

    def __init__(
        self,
        size: int = 224,
        resize: int | None = 256,
        *,
        fraction: float | None = None,
        mean: Triple = IMAGENET_MEAN,
        std: Triple = IMAGENET_STD,
    ) -> None:
        """Choose the size of the crop.

        Args:
            size: side of the images in pixels.
            resize: the shorter side is resized to this, then ``size`` pixels are cropped at the centre.
            fraction: instead (with ``resize=None``): this fraction of the shorter side is cropped at the
                centre and resized to ``size``; .875 is 224 of 256.
            mean: of red, green and blue, for values from 0 to 1.
            std: the same for the standard deviation.

        Raises:
            UsageError: a value is out of its range.
            ShoalError: torchvision is not installed.
        """
        _torchvision()
        check_normalisation(mean, std)
        if (resize is None) == (fraction is None):
            raise UsageError(f"resize {resize} and fraction {fraction}: give one of the two")
        if size < 1 or (resize is not None and resize < size):
            raise UsageError(f"size {size} must be at least 1 and at most resize, {resize}")
        if fraction is not None and not 0 < fraction <= 1:
            raise UsageError(f"fraction {fraction} must be above 0 and at most 1")
        self.size, self.resize, self.fraction = size, resize, fraction
        self._scale, self._shift = normalisation(mean, std)

    def size_at(self, epoch: int) -> int:
        """Return the side of the images, in pixels: the same in every epoch."""
        return self.size

    def __call__(self, encoded: Encoded, out: Output, key: Key | None = None) -> None:
        """Write the image to ``out`` ``[3, size, size]`` as ``TrainTransform`` does; nothing is drawn.

        Raises:
            ShoalError: the bytes are not an image, or one that was cut short.
        """
        pixels = decode(encoded)
        height, width, _ = pixels.shape
        if self.resize is not None:
            shorter, longer = self.resize, int(self.resize * max(height, width) / min(height, width))
            height, width = (longer, shorter) if width <= height else (shorter, longer)
            top, left = _half(height - self.size), _half(width - self.size)
            pixels = resized(pixels, None, height, width)[top : top + self.size, left : left + self.size]
        else:
            assert self.fraction is not None
            side = max(1, round(self.fraction * min(height, width)))
            box = Box(_half(height - side), _half(width - side), side, side)
            pixels = resized(pixels, box, self.size, self.size)
        scale, shift = IDENTITY if out.dtype == np.uint8 else (self._scale, self._shift)
        finish(pixels, out, scale=scale, shift=shift)


IDENTITY: tuple[Triple, Triple] = ((1.0, 1.0, 1.0), (0.0, 0.0, 0.0))


def normalisation(mean: Triple, std: Triple) -> tuple[Triple, Triple]:
    """Return (scale, shift) of pixels from 0 to 255, so that scale · x + shift = (x / 255 - mean) / std."""
    (a, b, c), (d, e, f) = std, mean
    return (1 / (255 * a), 1 / (255 * b), 1 / (255 * c)), (-d / a, -e / b, -f / c)


def decode(encoded: Encoded) -> Pixels:
    """Return the pixels of an image, uint8 ``[H, W, 3]``; grey and CMYK become RGB.

    A JPEG, as shards hold them, is decoded by torchvision; other formats (``headers.FORMATS``) by Pillow.

    Raises:
        ShoalError: the bytes are not an image, one that was cut short, or one of too many pixels.
    """
    if not len(encoded):
        raise ShoalError("not an image: it has no bytes")
    try:
        return (_jpeg_decoder() if encoded[:2] == JPEG_BEGIN else _with_pillow)(encoded)
    except BadImage as error:
        raise ShoalError(f"not an image that can be decoded: it {error}") from None
    except _UNDECODABLE as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ShoalError(f"not an image that can be decoded: {reason}") from None


_UNDECODABLE = (RuntimeError, ValueError, OSError, SyntaxError, EOFError)
"""Errors that torch's operators and Pillow raise."""


@cache
def _jpeg_decoder() -> Callable[[Encoded], Pixels]:
    _torchvision()
    # torchvision 0.29 warns at each call of its decoders that it will drop them. The operator below them does
    # not warn, and is a tenth faster than Pillow, which takes over where there is none.
    return _with_torchvision if hasattr(torch.ops.image, "decode_image") else _with_pillow


def _with_torchvision(encoded: Encoded) -> Pixels:
    # bytearray: torch warns of memory that it must not write, and 100 kB are copied in 5 us.
    data = bytearray(encoded)
    check_jpeg(data)
    image: torch.Tensor = torch.ops.image.decode_image(torch.frombuffer(data, dtype=torch.uint8), _RGB, False)
    pixels: Pixels = image.movedim(-3, -1).numpy()
    return pixels


_RGB = 3  # torchvision.io.ImageReadMode.RGB


def _with_pillow(encoded: Encoded) -> Pixels:
    with open_image(encoded) as image:
        # A JPEG with more pictures behind the first (MPO) is that first one.
        if image.format != "MPO" and getattr(image, "is_animated", False):
            raise BadImage("is not a single image: it has several frames")
        return np.array(image.convert("RGB"))


def resized(pixels: Pixels, box: Box | None, height: int, width: int) -> Pixels:
    """Resize a box of an image (or all of it), bilinearly with antialiasing; return uint8 ``[H, W, 3]``."""
    if box is not None:
        pixels = pixels[box.top : box.top + box.height, box.left : box.left + box.width]
    if pixels.shape[:2] == (height, width):
        return pixels
    # torch resizes dense channels-last pixels fastest; copying the crop is cheaper than a strided resize
    dense = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)
    small: torch.Tensor = _torchvision().resize_image(dense, [height, width], antialias=True)
    smaller: Pixels = small.permute(1, 2, 0).numpy()
    return smaller


def blurred(pixels: Pixels, deviation: float) -> Pixels:
    """Blur an image, uint8 ``[H, W, 3]``, with a Gaussian of ``deviation`` pixels; borders are mirrored."""
    radius = min(math.ceil(3 * deviation), *(side - 1 for side in pixels.shape[:2]))
    planes = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)
    width = 2 * radius + 1
    smooth: torch.Tensor = _torchvision().gaussian_blur_image(planes, [width, width], [deviation, deviation])
    smoother: Pixels = smooth.permute(1, 2, 0).numpy()
    return smoother


def _half(pixels: int) -> int:
    return round(pixels / 2)  # to even, as torchvision's centre crop


def _mirrored_crop(pixels: Pixels, box: Box) -> Pixels:
    """Return a box that may reach beyond the image, which is reflected there (edge pixels are not
    repeated)."""
    indices = []
    for begin, count, side in zip(
        (box.top, box.left), (box.height, box.width), pixels.shape[:2], strict=True
    ):
        at = np.abs(np.arange(begin, begin + count))
        indices.append(np.minimum(at, 2 * (side - 1) - at))
    crop: Pixels = pixels[indices[0][:, None], indices[1]]
    return crop


@cache
def _torchvision() -> Any:
    """Return torchvision's functions of images; importing them also loads its decoders."""
    return import_extra("torchvision.transforms.v2.functional", "vision", "images are decoded by torchvision")
