"""Matches anchors and proposals to objects and samples those that a loss is computed on.

Both work on all images of a batch at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal import native
from shoal.dropout import fold_in
from shoal.models.detection.boxes import pairwise_iou
from shoal.models.detection.operators import has_kernels, match_on_device

BELOW_LOW = -1
"""The match of an anchor that overlaps no object by ``low``: background."""
BETWEEN = -2
"""The match of an anchor between the thresholds, which training ignores."""

_MAX_PAIRS = 1 << 27
"""Overlaps in memory at once on a GPU (512 MiB for each of a few temporaries); images come in groups."""
_PRIORITY_BITS = (1 << 62) - 1
"""Leaves the largest int64 above all priorities."""


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

    An anchor gets the object with the highest IoU (the first of equals on a CPU, any of them on a GPU) if
    that is at least ``high``; below ``low`` it is background, and in between it is ignored. With
    ``allow_low_quality``, an anchor with the highest IoU of all anchors for some object (every such anchor on
    a tie) gets the object that it overlaps most, however little (Ren et al., arXiv 1506.01497, section 3.1.2;
    torchvision's ``Matcher``). An image without objects is all background.

    Args:
        objects: float32 ``[B, M, 4]``, padded at the end of each image; the padding may hold any numbers.
        num_objects: int64 ``[B]``, how many of them there are.
        anchors: float32 ``[A, 4]`` for all images, or ``[B, A, 4]``.
    """
    anchors = anchors if anchors.dim() == 3 else anchors[None]
    if has_kernels(objects):
        matches: Tensor = match_on_device(objects, num_objects, anchors, high, low, allow_low_quality)
        return matches
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


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Drawn anchors or regions of each image, in slots whose number does not depend on the draw.

    The positives have the first slots, then come the negatives, then slots that hold nothing.
    """

    index: Tensor
    """int64 ``[B, S]``; any number where there is none."""
    there: Tensor
    """bool ``[B, S]``."""
    is_positive: Tensor
    """bool ``[B, S]``."""
    most_positive: int
    """Slots that may hold a positive, so the first ones."""


def sample_balanced(labels: Tensor, keys: Tensor, *, num_samples: int, positive_fraction: float) -> Samples:
    """Sample positives and negatives.

    Each image gives at most ``num_samples * positive_fraction`` positives (rounded down), and negatives until
    there are ``num_samples``. The choice depends on the image's key, not on the rest of the batch.

    Args:
        labels: ``[B, A]``: 1 and above positive, 0 negative, below 0 neither.
        keys: int64 ``[B]``, a key an image: :func:`shoal.decide.rng.random_keys` of (seed, epoch, image),
            viewed as signed.
    """
    num_slots = min(num_samples, labels.shape[1])
    most_positive = min(int(num_samples * positive_fraction), num_slots)
    places = torch.arange(labels.shape[1], device=labels.device)
    priority = (fold_in(keys[:, None], places) >> 2) & _PRIORITY_BITS
    positives, num_positives = _lowest(priority, labels >= 1, most_positive)
    negatives, num_negatives = _lowest(priority, labels == 0, num_slots)
    slot = torch.arange(num_slots, device=labels.device)
    is_positive = slot < num_positives
    positives = F.pad(positives, (0, num_slots - most_positive))
    index = torch.where(is_positive, positives, negatives.gather(1, (slot - num_positives).clamp(min=0)))
    return Samples(
        index=index,
        there=slot < num_positives + num_negatives,
        is_positive=is_positive,
        most_positive=most_positive,
    )


def _lowest(priority: Tensor, members: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return the ``most`` members with the lowest priorities, and how many of them there are ``[B, 1]``."""
    nobody = torch.iinfo(torch.int64).max
    best = priority.masked_fill(~members, nobody).topk(most, dim=1, largest=False).indices
    return best, members.sum(dim=1, keepdim=True).clamp(max=most)
