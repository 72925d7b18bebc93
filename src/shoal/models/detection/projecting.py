"""The masks of objects as a network learns them: seen through the window of a proposal, at a fixed size."""

from __future__ import annotations

import torch
from torch import Tensor

_MAX_VALUES = 1 << 26
"""So many pixels of masks are in memory at once (256 MiB): objects in groups."""


def project_masks(
    masks: Tensor, places: Tensor, images: Tensor, boxes: Tensor, sizes: Tensor, size: int
) -> Tensor:
    """Return the part of the image in ``boxes`` of one mask each, float32 ``[N, size, size]`` from 0 to 1.

    Each value is the mean of bilinear samples, at least one a pixel: torchvision's ``roi_align`` of the whole
    bitmap with its own number of samples. It is linear along each axis, so all masks are two products of
    matrices, and only the part of a mask that is not 0 takes part.

    Args:
        masks: uint8 ``[B, P]``: bitmaps, row by row.
        places: int64 ``[N, 5]`` of one mask each: where it begins, first row, first column, height, width.
        images: int64 ``[N]``: whose mask.
        boxes: float32 ``[N, 4]`` in pixels of the image.
        sizes: int64 ``[N, 2]``: height and width of the image.
        size: of the result, in pixels.
    """
    out = boxes.new_empty(len(boxes), size, size)
    if not len(boxes):
        return out
    height, width = places[:, 3:].amax(dim=0).tolist()
    finest = int((boxes[:, 2:] - boxes[:, :2]).amax().clamp(min=1).div(size).ceil())
    group = max(1, _MAX_VALUES // max(1, height * width))
    for first in range(0, len(boxes), group):
        part = slice(first, first + group)
        start, top, left, *shape = places[part].unbind(1)
        x1, y1, x2, y2 = boxes[part].unbind(1)
        rows = _means(y1, y2, top, shape[0], sizes[part, 0], size, height, finest)
        columns = _means(x1, x2, left, shape[1], sizes[part, 1], size, width, finest)
        row, column = (torch.arange(n, device=masks.device) for n in (height, width))
        at = start[:, None, None] + row[:, None] * shape[1][:, None, None] + column
        bits = masks[images[part][:, None, None], at.clamp(max=masks.shape[1] - 1)].to(boxes.dtype)
        out[part] = rows @ bits @ columns.transpose(1, 2)
    return out


def _means(
    low: Tensor, high: Tensor, first: Tensor, length: Tensor, limit: Tensor, size: int, most: int, finest: int
) -> Tensor:
    """Return the matrices ``[N, size, most]`` that make ``size`` means of samples of a mask, along one axis.

    The window is from ``low`` to ``high`` of an image of ``limit`` pixels, of which the mask holds ``length``
    from ``first`` on. Samples beyond the first or last pixel's middle have its value.
    """
    cell = (high - low).clamp(min=1) / size
    counts = ((high - low).clamp(min=1) / size).ceil()
    number = torch.arange(finest, device=low.device)
    inside = (number + 0.5) / counts[:, None]
    cells = torch.arange(size, device=low.device)[:, None] + inside[:, None]
    at = low[:, None, None] + cells * cell[:, None, None]
    end = limit[:, None, None]
    weight = ((number < counts[:, None])[:, None] & (at >= -1) & (at <= end)) / counts[:, None, None]
    at = at.clamp(min=0)
    pixel = torch.minimum(at.long(), end - 1)
    near_next = torch.where(pixel < end - 1, at - pixel, 0.0)
    matrix = low.new_zeros(len(low), size, most + 1)  # the last column takes what lies beyond the mask
    for shift, share in ((0, 1 - near_next), (1, near_next)):
        place = pixel + shift - first[:, None, None]
        beyond = (place < 0) | (place >= length[:, None, None])
        matrix.scatter_add_(2, place.masked_fill(beyond, most), share * weight)
    return matrix[..., :most]
