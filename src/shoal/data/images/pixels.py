"""Mirrors, jitters and normalises the pixels of a crop in one native pass.

The maths are torchvision's for float images (``transforms.v2.functional.adjust_*``): each adjustment is
clamped to the range of a pixel and nothing is rounded in between. (On uint8, torchvision truncates after
every adjustment.) Hue is shifted without sectors: with V the largest channel and C its distance to the
smallest, each channel is V - C·max(0, min(k, 4 - k, 1)), where k = (n + 6·hue) mod 6 and n = 5, 3, 1 for red,
green, blue: the closed form of HSV to RGB.

``finish`` runs ``csrc/image``; tests compare it with the same formula in NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal import native
from shoal.data.images.augment import JITTERS, Jitter
from shoal.errors import UsageError

Pixels = npt.NDArray[np.uint8]
Triple = tuple[float, float, float]


def finish(
    image: Pixels,
    out: npt.NDArray[Any],
    *,
    scale: Triple,
    shift: Triple,
    flip: bool = False,
    jitter: Sequence[tuple[Jitter, float]] = (),
    level: native.Level | None = None,
) -> None:
    """Write ``scale · jittered(image) + shift`` to ``out``; releases the GIL.

    Args:
        image: uint8 ``[H, W, 3]``; rows may be strided (a crop), other strides are copied.
        out: ``[3, H, W]``: float32, uint16 (the bits of bfloat16, to nearest even) or uint8 (rounded to
            nearest, clamped). Channels first, or channels last by its strides.
        scale: for red, green, blue, in units of a pixel from 0 to 255: 1 / (255 · std) normalises.
        shift: added last: -mean / std, and lighting noise / std.
        jitter: adjustments with torchvision's factors, in order.
        level: of the processor's instructions, for tests.

    Raises:
        UsageError: shapes, types or strides are others.
    """
    if image.strides[1:] != (3, 1):
        image = np.ascontiguousarray(image)
    steps = [(JITTERS.index(name), factor) for name, factor in jitter]
    try:
        native.core().finish_image(image, out, steps, scale, shift, flip, level)
    except (ValueError, TypeError) as error:
        raise UsageError(f"finish an image: {str(error).splitlines()[0]}") from None
