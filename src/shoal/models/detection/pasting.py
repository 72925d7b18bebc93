"""Masks of a fixed size, such as Mask R-CNN's 28 x 28, put into their images: all of a batch at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal import native


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
