"""Draws the objects of an image: their boxes, masks, names and scores."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO

import numpy as np
import numpy.typing as npt

from shoal.data.images.pixels import Pixels
from shoal.data.images.reencode import check_pillow

Colour = tuple[int, int, int]

MASK_OPACITY = 0.45
_GOLDEN = 0.6180339887
"""Steps of this part of the circle of hues keep any number of them apart."""
_GREY = (0.299, 0.587, 0.114)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Label, text, box and mask of an object to draw."""

    label: int
    """Decides the colour, from 1."""
    text: str
    box: tuple[float, float, float, float]
    """x1, y1, x2, y2 in pixels."""
    mask: npt.NDArray[np.bool_] | None
    """``[H, W]``, of the whole picture; ``None``: only the box is drawn."""


def colour_of(label: int) -> Colour:
    """Return the red, green and blue of a label, the same in every picture."""
    red, green, blue = colorsys.hsv_to_rgb(label * _GOLDEN % 1.0, 0.8, 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)


def line_width(height: int, width: int) -> int:
    """Return the width of the lines of boxes in pixels, inwards from their edge."""
    return max(1, round(min(height, width) / 250))


def drawn(pixels: Pixels, objects: Sequence[Drawn]) -> Pixels:
    """Return a copy of a picture ``[H, W, 3]`` with ``objects``, later ones on earlier ones, texts on all.

    Raises:
        ShoalError: Pillow is not installed.
    """
    check_pillow()
    from PIL import Image, ImageDraw, ImageFont

    height, width, _ = pixels.shape
    mixed = pixels.astype(np.float32)
    for one in objects:
        if one.mask is not None:
            colour = np.array(colour_of(one.label), dtype=np.float32)
            mixed[one.mask] += MASK_OPACITY * (colour - mixed[one.mask])
    picture = Image.fromarray(np.rint(mixed).astype(np.uint8))
    pen, line = ImageDraw.Draw(picture), line_width(height, width)
    font = ImageFont.load_default(size=max(10, round(min(height, width) / 30)))
    for one in objects:
        pen.rectangle(_edges(one, height, width), outline=colour_of(one.label), width=line)
    for one in objects:
        left, top, _, _ = _edges(one, height, width)
        x1, y1, x2, y2 = pen.textbbox((0, 0), one.text, font=font)
        text_width, text_height = round(x2 - x1) + 2 * line, round(y2 - y1) + 2 * line
        left = max(0, min(left, width - text_width))
        top = top - text_height if top >= text_height else top  # above the box where there is room
        pen.rectangle((left, top, left + text_width - 1, top + text_height - 1), fill=colour_of(one.label))
        ink = "black" if np.dot(_GREY, colour_of(one.label)) > 128 else "white"
        pen.text((left + line - x1, top + line - y1), one.text, fill=ink, font=font)
    return np.array(picture)


def png(pixels: Pixels) -> bytes:
    """Return a picture as a PNG file."""
    from PIL import Image

    out = BytesIO()
    Image.fromarray(pixels).save(out, format="PNG")
    return out.getvalue()


def _edges(one: Drawn, height: int, width: int) -> tuple[int, int, int, int]:
    """Return the first and last column and row that a box covers at least half of, at least one of each."""
    x1, y1, x2, y2 = one.box
    left, top = min(max(round(x1), 0), width - 1), min(max(round(y1), 0), height - 1)
    right, bottom = min(max(round(x2) - 1, left), width - 1), min(max(round(y2) - 1, top), height - 1)
    return left, top, right, bottom
