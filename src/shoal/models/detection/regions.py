"""Computes the second stage: pools regions from the feature pyramid, classifies and refines them.

The regions of all images are the rows of one tensor: index of the image, then x1, y1, x2, y2 in its pixels.
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
from shoal.models.detection.boxes import Weights, clipped, decode, encode
from shoal.models.detection.config import MaskRCNNConfig
from shoal.models.detection.matching import BELOW_LOW, match_boxes, sample_balanced
from shoal.models.detection.proposals import Proposals
from shoal.models.detection.suppression import NO_BOX, suppress, top_places

_WEIGHTS: Weights = (10.0, 10.0, 5.0, 5.0)
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
    """Regions to learn from, and the object of each."""

    regions: Tensor
    """float32 ``[N, 5]``."""
    labels: Tensor
    """int64 ``[N]``; 0: background."""
    objects: Tensor
    """int64 ``[N]``: index of the object in its image; arbitrary for background."""


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
    positive, negative = sample_balanced(
        label, keys, num_samples=num_samples, positive_fraction=POSITIVE_FRACTION
    )
    image, index = (positive | negative).nonzero(as_tuple=True)
    regions = torch.cat([image[:, None].to(candidates.dtype), candidates[image, index]], dim=1)
    return Sampled(regions=regions, labels=label[image, index], objects=objects[image, index])


def region_losses(
    logits: Tensor, deltas: Tensor, sampled: Sampled, boxes: Tensor, config: MaskRCNNConfig
) -> dict[str, Tensor]:
    """Return the summed losses of each image and the number of its sampled regions, by torchvision's names.

    A box is learnt for the class of its object only.

    Args:
        logits: ``[N, C]`` of classes, background first.
        deltas: ``[N, C·4]`` of boxes per class.
        sampled: the N regions.
        boxes: of the objects, ``[B, M, 4]``.
        config: its ``box_loss`` ``giou`` compares the boxes themselves, ``smooth_l1`` their deltas.
    """
    classifier = F.cross_entropy(
        logits.float(), sampled.labels, label_smoothing=config.label_smoothing, reduction="none"
    )
    rows = (sampled.labels > 0).nonzero()[:, 0]
    image = sampled.regions[:, 0].long()
    predicted = deltas.view(len(deltas), -1, 4)[rows, sampled.labels[rows]].float()
    regions, wanted = sampled.regions[rows], boxes[image[rows], sampled.objects[rows]]
    if config.box_loss == "giou":
        box = torchvision().ops.generalized_box_iou_loss(decode(predicted, regions[:, 1:], _WEIGHTS), wanted)
    else:
        targets = encode(wanted, regions[:, 1:], _WEIGHTS)
        box = F.smooth_l1_loss(predicted, targets, beta=_BETA, reduction="none").sum(dim=1)
    return {
        "loss_classifier": sum_by_image(classifier, image, len(boxes)),
        "loss_box_reg": sum_by_image(box, image[rows], len(boxes)),
        "count_region": torch.bincount(image, minlength=len(boxes)),
    }


def sum_by_image(values: Tensor, image: Tensor, num_images: int) -> Tensor:
    """Return the sums ``[num_images]`` of ``values [N]`` over the rows of each image."""
    return values.new_zeros(num_images).index_add(0, image, values)


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
