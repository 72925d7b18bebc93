"""Boxes as a network predicts them: shifts and scales relative to an anchor or a proposal.

dx, dy are the shift of the centre in widths and heights, dw, dh the logarithms of the growth (Girshick et
al., arXiv 1311.2524, appendix C), times weights that bring them to one magnitude.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Weights = tuple[float, float, float, float]

_MOST_GROWTH = math.log(1000 / 16)  # before the exponential, so that it stays finite: torchvision's limit


def encode(boxes: Tensor, anchors: Tensor, weights: Weights) -> Tensor:
    """Return the deltas ``[..., 4]`` that lead from anchors to boxes; leading dimensions broadcast."""
    low, high = anchors[..., :2], anchors[..., 2:]
    sides, centres = high - low, low + 0.5 * (high - low)
    wanted_sides = boxes[..., 2:] - boxes[..., :2]
    wanted_centres = boxes[..., :2] + 0.5 * wanted_sides
    scale = torch.tensor(weights, dtype=boxes.dtype, device=boxes.device)
    shifts = scale[:2] * (wanted_centres - centres) / sides
    return torch.cat([shifts, scale[2:] * torch.log(wanted_sides / sides)], dim=-1)


def decode(deltas: Tensor, anchors: Tensor, weights: Weights) -> Tensor:
    """Return the boxes ``[..., 4]`` to which deltas lead from anchors; leading dimensions broadcast."""
    anchors = anchors.to(deltas.dtype)
    sides = anchors[..., 2:] - anchors[..., :2]
    centres = anchors[..., :2] + 0.5 * sides
    scale = torch.tensor(weights, dtype=deltas.dtype, device=deltas.device)
    shifts, growth = deltas[..., :2] / scale[:2], (deltas[..., 2:] / scale[2:]).clamp(max=_MOST_GROWTH)
    centres, half = shifts * sides + centres, 0.5 * (growth.exp() * sides)
    return torch.cat([centres - half, centres + half], dim=-1)


def clipped(boxes: Tensor, sizes: Tensor) -> Tensor:
    """Return boxes ``[B, ..., 4]`` cut at images of ``sizes [B, 2]``: height and width."""
    limits = sizes.flip(1).repeat(1, 2).to(boxes.dtype)
    limits = limits.view(len(sizes), *[1] * (boxes.dim() - 2), 4)
    return torch.minimum(boxes.clamp(min=0), limits)
