"""Proposes boxes that may hold an object and computes the losses of the region proposal network.

Ren et al., arXiv 1506.01497, on the levels of a feature pyramid (Lin et al., arXiv 1612.03144).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.models.detection.boxes import Weights, clipped, decode, encode, rows_of
from shoal.models.detection.matching import BETWEEN, match_boxes, sample_balanced
from shoal.models.detection.suppression import NO_BOX, suppress, top_places

_WEIGHTS: Weights = (1.0, 1.0)
_LEAST_SIDE = 1e-3
_BETA = 1 / 9  # where the smooth L1 loss becomes linear
_MOST_OVERLAP = 0.7  # boxes of one level that overlap a better one by more are suppressed
_HIGH, _LOW = 0.7, 0.3
_POSITIVE_FRACTION = 0.5


@dataclass(frozen=True, kw_only=True)
class Proposals:
    """Boxes that may hold an object, the best first."""

    boxes: Tensor
    """float32 ``[B, P, 4]``."""
    there: Tensor
    """bool ``[B, P]``: false for padding."""


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """The network's output per anchor, levels concatenated."""

    anchors: Tensor
    """float32 ``[A, 4]``."""
    logits: Tensor
    """``[B, A]``: objectness."""
    deltas: Tensor
    """``[B, A, 4]``: of the object's box (:func:`shoal.models.detection.boxes.encode`)."""
    level_counts: Sequence[int]
    """Anchors of each level."""


def predicted(logits: Sequence[Tensor], deltas: Sequence[Tensor], anchors: Tensor) -> Predicted:
    """Concatenate levels of logits ``[B, K, h, w]`` and deltas ``[B, K·4, h, w]``, K anchors per position."""
    flat_logits = [one.permute(0, 2, 3, 1).flatten(1) for one in logits]
    # channels are the coordinates of a position's first anchor, then those of the next
    flat_deltas = [one.permute(0, 2, 3, 1).reshape(len(one), -1, 4) for one in deltas]
    return Predicted(
        anchors=anchors,
        logits=torch.cat(flat_logits, dim=1),
        deltas=torch.cat(flat_deltas, dim=1),
        level_counts=[one.shape[1] for one in flat_logits],
    )


@torch.no_grad()
def propose(predicted: Predicted, sizes: Tensor, *, most_a_level: int, most: int) -> Proposals:
    """Return the best boxes of each image after non-maximum suppression per level.

    Args:
        predicted: the network's output; no gradient flows through the boxes.
        sizes: int64 ``[B, 2]``: height and width of each image.
        most_a_level: candidates per level before suppression.
        most: boxes per image after it.
    """
    places, first = [], 0
    most_a_level = min(most_a_level, max(predicted.level_counts))
    for count in predicted.level_counts:
        best = predicted.logits[:, first : first + count].topk(min(most_a_level, count), dim=1).indices
        places.append(F.pad(best + first, (0, most_a_level - best.shape[1]), value=-1))
        first += count
    levels = torch.stack(places, dim=1)  # [B, L, K]: only boxes of one level compete
    padding, index = levels.flatten(1) < 0, levels.flatten(1).clamp(min=0)
    deltas = rows_of(predicted.deltas, index).float()
    boxes = clipped(decode(deltas, predicted.anchors[index], _WEIGHTS), sizes)
    scores = predicted.logits.gather(1, index).float().sigmoid()
    too_small = ((boxes[..., 2:] - boxes[..., :2]) < _LEAST_SIDE).any(dim=-1)
    scores = scores.masked_fill(too_small | padding, NO_BOX)
    by_level = levels.flatten(0, 1)
    keep = suppress(
        boxes.view(*by_level.shape, 4), scores.view_as(by_level), _MOST_OVERLAP, torch.zeros_like(by_level)
    )
    kept, there = top_places(scores, keep.view_as(scores), most)
    return Proposals(boxes=rows_of(boxes, kept), there=there)


def proposal_losses(
    predicted: Predicted, boxes: Tensor, num_objects: Tensor, keys: Tensor, num_samples: int
) -> dict[str, Tensor]:
    """Return the summed losses of each image's sampled anchors and their number, by torchvision's names.

    Anchors that overlap an object by an IoU of at least .7 are positive, and so is its best one; those that
    overlap all by less than .3 are negative.

    Args:
        predicted: by the network.
        boxes: of the objects, float32 ``[B, M, 4]``, padded.
        num_objects: int64 ``[B]``.
        keys: int64 ``[B]``, of the draws.
        num_samples: anchors of an image, of which half are at most positive.
    """
    matches = match_boxes(boxes, num_objects, predicted.anchors, high=_HIGH, low=_LOW, allow_low_quality=True)
    labels = (matches >= 0).long().masked_fill(matches == BETWEEN, -1)
    sampled = sample_balanced(labels, keys, num_samples=num_samples, positive_fraction=_POSITIVE_FRACTION)
    objectness = F.binary_cross_entropy_with_logits(
        predicted.logits.gather(1, sampled.index).float(),
        sampled.is_positive.float(),
        weight=sampled.there.float(),
        reduction="none",
    )
    index, is_object = (each[:, : sampled.most_positive] for each in (sampled.index, sampled.is_positive))
    anchors = predicted.anchors[index]
    wanted = torch.where(is_object[..., None], rows_of(boxes, matches.gather(1, index)), anchors)
    box = F.smooth_l1_loss(
        rows_of(predicted.deltas, index).float(),
        encode(wanted, anchors, _WEIGHTS),
        beta=_BETA,
        reduction="none",
    )
    return {
        "loss_objectness": objectness.sum(dim=1),
        "loss_rpn_box_reg": (box.sum(dim=2) * is_object).sum(dim=1),
        "count_proposal": sampled.there.sum(dim=1),
    }
