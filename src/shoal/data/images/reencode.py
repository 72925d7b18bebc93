"""Converts an image to the form that a shard stores; keeps the bytes of a JPEG, PNG or WebP if it can.

EXIF rotation is applied, unless the annotations of an image are for its stored size. An image whose shorter
side is above the limit is downscaled, and other formats, numbers of bits and channels become RGB or greyscale
of 8 bits. What has to be encoded again becomes a JPEG if it was one, else a PNG, whose pixels are the same.
Every image is decoded once, a JPEG at an eighth of its size, which reads all of its data: a truncated file is
found now and not in training.
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
_QUARTER_TURNS = frozenset({5, 6, 7, 8})
"""Orientations that exchange width and height."""
_JPEGS = ("JPEG", "MPO")  # MPO: a JPEG with more pictures behind the first, as phones write it
_SUFFIXES = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}
"""Formats that are stored, and the suffixes of their members."""


@dataclass(frozen=True, kw_only=True)
class ReencodeConfig:
    """Size and quality of stored images."""

    resize: int = 0
    """Downscale images whose shorter side has more pixels than this, to this; 0 keeps all sizes."""
    quality: int = 90
    """JPEG quality of JPEGs that are encoded again, 1 to 95; other formats lose nothing."""

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
    """A JPEG, PNG or WebP, its size in pixels and its suffix."""

    data: bytes
    width: int
    height: int
    suffix: str


def reencode(data: bytes, config: ReencodeConfig, annotated_size: tuple[int, int] | None = None) -> Encoded:
    """Return an image as a shard stores it: ``data`` itself if nothing needs to change.

    Args:
        annotated_size: width and height that annotations are for. The image is turned as EXIF says only if
            they are those of the turned image and not of the stored one.

    Raises:
        BadImage: it cannot be decoded, or not completely, or its annotations are for another size.
        ShoalError: Pillow is not installed.
    """
    if not data:
        raise BadImage("is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata, which is not used
            return _reencoded(data, config, annotated_size)
    except (BadImage, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001  # OSError, SyntaxError, struct.error, zlib.error, …: each format has its own
        raise BadImage(f"is damaged or cut short ({error or type(error).__name__})") from None


def _reencoded(data: bytes, config: ReencodeConfig, annotated_size: tuple[int, int] | None) -> Encoded:
    from PIL.Image import Resampling, Transpose

    with open_image(data) as image:
        width, height = image.size
        orientation = _orientation(image)
        if annotated_size is not None:
            orientation = _annotated_orientation(orientation, image.size, annotated_size)
        small_enough = config.resize == 0 or min(width, height) <= config.resize
        is_jpeg = image.format in _JPEGS
        is_one = is_jpeg or not getattr(image, "is_animated", False)
        as_it_is = image.format in _SUFFIXES and image.mode in ("L", "RGB") and orientation == _UPRIGHT
        if as_it_is and is_one and small_enough:
            image.draft(image.mode, (1, 1))  # of a JPEG; nothing is lost in others
            image.load()
            return Encoded(data, width, height, _SUFFIXES[str(image.format)])
        image.load()
        pixels = _eight_bits(image)
        if orientation in _TURNS:
            pixels = pixels.transpose(Transpose(_TURNS[orientation]))
        if not small_enough:
            factor = config.resize / min(pixels.size)
            width, height = (max(config.resize, round(side * factor)) for side in pixels.size)
            pixels = pixels.resize((width, height), Resampling.LANCZOS)
        form, out = "JPEG" if is_jpeg else "PNG", io.BytesIO()
        pixels.info.clear()  # profiles, transparency and a rotation that is done
        pixels.save(out, form, quality=config.quality)
        return Encoded(out.getvalue(), *pixels.size, _SUFFIXES[form])


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


def _annotated_orientation(orientation: int, stored: tuple[int, int], annotated: tuple[int, int]) -> int:
    """Return the orientation to undo, so that the image has the size that its annotations are for.

    Raises:
        BadImage: it has that size neither as stored nor turned.
    """
    if annotated == stored:
        return _UPRIGHT
    if annotated == stored[::-1] and orientation in _QUARTER_TURNS:
        return orientation
    raise BadImage(
        f"has {stored[0]} x {stored[1]} pixels, but its annotations are for {annotated[0]} x {annotated[1]}"
    )


def is_ambiguous(data: bytes, annotated_size: tuple[int, int]) -> bool:
    """Return whether the size of its annotations does not tell if they are for the image as EXIF turns it."""
    with open_image(data) as image:
        orientation = _orientation(image)
        turned = image.size[::-1] if orientation in _QUARTER_TURNS else image.size
        return orientation != _UPRIGHT and image.size == turned == annotated_size


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
