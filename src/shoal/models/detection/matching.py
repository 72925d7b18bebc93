"""Which object does each anchor or proposal belong to? All images of a batch at once."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal import native
from shoal.models.detection.boxes import pairwise_iou

BELOW_LOW = -1
"""The match of an anchor that overlaps no object by ``low``: background."""
BETWEEN = -2
"""The match of an anchor between the thresholds, which training ignores."""

_MAX_PAIRS = 1 << 27
"""So many overlaps are in memory at once on a GPU (512 MiB each of a few temporaries): images in groups."""


def match_boxes(
    objects: Tensor,
    num_objects: Tensor,
    anchors: Tensor,
    *,
    high: float,
    low: float,
    allow_low_quality: bool = False,
) -> Tensor:
    """Return the object of each anchor, int64 ``[B, A]``: its number, :data:`BELOW_LOW` or :data:`BETWEEN`.

    An anchor gets the object with which its IoU is highest, the first of equals, if that is at least
    ``high``; below ``low`` it is background, and between the two it is neither. With ``allow_low_quality`` an
    anchor that is the best of all for some object (each of them where several are) gets the object with which
    its own IoU is highest, however low (Ren et al., arXiv 1506.01497, section 3.1.2; torchvision's
    ``Matcher``). An image without objects is all background.

    Args:
        objects: float32 ``[B, M, 4]``, padded at the end of each image; the padding may hold any numbers.
        num_objects: int64 ``[B]``, how many of them there are.
        anchors: float32 ``[A, 4]`` for all images, or ``[B, A, 4]``.
    """
    anchors = anchors if anchors.dim() == 3 else anchors[None]
    num_images, num_anchors = objects.shape[0], anchors.shape[1]
    if objects.device.type == "cpu" and native.is_built() and objects.dtype == torch.float32:
        matches = torch.empty(num_images, num_anchors, dtype=torch.int64)
        native.core().match_boxes(
            objects.detach().contiguous(),
            num_objects.contiguous(),
            anchors.detach().contiguous(),
            matches,
            high,
            low,
            allow_low_quality,
            torch.get_num_threads(),
        )
        return matches
    if objects.shape[1] == 0:
        return torch.full((num_images, num_anchors), BELOW_LOW, device=objects.device)
    group = max(1, _MAX_PAIRS // max(1, objects.shape[1] * num_anchors))
    anchors = anchors.expand(num_images, -1, -1)
    parts = [slice(n, n + group) for n in range(0, num_images, group)]
    return torch.cat(
        [_match(objects[n], num_objects[n], anchors[n], high, low, allow_low_quality) for n in parts]
    )


def _match(
    objects: Tensor, num_objects: Tensor, anchors: Tensor, high: float, low: float, allow_low_quality: bool
) -> Tensor:
    there = torch.arange(objects.shape[1], device=objects.device) < num_objects[:, None]
    iou = pairwise_iou(objects, anchors).masked_fill(~there[:, :, None], -1.0)
    best, which = iou.max(dim=1)
    matches = torch.where(best < high, BETWEEN, which).masked_fill(best < low, BELOW_LOW)
    if allow_low_quality:
        highest = iou.amax(dim=2, keepdim=True)
        chosen = ((iou == highest) & there[:, :, None]).any(dim=1)
        matches = torch.where(chosen, which, matches)
    return matches
