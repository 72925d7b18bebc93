"""Suppresses boxes that overlap better ones, for all images, levels and classes of a batch at once."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal import native
from shoal.models.detection.boxes import pairwise_iou, without_autocast
from shoal.models.detection.operators import box_overlaps, has_kernels, keep_boxes

NO_BOX = float("-inf")
"""Score of padding."""

_MAX_PAIRS = 1 << 28
"""Pairs of boxes in memory at once on a GPU (512 MiB); more groups come in parts."""
_MAX_OVERLAPS = 1 << 24
"""Overlaps computed at once on a GPU (64 MiB for each of about ten temporaries)."""
_ROUNDS_A_CHECK = 4
"""Waiting for the GPU costs more than another round."""


def suppress(boxes: Tensor, scores: Tensor, iou_threshold: float, classes: Tensor) -> Tensor:
    """Return true for the boxes to keep, bool ``[G, N]``.

    A box is dropped if a kept box of the same group and class has a higher score (on a tie, a lower index)
    and an IoU with it above the threshold. Per group and class this keeps the boxes of torchvision's ``nms``.
    Groups are images, or the levels of all images.

    Args:
        boxes: float32 ``[G, N, 4]``.
        scores: float32 ``[G, N]``, :data:`NO_BOX` for padding.
        classes: int64 ``[G, N]``.
    """
    if boxes.device.type == "cpu" and native.is_built() and boxes.dtype == torch.float32:
        keep = torch.empty(scores.shape, dtype=torch.uint8)
        native.core().suppress_boxes(
            boxes.detach().contiguous(),
            scores.detach().float().contiguous(),
            classes.contiguous(),
            keep,
            iou_threshold,
            torch.get_num_threads(),
        )
        return keep.view(torch.bool)
    order = scores.sort(dim=1, descending=True, stable=True).indices
    boxes = boxes.gather(1, order[..., None].expand_as(boxes))
    classes = classes.gather(1, order)
    there = scores.gather(1, order) > NO_BOX
    if has_kernels(boxes):
        keep = keep_boxes(box_overlaps(boxes, classes, iou_threshold), there)
        return torch.zeros_like(keep).scatter(1, order, keep)
    group = max(1, _MAX_PAIRS // max(1, scores.shape[1] ** 2))
    parts = [
        _suppress_sorted(boxes[n : n + group], there[n : n + group], classes[n : n + group], iou_threshold)
        for n in range(0, len(boxes), group)
    ]
    keep = torch.cat(parts) if parts else there
    return torch.zeros_like(keep).scatter(1, order, keep)


def _suppress_sorted(boxes: Tensor, there: Tensor, classes: Tensor, iou_threshold: float) -> Tensor:
    """Compute greedy suppression as the fixed point of "kept, unless a kept box before it overlaps it".

    After n rounds the first n boxes are final. The number of rounds is the length of the longest chain of
    boxes that overlap the next, usually a few (Zheng et al., "Cluster-NMS", arXiv 2005.03572, proposition 1).
    """
    over = _overlaps(boxes, classes, iou_threshold)
    keep = there
    with without_autocast(boxes):
        for round_ in range(1, boxes.shape[1] + 1):
            # "any" as a matrix product of 0 and 1, which is above 0 whatever the precision
            hit = torch.bmm(keep[:, None].to(over.dtype), over)[:, 0] > 0
            after = there & ~hit
            if round_ % _ROUNDS_A_CHECK == 0 and torch.equal(after, keep):
                break
            keep = after
    return keep


def _overlaps(boxes: Tensor, classes: Tensor, iou_threshold: float) -> Tensor:
    """Return 1 where a box overlaps a later one of its class by more than the threshold, ``[G, N, N]``.

    It is computed some rows at a time: the overlaps of 20,000 boxes take 3.2 GB for each temporary.
    """
    groups, count = classes.shape
    over = boxes.new_empty(groups, count, count, dtype=torch.bfloat16 if boxes.is_cuda else torch.float32)
    rows = max(1, _MAX_OVERLAPS // max(1, groups * count))
    for first in range(0, count, rows):
        part = slice(first, first + rows)
        is_over = pairwise_iou(boxes[:, part], boxes) > iou_threshold
        is_over &= classes[:, part, None] == classes[:, None]
        over[:, part] = is_over.triu(first + 1)
    return over


def top_places(scores: Tensor, keep: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the indices ``[G, K]`` of the kept boxes with the highest scores, and which hold a box.

    ``K`` is ``count``, or ``N`` if that is less. The best come first, ties in order.
    """
    ranked = scores.masked_fill(~keep, NO_BOX).sort(dim=1, descending=True, stable=True)
    count = min(count, scores.shape[1])
    return ranked.indices[:, :count], ranked.values[:, :count] > NO_BOX
