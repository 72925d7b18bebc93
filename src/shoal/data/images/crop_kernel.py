# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
"""Crops, resizes, mirrors, lights, normalises and erases a batch of images on a GPU in one Triton kernel.

Resizing is torch's bilinear interpolation with antialiasing, rounded to whole pixels; both axes at once.

Only :mod:`shoal.data.images.gpu` calls this module, and loads it when it is needed first.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.data.images.augment import Box, Draws

_PIXELS = tl.constexpr(256)
"""Pixels of a program."""
_TO_INTEGER = tl.constexpr(12582912.0)
"""1.5 · 2**23: added and subtracted, it rounds a float to the nearest integer, halves to even."""
_COLUMNS = tl.constexpr(11)
"""Numbers about an image: address, strides and sides of its crop, mirrored or not, erased box."""


def augmented(
    images: Sequence[Tensor], drawn: Sequence[Draws], out: Tensor, scale: Tensor, shift: Tensor
) -> None:
    """Write images to ``out [B, 3, S, S]``: as ``drawn`` says, then times ``scale`` plus ``shift``.

    Args:
        images: uint8 ``[3, H, W]`` each, on the device.
        drawn: augmentation of each; its crop lies within the image.
        out: of any floating type and layout, on the device.
        scale: float32 ``[3]``, on the device, as is ``shift``.
    """
    rows = []
    for image, one in zip(images, drawn, strict=True):
        top, left, height, width = _numbers(one.crop)
        crop = image[:, top : top + height, left : left + width]
        erased = (0, 0, 0, 0) if one.erased is None else _numbers(one.erased)
        rows.append([crop.data_ptr(), *crop.stride(), height, width, int(one.flip), *erased])
    table = _moved(torch.tensor(rows, dtype=torch.int64), out.device)
    light = _moved(torch.tensor([one.light for one in drawn]) * 255.0, out.device)
    size = out.shape[-1]
    with torch.cuda.device_of(out):
        _augment[(triton.cdiv(size**2, _PIXELS.value), len(rows))](
            table, light, out, scale, shift, *out.stride(), SIZE=size
        )


def _numbers(box: Box) -> tuple[int, int, int, int]:
    return box.top, box.left, box.height, box.width


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the device; the host does not wait for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@triton.jit
def _reach(length, SIZE: tl.constexpr):
    """Return the scale along an axis, and how many pixels to each side have a weight."""
    scale = length.to(tl.float32) / SIZE
    return scale, tl.maximum(scale, 1.0)


@triton.jit
def _first(position, scale, reach):
    """Return the first pixel of the crop that a pixel of the result is a mean of."""
    return tl.maximum(scale * (position + 0.5) - reach + 0.5, 0.0).to(tl.int32)


@triton.jit
def _weight(pixel, position, scale, reach, length):
    """Return the weight of a pixel of the crop, before all weights are divided by their sum."""
    centre = scale * (position + 0.5)
    last = tl.minimum((centre + reach + 0.5).to(tl.int32), length)
    return tl.where(pixel < last, tl.maximum(1.0 - tl.abs((pixel - centre + 0.5) / reach), 0.0), 0.0)


@triton.jit
def _augment(
    table, light, out, scale, shift, stride_b, stride_c, stride_h, stride_w, SIZE: tl.constexpr
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    pixel = tl.program_id(0) * _PIXELS + tl.arange(0, _PIXELS)
    y, x = pixel // SIZE, pixel % SIZE
    about = table + row * _COLUMNS
    crop = tl.load(about).to(tl.pointer_type(tl.uint8))
    crop_c, crop_h, crop_w = tl.load(about + 1), tl.load(about + 2), tl.load(about + 3)
    height, width = tl.load(about + 4).to(tl.int32), tl.load(about + 5).to(tl.int32)
    column = tl.where(tl.load(about + 6) != 0, SIZE - 1 - x, x)
    scale_y, reach_y = _reach(height, SIZE)
    scale_x, reach_x = _reach(width, SIZE)
    first_y, first_x = _first(y, scale_y, reach_y), _first(column, scale_x, reach_x)
    red = tl.zeros((_PIXELS,), tl.float32)
    green = tl.zeros((_PIXELS,), tl.float32)
    blue = tl.zeros((_PIXELS,), tl.float32)
    total = tl.zeros((_PIXELS,), tl.float32)
    for down in range(0, (2 * reach_y).to(tl.int32) + 2):
        weight_y = _weight(first_y + down, y, scale_y, reach_y, height)
        for right in range(0, (2 * reach_x).to(tl.int32) + 2):
            weight = weight_y * _weight(first_x + right, column, scale_x, reach_x, width)
            at = crop + (first_y + down) * crop_h + (first_x + right) * crop_w
            there = (weight > 0) & (pixel < SIZE * SIZE)
            red += weight * tl.load(at, mask=there, other=0).to(tl.float32)
            green += weight * tl.load(at + crop_c, mask=there, other=0).to(tl.float32)
            blue += weight * tl.load(at + 2 * crop_c, mask=there, other=0).to(tl.float32)
            total += weight
    top, left = tl.load(about + 7), tl.load(about + 8)
    bottom, end = top + tl.load(about + 9), left + tl.load(about + 10)
    is_erased = (y >= top) & (y < bottom) & (x >= left) & (x < end)
    to = out + row * stride_b + y * stride_h + x * stride_w
    for channel in tl.static_range(3):
        value = red if channel == 0 else (green if channel == 1 else blue)
        value = tl.minimum(tl.maximum((value / total + _TO_INTEGER) - _TO_INTEGER, 0.0), 255.0)
        value = value + tl.load(light + row * 3 + channel)
        value = value * tl.load(scale + channel) + tl.load(shift + channel)
        tl.store(to + channel * stride_c, tl.where(is_erased, 0.0, value), mask=pixel < SIZE * SIZE)
