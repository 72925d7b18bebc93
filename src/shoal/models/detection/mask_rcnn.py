"""Mask R-CNN (He et al., arXiv 1703.06870) on a ResNet with a feature pyramid, whole batches at a time.

Without its mask head (``MaskRCNNConfig.masks``) it is Faster R-CNN (Ren et al., arXiv 1506.01497).

The network is torchvision's, with its names of parameters, so either side loads the other's weights; what
happens between its layers (matching, sampling, suppression, targets) is this package's, on padded batches.
With the same weights and the same samples, losses and detections are torchvision's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from shoal.dropout import fold_in
from shoal.errors import ShoalError, UsageError, did_you_mean
from shoal.models.detection.boxes import rows_of
from shoal.models.detection.config import MaskRCNNConfig
from shoal.models.detection.masks import paste_bitmaps, project_masks
from shoal.models.detection.operators import has_kernels
from shoal.models.detection.proposals import Predicted, predicted, proposal_losses, propose
from shoal.models.detection.regions import (
    POSITIVE_FRACTION,
    Sampled,
    detect,
    pool,
    region_losses,
    sample_regions,
    torchvision,
)

_BOX_SIZE, _MASK_SIZE = 7, 14  # of features pooled from the pyramid
_ANCHOR_RATIOS = (0.5, 1.0, 2.0)


@dataclass(frozen=True, kw_only=True)
class Detections:
    """Objects found in the images of a batch."""

    boxes: Tensor
    """float32 ``[N, 4]``, in pixels of the images, those of the first image first, the best of each first."""
    scores: Tensor
    """float32 ``[N]``."""
    labels: Tensor
    """int64 ``[N]``, from 1."""
    masks: Tensor | None
    """float32 ``[N, 28, 28]``: probabilities within the box; ``None`` of a network without masks."""
    counts: list[int]
    """Detections per image."""

    def scaled(self, sizes: Tensor, wanted: Tensor) -> Tensor:
        """Return the boxes in images of other sizes; both int64 ``[B, 2]``, height and width."""
        ratios = (wanted.float() / sizes.float()).flip(1).repeat(1, 2).to(self.boxes.device)
        counts = torch.tensor(self.counts, device=self.boxes.device)
        return self.boxes * ratios.repeat_interleave(counts, dim=0)

    def bitmaps(self, boxes: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Return each image's masks, bool ``[counts[b], height, width]``; ``boxes`` are ``scaled`` to it.

        Without masks there is none.
        """
        return [] if self.masks is None else paste_bitmaps(self.masks, boxes, self.counts, sizes)


