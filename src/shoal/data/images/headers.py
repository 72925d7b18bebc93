"""Checks the format and the size in the header of an encoded image before it is decoded.

A few bytes can declare an image that fills the memory. Pillow gets a list of formats: it has some forty,
which it chooses by the content of a file and not by its name, and one of them runs Ghostscript.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from shoal.atomic_io import is_pointer

if TYPE_CHECKING:
    from PIL import Image as PillowImage

FORMATS = ("JPEG", "PNG", "GIF", "BMP", "PPM", "TIFF", "WEBP")
"""Pillow's names of the formats whose suffixes ``folder`` recognises."""
MAX_PIXELS = (1 << 30) // 12
"""Limit of what is decoded. Pillow has the same limit, but only warns up to twice as many."""
JPEG_BEGIN = b"\xff\xd8"

_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SCAN, _END = 0xDA, 0xD9
_NO_SEGMENT = frozenset({0x00, 0x01, *range(0xD0, 0xD8)})
"""Markers without a segment; 0 is not a marker."""


class BadImage(Exception):
    """Raised for bytes that are not a whole image; the message is the reason."""


def open_image(data: bytes | bytearray | memoryview) -> PillowImage.Image:
    """Open an image with Pillow, which reads its header only.

    Raises:
        BadImage: it has none of ``FORMATS``, or more than ``MAX_PIXELS``.
        OSError: or another of Pillow's errors: the header is damaged.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        if is_pointer(bytes(data[:64])):
            raise BadImage("is the pointer of Git LFS to the image; get it: git lfs pull") from None
        raise BadImage(f"is not an image of a known format ({', '.join(FORMATS)})") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_many_pixels() from None
    check_pixels(*image.size)
    return image


def check_pixels(width: int, height: int) -> None:
    """Check the size that a header declares.

    Raises:
        BadImage: it is more than ``MAX_PIXELS``.
    """
    if width * height > MAX_PIXELS:
        raise _too_many_pixels()


def check_jpeg(data: bytes | bytearray) -> None:
    """Check the size in the frame header of a JPEG (ITU-T T.81, B.2.2), faster than Pillow would.

    Markers are found as libjpeg finds them, which decodes the image afterwards.

    Raises:
        BadImage: there is no frame header, or it declares more than ``MAX_PIXELS``.
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
