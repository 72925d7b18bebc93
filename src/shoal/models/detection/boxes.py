"""Compares boxes, encodes them relative to anchors, and cuts them at images.

A box is x1, y1, x2, y2 in pixels with ``x1 < x2`` and ``y1 < y2``. All functions take the boxes of a batch.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager

import torch
from torch import Tensor

Weights = tuple[float, float]
"""Factors of the shifts and of the growths of a box."""

_MAX_GROWTH = math.log(1000 / 16)
"""torchvision's limit before the exponential, which keeps it finite."""


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context in which products of ``tensor`` keep its dtype.

    Detectors run inside autocast, which would round masks and geometry to the 8 bits of bfloat16.
    """
    return torch.autocast(tensor.device.type, enabled=False)


def pairwise_iou(first: Tensor, second: Tensor) -> Tensor:
    """Return the IoU of each of ``first [..., N, 4]`` with each of ``second [..., M, 4]``.

    Leading dimensions broadcast. The result ``[..., N, M]`` has the bits of torchvision's ``box_iou``.
    """
    first, second = first[..., :, None, :], second[..., None, :, :]
    low = torch.maximum(first[..., :2], second[..., :2])
    high = torch.minimum(first[..., 2:], second[..., 2:])
    sides = (high - low).clamp(min=0)
    inter = sides[..., 0] * sides[..., 1]
    return inter / (_areas(first) + _areas(second) - inter)


def _areas(boxes: Tensor) -> Tensor:
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def encode(boxes: Tensor, anchors: Tensor, weights: Weights) -> Tensor:
    """Return the deltas ``[..., 4]`` from anchors to boxes; leading dimensions broadcast.

    dx, dy are the shift of the centre in widths and heights, dw, dh the logarithms of the growth (Girshick
    et al., arXiv 1311.2524, appendix C), times ``weights``, which bring them to one magnitude.
    """
    low, high = anchors[..., :2], anchors[..., 2:]
    sides, centres = high - low, low + 0.5 * (high - low)
    wanted_sides = boxes[..., 2:] - boxes[..., :2]
    wanted_centres = boxes[..., :2] + 0.5 * wanted_sides
    shifts = weights[0] * (wanted_centres - centres) / sides
    return torch.cat([shifts, weights[1] * torch.log(wanted_sides / sides)], dim=-1)


def decode(deltas: Tensor, anchors: Tensor, weights: Weights) -> Tensor:
    """Return the boxes ``[..., 4]`` of deltas from anchors: the inverse of :func:`encode`."""
    anchors = anchors.to(deltas.dtype)
    sides = anchors[..., 2:] - anchors[..., :2]
    centres = anchors[..., :2] + 0.5 * sides
    shifts, growth = deltas[..., :2] / weights[0], (deltas[..., 2:] / weights[1]).clamp(max=_MAX_GROWTH)
    centres, half = shifts * sides + centres, 0.5 * (growth.exp() * sides)
    return torch.cat([centres - half, centres + half], dim=-1)


def clipped(boxes: Tensor, sizes: Tensor) -> Tensor:
    """Return boxes ``[B, ..., 4]`` cut at the borders of images of ``sizes [B, 2]``, height and width."""
    limits = sizes.flip(1).repeat(1, 2).to(boxes.dtype)
    limits = limits.view(len(sizes), *[1] * (boxes.dim() - 2), 4)
    return torch.minimum(boxes.clamp(min=0), limits)


def rows_of(values: Tensor, index: Tensor) -> Tensor:
    """Return the rows ``index [B, N]`` of ``values [B, M, K]``; an index below 0 is that of the first."""
    return values.gather(1, index.clamp(min=0)[..., None].expand(-1, -1, values.shape[2]))
