"""Resamples masks: from boxes into images (inference), and from images into boxes (training targets)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal import native
from shoal.models.detection.boxes import without_autocast
from shoal.models.detection.operators import has_kernels, project_on_device

_MAX_VALUES = 1 << 26
"""Pixels of masks in memory at once (256 MiB); objects come in groups."""


def paste_bitmaps(
    masks: Tensor,
    boxes: Tensor,
    counts: Sequence[int],
    sizes: Sequence[tuple[int, int]],
    *,
    threshold: float = 0.5,
) -> list[Tensor]:
    """Return the masks of each image, bool ``[counts[b], height, width]``.

    A pixel belongs to the object if the probability there, interpolated between the mask's samples, is above
    the threshold: torchvision's ``paste_masks_in_image(…) > threshold``, up to pixels whose probability
    rounds to the other side in its last bit.

    Args:
        masks: float32 probabilities ``[N, S, S]``, those of the first image first.
        boxes: float32 ``[N, 4]`` in pixels of the images.
        counts: how many masks each image has.
        sizes: height and width of each image.
    """
    image_of = torch.repeat_interleave(torch.tensor(counts, dtype=torch.int64))
    areas = torch.tensor([height * width for height, width in sizes], dtype=torch.int64)
    shapes = torch.tensor(sizes, dtype=torch.int64).reshape(-1, 2)[image_of]
    ends = areas[image_of].cumsum(0)
    if masks.device.type == "cpu" and native.is_built() and masks.dtype == torch.float32:
        flat = torch.zeros(int(ends[-1]) if len(ends) else 0, dtype=torch.uint8)
        native.core().paste_masks(
            masks.detach().contiguous(),
            boxes.detach().contiguous(),
            torch.cat([(ends - areas[image_of])[:, None], shapes], dim=1),
            flat,
            threshold,
            torch.get_num_threads(),
        )
        ends_of = torch.tensor(counts).mul(areas).cumsum(0).tolist()
        return [
            flat[end - n * h * w : end].view(torch.bool).view(n, h, w)
            for end, n, (h, w) in zip(ends_of, counts, sizes, strict=True)
        ]
    height, width = max((h for h, _ in sizes), default=0), max((w for _, w in sizes), default=0)
    pasted = paste_probabilities(masks, boxes, height, width) > threshold
    ends_of = torch.tensor(counts).cumsum(0).tolist()
    return [pasted[end - n : end, :h, :w] for end, n, (h, w) in zip(ends_of, counts, sizes, strict=True)]


def paste_probabilities(masks: Tensor, boxes: Tensor, height: int, width: int) -> Tensor:
    """Return the probabilities ``[N, height, width]`` of masks ``[N, S, S]`` in an image; 0 elsewhere.

    Bilinear interpolation is linear along each axis, so all masks are two products of small matrices with two
    entries a row.
    """
    size = masks.shape[-1]
    scale = (size + 2) / size
    middle, half = (boxes[:, 2:] + boxes[:, :2]) * 0.5, (boxes[:, 2:] - boxes[:, :2]) * 0.5 * scale
    first, last = (middle - half).long(), (middle + half).long()
    lengths = (last - first + 1).clamp(min=1)
    padded = torch.nn.functional.pad(masks, (1, 1, 1, 1))
    columns = _interpolation(first[:, 0], lengths[:, 0], width, size + 2, masks.dtype)
    rows = _interpolation(first[:, 1], lengths[:, 1], height, size + 2, masks.dtype)
    with without_autocast(masks):
        return torch.bmm(rows, torch.bmm(padded, columns.transpose(1, 2)))


def _interpolation(first: Tensor, lengths: Tensor, num_pixels: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return the matrices ``[N, num_pixels, size]`` that stretch ``size`` samples over ``lengths`` pixels.

    Samples and pixels are cells that meet at the ends (``align_corners=False``).
    """
    pixels = torch.arange(num_pixels, device=first.device) - first[:, None]
    inside = (pixels >= 0) & (pixels < lengths[:, None])
    scale = size / lengths[:, None].to(dtype)
    at = (scale * (pixels.to(dtype) + 0.5) - 0.5).clamp(min=0)
    low = at.long().clamp(max=size - 1)
    near_high = (at - low).clamp(max=1)
    matrix = torch.zeros(*at.shape, size, dtype=dtype, device=first.device)
    matrix.scatter_add_(2, low[..., None], (1 - near_high)[..., None])
    matrix.scatter_add_(2, (low + 1).clamp(max=size - 1)[..., None], near_high[..., None])
    return matrix * inside[..., None]


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
    if has_kernels(boxes):
        projected: Tensor = project_on_device(masks, places, images, boxes, sizes, size)
        return projected
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
        with without_autocast(boxes):
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
        column = pixel + shift - first[:, None, None]
        beyond = (column < 0) | (column >= length[:, None, None])
        matrix.scatter_add_(2, column.masked_fill(beyond, most), share * weight)
    return matrix[..., :most]