class MaskRCNN(nn.Module):
    """Mask R-CNN for ``num_classes`` classes, labelled from 1; 0 is background."""

    def __init__(self, config: MaskRCNNConfig, num_classes: int) -> None:
        """Draw new weights from torch's generator.

        Raises:
            ShoalError: torchvision is not installed.
        """
        super().__init__()
        whole = _new_parts(config, num_classes + 1)
        self.config = config
        self.backbone, self.rpn, self.roi_heads = whole.backbone, whole.rpn, whole.roi_heads

    def forward(self, images: Tensor, targets: Mapping[str, Tensor], keys: Tensor) -> dict[str, Tensor]:
        """Return the summed losses of each image and their counts, all ``[B]``.

        The mean over images of each image's mean loss does not depend on the division into workers and
        micro-batches, without communication; with one image per worker it is torchvision's loss. The keys are
        torchvision's names of losses (``loss_objectness``, ``loss_rpn_box_reg``, ``loss_classifier``,
        ``loss_box_reg``, ``loss_mask``) and ``count_proposal``, ``count_region``, ``count_mask``: anchors,
        regions, and pixels of masks. A network without masks has no ``loss_mask`` and ``count_mask``.

        Args:
            images: normalised ``[B, 3, H, W]``, padded at the bottom and on the right.
            targets: ``sizes``, ``boxes``, ``labels``, ``num_objects``, ``masks``, ``mask_places`` as
                ``shoal.data.coco.reader.DetectionReader.batch`` says.
            keys: int64 ``[B]``: decide which anchors and regions are sampled.
        """
        config, boxes, counts = self.config, targets["boxes"], targets["num_objects"]
        if not boxes.shape[1]:  # a batch without objects: there is none to count, but a row to index
            boxes = boxes.new_zeros(len(boxes), 1, 4)
            targets = {
                **targets,
                "labels": counts.new_zeros(len(boxes), 1),
                "mask_places": counts.new_zeros(len(boxes), 1, 5),
            }
        pyramid, predicted = self._first_stage(images)
        first = proposal_losses(predicted, boxes, counts, fold_in(keys, 0), config.proposal_samples)
        proposals = propose(
            predicted, targets["sizes"], most_a_level=config.proposals_a_level, most=config.proposals
        )
        sampled = sample_regions(
            proposals, boxes, targets["labels"], counts, fold_in(keys, 1), config.region_samples
        )
        row = torch.arange(len(images), device=images.device)[:, None]
        classified = self._classify(pyramid, _regions(row, sampled.boxes))
        second = region_losses(*classified, sampled, boxes, config)
        third = self._mask_loss(pyramid, sampled, targets) if config.masks else {}
        return {**first, **second, **third}

    @torch.no_grad()
    def detect(self, images: Tensor, sizes: Tensor) -> Detections:
        """Detect objects in ``images`` (as for ``forward``) of ``sizes [B, 2]``, height and width."""
        config = self.config
        pyramid, predicted = self._first_stage(images)
        proposals = propose(predicted, sizes, most_a_level=config.proposals_used, most=config.proposals_used)
        row = torch.arange(len(images), device=images.device)[:, None]
        classified = self._classify(pyramid, _regions(row, proposals.boxes))
        image, boxes, scores, labels = detect(*classified, proposals, sizes, config)
        masks = None
        if config.masks:
            masks = self._mask_logits(pyramid, _regions(image, boxes), labels).sigmoid()
        counts = torch.bincount(image, minlength=len(images)).tolist()
        return Detections(boxes=boxes, scores=scores, labels=labels, masks=masks, counts=counts)

    def _first_stage(self, images: Tensor) -> tuple[list[Tensor], Predicted]:
        """Return the levels of the pyramid that regions are pooled from, and the output per anchor."""
        levels = list(self.backbone(images).values())
        logits, deltas = self.rpn.head(levels)
        generator, shapes = self.rpn.anchor_generator, [level.shape[2:] for level in levels]
        generator.set_cell_anchors(torch.float32, images.device)
        height, width = images.shape[2:]
        strides = [(height // rows, width // columns) for rows, columns in shapes]
        anchors = torch.cat(generator.grid_anchors(shapes, strides))
        return levels[:-1], predicted(logits, deltas, anchors)

    def _classify(self, pyramid: list[Tensor], regions: Tensor) -> tuple[Tensor, Tensor]:
        heads = self.roi_heads
        logits, deltas = heads.box_predictor(heads.box_head(pool(pyramid, regions, _BOX_SIZE)))
        return logits, deltas

    def _mask_logits(self, pyramid: list[Tensor], regions: Tensor, labels: Tensor) -> Tensor:
        """Return the mask logits ``[N, 28, 28]`` of regions ``[N, 5]`` for their labels ``[N]``."""
        heads = self.roi_heads
        logits = heads.mask_predictor(heads.mask_head(pool(pyramid, regions, _MASK_SIZE)))
        chosen: Tensor = logits[torch.arange(len(labels), device=labels.device), labels].float()
        return chosen

    def _mask_loss(
        self, pyramid: list[Tensor], sampled: Sampled, targets: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the mask losses of the objects.

        With kernels all slots are computed, so that no size depends on values; without, those that count.
        """
        positives, sizes = sampled.positives, targets["sizes"]
        there = positives.there.flatten()
        rows = slice(None) if has_kernels(there) else there.nonzero()[:, 0]
        image = torch.arange(len(sizes), device=sizes.device)[:, None].expand_as(positives.objects)
        regions, image = _regions(image, positives.boxes)[rows], image.flatten()[rows]
        logits = self._mask_logits(pyramid, regions, positives.labels.flatten()[rows])
        wanted = project_masks(
            targets["masks"],
            rows_of(targets["mask_places"], positives.objects).flatten(0, 1)[rows],
            image,
            regions[:, 1:],
            sizes[image],
            logits.shape[-1],
        )
        losses = logits.new_zeros(len(there))
        losses[rows] = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none").sum(dim=(1, 2))
        return {
            "loss_mask": (losses * there).view_as(positives.there).sum(dim=1),
            "count_mask": positives.there.sum(dim=1) * logits.shape[-1] ** 2,
        }


def largest_step(model: MaskRCNN, images: Tensor) -> Tensor:
    """Return a scalar that depends on every part of ``model``, with the most regions that the heads may get.

    Profiling on the meta device uses it, where no region can be found.
    """
    heads, channels = model.roi_heads, model.config.channels
    num_regions = len(images) * model.config.region_samples
    levels = list(model.backbone(images).values())
    logits, deltas = model.rpn.head(levels)
    classes, boxes = heads.box_predictor(
        heads.box_head(images.new_empty(num_regions, channels, _BOX_SIZE, _BOX_SIZE))
    )
    outputs = [*logits, *deltas, classes, boxes]
    if model.config.masks:
        num_positives = int(num_regions * POSITIVE_FRACTION)
        features = images.new_empty(num_positives, channels, _MASK_SIZE, _MASK_SIZE)
        outputs.append(heads.mask_predictor(heads.mask_head(features)))
    return torch.stack([one.sum() for one in outputs]).sum()


@cache
def frozen_norm() -> Any:
    """Return torchvision's ``FrozenBatchNorm2d`` that computes in the type of its input.

    Theirs multiplies bf16 activations by fp32 constants, so that all activations of the backbone become fp32:
    28 bytes moved for each element instead of 4.
    """
    base: Any = torchvision().ops.FrozenBatchNorm2d

    class FrozenNorm(base):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            scale = self.weight * (self.running_var + self.eps).rsqrt()
            shift = self.bias - self.running_mean * scale
            shift, scale = (v.to(x.dtype).view(1, -1, 1, 1) for v in (shift, scale))
            return torch.addcmul(shift, x, scale)

    return FrozenNorm


def _regions(image: Tensor, boxes: Tensor) -> Tensor:
    """Return rows of image and box ``[N, 5]``; ``image`` broadcasts over ``boxes [..., 4]``."""
    numbers = image.expand(boxes.shape[:-1])[..., None].to(boxes.dtype)
    return torch.cat([numbers, boxes], dim=-1).flatten(0, -2)


def _new_parts(config: MaskRCNNConfig, num_labels: int) -> Any:
    """Return torchvision's model with its initial weights; its layers are used."""
    detection, channels = torchvision().models.detection, config.channels
    norm = frozen_norm() if config.norms_frozen else nn.BatchNorm2d
    backbone = detection.backbone_utils.resnet_fpn_backbone(
        backbone_name=config.backbone,
        weights=None,
        norm_layer=norm,
        trainable_layers=5 - config.stages_frozen,
    )
    backbone.fpn = torchvision().ops.FeaturePyramidNetwork(
        [block[0].in_channels for block in backbone.fpn.inner_blocks],
        channels,
        extra_blocks=torchvision().ops.feature_pyramid_network.LastLevelMaxPool(),
    )
    backbone.out_channels = channels
    anchors = detection.anchor_utils.AnchorGenerator(
        tuple((size,) for size in config.anchor_sizes), (_ANCHOR_RATIOS,) * len(config.anchor_sizes)
    )
    features = 4 * channels
    of_boxes = {
        "rpn_anchor_generator": anchors,
        "box_head": detection.faster_rcnn.TwoMLPHead(channels * _BOX_SIZE**2, features),
        "box_predictor": detection.faster_rcnn.FastRCNNPredictor(features, num_labels),
    }
    if not config.masks:
        return detection.FasterRCNN(backbone, **of_boxes)
    return detection.MaskRCNN(
        backbone,
        **of_boxes,
        mask_head=detection.mask_rcnn.MaskRCNNHeads(channels, (channels,) * 4, 1),
        mask_predictor=detection.mask_rcnn.MaskRCNNPredictor(channels, channels, num_labels),
    )


# ------------------------------------------------------------------------------------------ initial weights

BACKBONE = "backbone.body."
_COUNTER = "num_batches_tracked"
_BY_CLASS = ("roi_heads.box_predictor.", "roi_heads.mask_predictor.mask_fcn_logits.")
"""Tensors whose first dimension follows from the number of categories."""


@torch.no_grad()
def load_weights(model: MaskRCNN, path: Path) -> str:
    """Fill ``model`` with a file's weights; return in words which part they are.

    Names are torchvision's. Those of a classifier (``conv1.weight``, …) fill the backbone; a detector's
    fill everything, except what depends on categories where the file has another number of them.

    Raises:
        UsageError: the file is not there, lacks a tensor, or has one of another shape.
        ShoalError: it is damaged.
    """
    weights = _read(path)
    is_detector = any(name.startswith(BACKBONE) for name in weights)
    prefix = "" if is_detector else BACKBONE
    state = {
        name.removeprefix(prefix): tensor
        for name, tensor in model.state_dict().items()
        if name.startswith(prefix) and not name.endswith(_COUNTER)
    }
    num_new = 0
    for name, tensor in state.items():
        if name not in weights:
            raise UsageError(
                f"model.weights {path} does not hold {name} of a {model.config.backbone}"
                f"{' detector' if is_detector else ''}.{did_you_mean(name, weights)}"
            )
        if weights[name].shape == tensor.shape:
            continue
        if not name.startswith(_BY_CLASS) or weights[name].shape[1:] != tensor.shape[1:]:
            raise UsageError(
                f"model.weights {path}: {name} has shape {tuple(weights[name].shape)}, the model's has "
                f"{tuple(tensor.shape)}; is model.backbone {model.config.backbone} the network of the file?"
            )
        num_new += 1
    for name, tensor in state.items():
        if weights[name].shape == tensor.shape:
            tensor.copy_(weights[name])
    part = "the detector" if is_detector else "the backbone"
    return f"{part} from {path}" + (", but new predictors for other categories" if num_new else "")


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise UsageError(f"model.weights {path} does not exist") from None
    except (SafetensorError, OSError) as error:
        raise ShoalError(f"model.weights {path} cannot be read as safetensors: {error}") from None
