"""Boxes x1, y1, x2, y2 in pixels, of all images of a batch at once; ``x1 < x2`` and ``y1 < y2``."""

from __future__ import annotations

import torch
from torch import Tensor


def areas_of(boxes: Tensor) -> Tensor:
    """Return the areas ``[...]`` of boxes ``[..., 4]``."""
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def pairwise_iou(first: Tensor, second: Tensor) -> Tensor:
    """Return the IoU of each of ``first [..., N, 4]`` with each of ``second [..., M, 4]``.

    Leading dimensions broadcast. ``[..., N, M]``, the bits of torchvision's ``box_iou``.
    """
    inter, union = _inter_union(first[..., :, None, :], second[..., None, :, :])
    return inter / union


def giou(first: Tensor, second: Tensor) -> Tensor:
    """Return the generalised IoU ``[...]`` of boxes that correspond, both ``[..., 4]``.

    IoU less the part of the smallest box around both that neither covers (Rezatofighi et al., arXiv
    1902.09630, algorithm 1): in (-1, 1], with a gradient for boxes apart. Pairs: insert dimensions.
    """
    inter, union = _inter_union(first, second)
    low = torch.minimum(first[..., :2], second[..., :2])
    high = torch.maximum(first[..., 2:], second[..., 2:])
    around = (high - low).clamp(min=0).prod(-1)
    return inter / union - (around - union) / around


def giou_loss(predicted: Tensor, wanted: Tensor, eps: float = 1e-7) -> Tensor:
    """Return 1 - GIoU ``[...]`` of boxes that correspond; ``eps`` saves boxes without an area from 0 / 0."""
    inter, union = _inter_union(predicted, wanted)
    low = torch.minimum(predicted[..., :2], wanted[..., :2])
    high = torch.maximum(predicted[..., 2:], wanted[..., 2:])
    around = (high[..., 0] - low[..., 0]) * (high[..., 1] - low[..., 1])
    return 1 - (inter / (union + eps) - (around - union) / (around + eps))


def _inter_union(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    low = torch.maximum(first[..., :2], second[..., :2])
    high = torch.minimum(first[..., 2:], second[..., 2:])
    sides = (high - low).clamp(min=0)
    inter = sides[..., 0] * sides[..., 1]
    return inter, areas_of(first) + areas_of(second) - inter
