"""Computes the second stage: pools regions from the feature pyramid, classifies and refines them.

What is pooled are the rows of one tensor: index of the image, then x1, y1, x2, y2 in its pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.errors import import_extra
from shoal.models.detection.boxes import Weights, clipped, decode, encode, rows_of
from shoal.models.detection.config import MaskRCNNConfig
from shoal.models.detection.matching import BELOW_LOW, match_boxes, sample_balanced
from shoal.models.detection.operators import has_kernels, pool_on_device
from shoal.models.detection.proposals import Proposals
from shoal.models.detection.suppression import NO_BOX, suppress, top_places

_WEIGHTS: Weights = (10.0, 5.0)
_BETA = 1 / 9
_SAMPLES = 2  # bilinear samples of a pooled value, along each axis
_LEAST_SIDE = 1e-2
_USUAL_SIDE, _USUAL_LEVEL = 224, 4  # a box as large as ImageNet's images belongs to the level of stride 16
_FIRST_LEVEL = 2  # of stride 4
_SAME_OBJECT = 0.5  # IoU from which on a region has the label of an object, or of a better detection
POSITIVE_FRACTION = 0.25


@cache
def torchvision() -> Any:
    """Return the package, with its detectors and operations.

    Raises:
        ShoalError: it is not installed.
    """
    return import_extra("torchvision", "vision", "detectors need torchvision")


def pool(pyramid: Sequence[Tensor], regions: Tensor, size: int) -> Tensor:
    """Return the features ``[N, C, size, size]`` of regions ``[N, 5]``.

    The levels have strides 4, 8, …. Each region is pooled from the level of its size (Lin et al., arXiv
    1612.03144, equation 1). Regions stay float32: bf16 has 8 bits for a position among hundreds of pixels.
    """
    areas = (regions[:, 3] - regions[:, 1]) * (regions[:, 4] - regions[:, 2])
    level_of = torch.floor(_USUAL_LEVEL + torch.log2(areas.sqrt() / _USUAL_SIDE) + 1e-6)
    level_of = level_of.clamp(_FIRST_LEVEL, _FIRST_LEVEL + len(pyramid) - 1) - _FIRST_LEVEL
    if has_kernels(regions):
        on_device: Tensor = pool_on_device(pyramid, regions, level_of.long(), size, 1 << _FIRST_LEVEL)
        return on_device
    out = regions.new_zeros(len(regions), pyramid[0].shape[1], size, size)
    for level, features in enumerate(pyramid):
        chosen = (level_of == level).nonzero()[:, 0]
        scale = 1 / (1 << (_FIRST_LEVEL + level))
        pooled = torchvision().ops.roi_align(
            features.float(), regions[chosen], size, spatial_scale=scale, sampling_ratio=_SAMPLES
        )
        out[chosen] = pooled
    return out


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Regions of each image to learn from, in slots whose number does not depend on the draw."""

    boxes: Tensor
    """float32 ``[B, S, 4]``; a pixel in the corner where there is none."""
    there: Tensor
    """bool ``[B, S]``."""
    labels: Tensor
    """int64 ``[B, S]``; 0: background."""
    objects: Tensor
    """int64 ``[B, S]``: index of the object in its image; arbitrary for background."""
    most_positive: int
    """Slots that may hold a region with an object, so the first ones."""

    @property
    def positives(self) -> Sampled:
        """The slots that may hold an object."""
        first = slice(self.most_positive)
        return Sampled(
            boxes=self.boxes[:, first],
            there=self.there[:, first] & (self.labels[:, first] > 0),
            labels=self.labels[:, first],
            objects=self.objects[:, first],
            most_positive=self.most_positive,
        )


