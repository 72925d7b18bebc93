"""Converts an image of a source to the JPEG that a shard stores; keeps its bytes if nothing has to change.

Other formats and CMYK become RGB JPEG, EXIF rotation is applied, and an image whose shorter side is above the
limit is downscaled. Greyscale stays greyscale. Every image is decoded once, at an eighth of its size, which
reads all of its data: a truncated file is found now and not in training.
"""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shoal.data.images.headers import BadImage, open_image
from shoal.errors import UsageError, import_extra

if TYPE_CHECKING:
    from PIL import Image as PillowImage

MAX_IMAGE_BYTES = 1 << 28
"""Limit of the size of a file, which is read into memory as a whole."""

_ORIENTATION = 0x0112  # tag of EXIF (TIFF 6.0, section 8)
_UPRIGHT = 1
_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""Pillow's ``Transpose`` that undoes each orientation, as in its ``exif_transpose``."""
_JPEG_SIDE = 65_500  # libjpeg's limit
_JPEGS = ("JPEG", "MPO")  # MPO: a JPEG with more pictures behind the first, as phones write it


@dataclass(frozen=True, kw_only=True)
class ReencodeConfig:
    """Size and quality of stored images."""

    resize: int = 0
    """Downscale images whose shorter side has more pixels than this, to this; 0 keeps all sizes."""
    quality: int = 90
    """JPEG quality of images that are encoded again, 1 to 95."""

    def __post_init__(self) -> None:
        """Check each field.

        Raises:
            UsageError: a value is out of its range.
        """
        if not (self.resize == 0 or 8 <= self.resize <= 1 << 16):
            raise UsageError(f"resize={self.resize} must be 0 (leave sizes alone) or 8 to 65536 pixels")
        if not 1 <= self.quality <= 95:
            raise UsageError(f"quality={self.quality} must be 1 to 95")


class Encoded(NamedTuple):
    """A JPEG and its size in pixels."""

    jpeg: bytes
    width: int
    height: int


def reencode(data: bytes, config: ReencodeConfig) -> Encoded:
    """Return the JPEG of an image: ``data`` itself if nothing needs to change.

    Raises:
        BadImage: it cannot be decoded, or not completely.
        ShoalError: Pillow is not installed.
    """
    if not data:
        raise BadImage("is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata, which is not used
            return _reencoded(data, config)
    except (BadImage, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001  # OSError, SyntaxError, struct.error, zlib.error, …: each format has its own
        raise BadImage(f"is damaged or cut short ({error or type(error).__name__})") from None


def _reencoded(data: bytes, config: ReencodeConfig) -> Encoded:
    from PIL.Image import Resampling, Transpose

    with open_image(data) as image:
        width, height = image.size
        orientation = _orientation(image)
        small_enough = config.resize == 0 or min(width, height) <= config.resize
        as_it_is = image.format in _JPEGS and image.mode in ("L", "RGB") and orientation == _UPRIGHT
        if as_it_is and small_enough:
            image.draft(image.mode, (1, 1))
            image.load()
            return Encoded(data, width, height)
        image.load()
        pixels = _eight_bits(image)
        if orientation in _TURNS:
            pixels = pixels.transpose(Transpose(_TURNS[orientation]))
        if not small_enough:
            factor = config.resize / min(pixels.size)
            width, height = (max(config.resize, round(side * factor)) for side in pixels.size)
            pixels = pixels.resize((width, height), Resampling.LANCZOS)
        if max(pixels.size) > _JPEG_SIDE:
            raise BadImage(f"is too large for a JPEG: {pixels.width} x {pixels.height} pixels")
        out = io.BytesIO()
        pixels.save(out, "JPEG", quality=config.quality)
        return Encoded(out.getvalue(), *pixels.size)


def check_pillow() -> None:
    """Check that Pillow can be imported.

    Raises:
        ShoalError: it is not installed.
    """
    import_extra("PIL", "vision", "images need Pillow")


def _orientation(image: PillowImage.Image) -> int:
    """Return EXIF's orientation; upright if it is missing or cannot be read (decoders ignore it)."""
    try:
        value = image.getexif().get(_ORIENTATION, _UPRIGHT)
    except Exception:  # noqa: BLE001  # as of a damaged image, above
        return _UPRIGHT
    return value if value in _TURNS else _UPRIGHT


def _eight_bits(image: PillowImage.Image) -> PillowImage.Image:
    """Convert greyscale to ``L`` and all else to ``RGB``; alpha is dropped, as ``ImageFolder`` does."""
    from PIL import Image

    if image.mode == "F":
        raise BadImage("has floating-point pixels, which have no range of their own")
    if image.mode == "I" or image.mode.startswith("I;16"):  # Pillow's own conversion clips instead of scaling
        wide = np.asarray(image)
        if wide.size and (int(wide.min()) < 0 or int(wide.max()) >= 1 << 16):
            raise BadImage("has pixels of more than 16 bits")
        return Image.fromarray((wide >> 8).astype(np.uint8))
    return image.convert("L" if image.mode in ("1", "L", "LA", "La") else "RGB")
