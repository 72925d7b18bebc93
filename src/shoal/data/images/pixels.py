"""Mirrors, jitters and normalises the pixels of a crop in one native pass.

The maths are torchvision's for float images (``transforms.v2.functional.adjust_*``): each adjustment is
clamped to the range of a pixel and nothing is rounded in between. (On uint8, torchvision truncates after
every adjustment.) Hue is shifted without sectors: with V the largest channel and C its distance to the
smallest, each channel is V - C·max(0, min(k, 4 - k, 1)), where k = (n + 6·hue) mod 6 and n = 5, 3, 1 for red,
green, blue: the closed form of HSV to RGB.

``finish`` runs ``csrc/image`` if the extension is built, else the same formula in NumPy, which is also the
reference of the tests.
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
Floats = npt.NDArray[np.float32]
Triple = tuple[float, float, float]

_GREY = (0.2989, 0.587, 0.114)
"""Weights of red, green, blue in the grey image: torchvision's and Pillow's (ITU-R BT.601)."""


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
    if native.is_built():
        if image.strides[1:] != (3, 1):
            image = np.ascontiguousarray(image)
        steps = [(JITTERS.index(name), factor) for name, factor in jitter]
        try:
            native.core().finish_image(image, out, steps, scale, shift, flip, level)
        except (ValueError, TypeError) as error:
            raise UsageError(f"finish an image: {str(error).splitlines()[0]}") from None
        return
    seen = image[:, ::-1] if flip else image
    rgb: Floats = np.ascontiguousarray(seen.transpose(2, 0, 1)).astype(np.float32)
    for name, factor in jitter:
        rgb = _adjusted(rgb, name, factor)
    rgb *= _columns(scale)
    rgb += _columns(shift)
    if out.dtype == np.uint8:
        out[...] = np.rint(rgb.clip(0, 255))
    elif out.dtype == np.uint16:
        bits = rgb.view(np.uint32)
        out[...] = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    else:
        out[...] = rgb


def _adjusted(rgb: Floats, name: Jitter, factor: float) -> Floats:
    """Return float32 ``[3, H, W]``, values from 0 to 255, after one adjustment."""
    if name == "hue":
        return _shift_hue(rgb, factor).clip(0, 255)
    moved: Floats = rgb * np.float32(factor)
    if name != "brightness":
        grey: Floats = np.einsum("c,chw->hw", np.array(_GREY, dtype=np.float32), rgb)
        other = np.full_like(grey, grey.mean(dtype=np.float64)) if name == "contrast" else grey
        moved += other * np.float32(1.0 - factor)
    return moved.clip(0, 255)


def _shift_hue(rgb: Floats, shift: float) -> Floats:
    red, green, blue = rgb
    largest = rgb.max(axis=0)
    chroma = largest - rgb.min(axis=0)
    divisor = np.where(chroma > 0, chroma, np.float32(1))
    sixths = np.where(
        largest == red,
        (green - blue) / divisor,
        np.where(largest == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    sixths += np.float32(6.0 * shift)
    out = np.empty_like(rgb)
    for channel, n in enumerate((5, 3, 1)):
        k = np.mod(sixths + np.float32(n), np.float32(6))
        out[channel] = largest - chroma * np.minimum(k, 4 - k).clip(0, 1)
    return out


def _columns(values: Triple) -> Floats:
    return np.array(values, dtype=np.float32).reshape(3, 1, 1)
