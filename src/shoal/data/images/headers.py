"""The header of an encoded image: which format it has, and how many pixels it will be.

Nothing is decoded before that is known, because a few bytes can announce an image that fills the memory.
Pillow is asked by a list of formats: it has some forty, told apart by what a file holds and not by its name,
and one of them runs Ghostscript.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image as PillowImage

FORMATS = ("JPEG", "PNG", "GIF", "BMP", "PPM", "TIFF", "WEBP")
"""As Pillow calls them: those of the suffixes that ``folder`` takes for images."""
MAX_PIXELS = (1 << 30) // 12
"""An image of more pixels is not decoded. Pillow has the same limit, but only warns up to twice as many."""
JPEG_BEGIN = b"\xff\xd8"

_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SCAN, _END = 0xDA, 0xD9
_NO_SEGMENT = frozenset({0x00, 0x01, *range(0xD0, 0xD8)})
"""Markers that nothing belongs to; 0 is no marker."""


class BadImage(Exception):
    """The bytes are not a whole image; the text says why."""


def open_image(data: bytes | bytearray | memoryview) -> PillowImage.Image:
    """Return an image of which Pillow has read the header only.

    Raises:
        BadImage: it has none of ``FORMATS``, or more than ``MAX_PIXELS``.
        OSError: and others: the header is damaged.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise BadImage(f"is not an image of a known format ({', '.join(FORMATS)})") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_many_pixels() from None
    check_pixels(*image.size)
    return image


def check_pixels(width: int, height: int) -> None:
    """Check the size that a header announces.

    Raises:
        BadImage: it is more than ``MAX_PIXELS``.
    """
    if width * height > MAX_PIXELS:
        raise _too_many_pixels()


def check_jpeg(data: bytes | bytearray) -> None:
    """Check the size of a JPEG by its frame header (ITU-T T.81, B.2.2), sooner than Pillow would.

    Markers are found as libjpeg finds them, which then decodes what was checked here.

    Raises:
        BadImage: there is no frame header, or it announces more than ``MAX_PIXELS``.
    """
    at = len(JPEG_BEGIN)
    while 0 <= (at := data.find(b"\xff", at)) <= len(data) - 9:
        marker = data[at + 1]
        if marker in _FRAMES:
            return check_pixels(
                width=int.from_bytes(data[at + 7 : at + 9]), height=int.from_bytes(data[at + 5 : at + 7])
            )
        if marker in (_SCAN, _END):
            break
        if marker == 0xFF:
            at += 1
        elif marker in _NO_SEGMENT:
            at += 2
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4])
    raise BadImage("is damaged or cut short (a JPEG without a frame header)")


def _too_many_pixels() -> BadImage:
    return BadImage(f"has more than {MAX_PIXELS:,} pixels")