@torch.no_grad()
def sample_regions(
    proposals: Proposals, boxes: Tensor, labels: Tensor, num_objects: Tensor, keys: Tensor, num_samples: int
) -> Sampled:
    """Sample regions from the proposals and the objects' own boxes, image by image.

    Args:
        proposals: of each image.
        boxes: of the objects, float32 ``[B, M, 4]``, padded, with ``labels [B, M]`` and ``num_objects [B]``.
        keys: int64 ``[B]``, of the random choice.
        num_samples: regions per image, of which a quarter hold an object at most.
    """
    candidates = torch.cat([proposals.boxes, boxes], dim=1)
    is_object = torch.arange(boxes.shape[1], device=boxes.device) < num_objects[:, None]
    there = torch.cat([proposals.there, is_object], dim=1)
    matches = match_boxes(boxes, num_objects, candidates, high=_SAME_OBJECT, low=_SAME_OBJECT)
    objects = matches.clamp(min=0)
    label = labels.gather(1, objects).masked_fill(matches == BELOW_LOW, 0).masked_fill(~there, -1)
    sampled = sample_balanced(label, keys, num_samples=num_samples, positive_fraction=POSITIVE_FRACTION)
    pixel = (torch.arange(4, device=boxes.device) > 1).to(boxes.dtype)
    return Sampled(
        boxes=torch.where(sampled.there[..., None], rows_of(candidates, sampled.index), pixel),
        there=sampled.there,
        labels=label.gather(1, sampled.index).masked_fill(~sampled.there, 0),
        objects=objects.gather(1, sampled.index),
        most_positive=sampled.most_positive,
    )


def region_losses(
    logits: Tensor, deltas: Tensor, sampled: Sampled, boxes: Tensor, config: MaskRCNNConfig
) -> dict[str, Tensor]:
    """Return the summed losses of each image and the number of its sampled regions, by torchvision's names.

    A box is learnt for the class of its object only.

    Args:
        logits: ``[B·S, C]`` of classes, background first.
        deltas: ``[B·S, C·4]`` of boxes per class.
        sampled: the regions.
        boxes: of the objects, ``[B, M, 4]``.
        config: its ``box_loss`` ``giou`` compares the boxes themselves, ``smooth_l1`` their deltas.
    """
    classifier = F.cross_entropy(
        logits.float(), sampled.labels.flatten(), label_smoothing=config.label_smoothing, reduction="none"
    )
    positives = sampled.positives
    by_class = deltas.view(*sampled.labels.shape, -1, 4)[:, : sampled.most_positive]
    label = positives.labels[..., None, None].expand(-1, -1, 1, 4)
    predicted = by_class.gather(2, label)[:, :, 0].float()
    wanted = torch.where(positives.there[..., None], rows_of(boxes, positives.objects), positives.boxes)
    if config.box_loss == "giou":
        box = torchvision().ops.generalized_box_iou_loss(decode(predicted, positives.boxes, _WEIGHTS), wanted)
    else:
        targets = encode(wanted, positives.boxes, _WEIGHTS)
        box = F.smooth_l1_loss(predicted, targets, beta=_BETA, reduction="none").sum(dim=2)
    return {
        "loss_classifier": (classifier.view_as(sampled.there) * sampled.there).sum(dim=1),
        "loss_box_reg": (box * positives.there).sum(dim=1),
        "count_region": sampled.there.sum(dim=1),
    }


@torch.no_grad()
def detect(
    logits: Tensor, deltas: Tensor, proposals: Proposals, sizes: Tensor, config: MaskRCNNConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the best boxes, suppressed by class, from logits ``[B·P, C]`` and deltas ``[B·P, C·4]``.

    They are the index of the image, boxes ``[N, 4]``, scores and labels, those of the first image first, the
    best of each first.
    """
    num_images, num_boxes = proposals.there.shape
    scores = logits.float().softmax(dim=-1)[:, 1:].reshape(num_images, num_boxes, -1)
    scores = scores.masked_fill(~proposals.there[..., None], 0.0).flatten(1)
    candidates = scores > config.least_score
    count = int(candidates.sum(dim=1).amax())
    ranked = scores.masked_fill(~candidates, NO_BOX).sort(dim=1, descending=True, stable=True)
    scores, index = ranked.values[:, :count], ranked.indices[:, :count]
    num_classes = logits.shape[1] - 1
    box, label = index // num_classes, index % num_classes + 1
    image = torch.arange(num_images, device=index.device)[:, None]
    chosen = deltas.view(num_images, num_boxes, -1, 4)[image, box, label].float()
    boxes = clipped(decode(chosen, proposals.boxes[image, box], _WEIGHTS), sizes)
    too_small = ((boxes[..., 2:] - boxes[..., :2]) < _LEAST_SIDE).any(dim=-1)
    scores = scores.masked_fill(too_small, NO_BOX)
    kept, there = top_places(scores, suppress(boxes, scores, _SAME_OBJECT, label), config.detections)
    row, rank = there.nonzero(as_tuple=True)
    at = row, kept[row, rank]
    return row, boxes[at], scores[at], label[at]
