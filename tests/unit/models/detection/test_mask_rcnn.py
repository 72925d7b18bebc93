"""Mask and Faster R-CNN against torchvision's models: the same weights and samples, losses and detections."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.models.detection import FasterRCNN as TheirFasterRCNN
from torchvision.models.detection import MaskRCNN as TheirMaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import FrozenBatchNorm2d, generalized_box_iou_loss, roi_align

from shoal.dropout import fold_in
from shoal.errors import UsageError
from shoal.models.detection.boxes import decode
from shoal.models.detection.config import MaskRCNNConfig
from shoal.models.detection.mask_rcnn import MaskRCNN, frozen_norm
from shoal.models.detection.masks import project_masks
from shoal.models.detection.matching import Samples, sample_balanced
from shoal.models.detection.regions import Sampled, region_losses

CLASSES = 5
SIZES = [(90, 128), (96, 101)]
CONFIG = MaskRCNNConfig(
    backbone="resnet18",
    anchor_sizes=(8, 16, 32, 64, 128),
    proposals_a_level=60,
    proposals=100,
    proposals_used=50,
    proposal_samples=40,
    region_samples=32,
)
NAMES = ("loss_objectness", "loss_rpn_box_reg", "loss_classifier", "loss_box_reg", "loss_mask")
COUNTS = dict(zip(NAMES, ("proposal", "proposal", "region", "region", "mask"), strict=True))


class KeyedSampler:
    """Stands where torchvision draws at random: our draws by the same keys, for labels of equal lengths."""

    def __init__(self, num_samples: int, fraction: float, keys: Tensor) -> None:
        self.num_samples, self.fraction, self.keys = num_samples, fraction, keys

    def __call__(self, labels: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        found = [
            drawn(
                sample_balanced(
                    one[None].long(), key[None], num_samples=self.num_samples, positive_fraction=self.fraction
                ),
                len(one),
            )
            for one, key in zip(labels, self.keys, strict=True)
        ]
        return [a[0].to(torch.uint8) for a, _ in found], [b[0].to(torch.uint8) for _, b in found]


def drawn(samples: Samples, count: int) -> tuple[Tensor, Tensor]:
    """Return which of ``count`` are drawn as positives and as negatives, two masks ``[B, count]``."""
    places = F.one_hot(samples.index, count).bool()
    positive = samples.is_positive & samples.there
    negative = samples.there & ~positive
    return (places & positive[..., None]).any(dim=1), (places & negative[..., None]).any(dim=1)


BOXES_ONLY = replace(CONFIG, masks=False)


def both(config: MaskRCNNConfig) -> tuple[MaskRCNN, TheirFasterRCNN]:
    torch.manual_seed(3)
    backbone = resnet_fpn_backbone(
        backbone_name="resnet18", weights=None, norm_layer=torch.nn.BatchNorm2d, trainable_layers=5
    )
    theirs = (TheirMaskRCNN if config.masks else TheirFasterRCNN)(
        backbone,
        CLASSES + 1,
        rpn_anchor_generator=AnchorGenerator(
            tuple((s,) for s in config.anchor_sizes), ((0.5, 1.0, 2.0),) * 5
        ),
        rpn_pre_nms_top_n_train=config.proposals_a_level,
        rpn_pre_nms_top_n_test=config.proposals_used,
        rpn_post_nms_top_n_train=config.proposals,
        rpn_post_nms_top_n_test=config.proposals_used,
        rpn_batch_size_per_image=config.proposal_samples,
        box_batch_size_per_image=config.region_samples,
    )
    for layer in (theirs.rpn.head.cls_logits, theirs.rpn.head.bbox_pred):
        torch.nn.init.normal_(layer.weight, std=0.05)  # so that boxes and scores differ
    for layer in (theirs.roi_heads.box_predictor.cls_score, theirs.roi_heads.box_predictor.bbox_pred):
        torch.nn.init.normal_(layer.weight, std=0.3)
    ours = MaskRCNN(config, CLASSES)
    ours.load_state_dict(theirs.state_dict())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    return ours, theirs


def a_batch(counts: tuple[int, int]) -> tuple[Tensor, dict[str, Tensor], list[dict[str, Tensor]]]:
    """Images, targets as the reader makes them, and as torchvision takes them: ellipses."""
    random = np.random.default_rng(sum(counts))
    images = torch.zeros(2, 3, 96, 128)
    most = max(*counts, 1)
    boxes, labels = torch.zeros(2, most, 4), torch.zeros(2, most, dtype=torch.int64)
    places, masks = torch.zeros(2, most, 5, dtype=torch.int64), torch.zeros(2, 40_000, dtype=torch.uint8)
    theirs = []
    for n, ((height, width), count) in enumerate(zip(SIZES, counts, strict=True)):
        images[n, :, :height, :width] = torch.from_numpy(random.normal(size=(3, height, width))).float()
        whole, start = torch.zeros(count, height, width, dtype=torch.uint8), 0
        for k in range(count):
            w, h = random.integers(12, 70), random.integers(12, 60)
            x, y = random.integers(0, width - w + 1), random.integers(0, height - h + 1)
            rows, columns = torch.arange(h)[:, None], torch.arange(w)
            bits = ((rows + 0.5) / h * 2 - 1) ** 2 + ((columns + 0.5) / w * 2 - 1) ** 2 <= 1
            boxes[n, k] = torch.tensor([x, y, x + w, y + h])
            labels[n, k] = int(random.integers(1, CLASSES + 1))
            whole[k, y : y + h, x : x + w] = bits
            masks[n, start : start + h * w] = bits.flatten()
            places[n, k] = torch.tensor([start, y, x, h, w])
            start += int(h * w)
        theirs.append({"boxes": boxes[n, :count], "labels": labels[n, :count], "masks": whole})
    ours = {
        "sizes": torch.tensor(SIZES),
        "boxes": boxes,
        "labels": labels,
        "num_objects": torch.tensor(counts),
        "masks": masks,
        "mask_places": places,
    }
    return images, ours, theirs


@pytest.mark.parametrize("sampled", ["some", "all", "some, boxes only"])
def test_losses_and_gradients_are_torchvisions(sampled: str) -> None:
    """Some, drawn by keys, of objects of equal number; or all anchors and regions, an image being empty."""
    keys = torch.tensor([123456789, -987654321])
    if sampled.startswith("some"):
        config, counts = CONFIG if sampled == "some" else BOXES_ONLY, (3, 3)
    else:
        many = {"proposal_samples": 100_000, "region_samples": 10_000}
        config, counts = MaskRCNNConfig(**{**vars(CONFIG), **many}), (4, 0)
    ours, theirs = both(config)
    images, targets, their_targets = a_batch(counts)
    draws = [fold_in(keys, stage) for stage in (0, 1)]
    theirs.rpn.fg_bg_sampler = KeyedSampler(config.proposal_samples, 0.5, draws[0])
    theirs.roi_heads.fg_bg_sampler = KeyedSampler(config.region_samples, 0.25, draws[1])

    features = theirs.backbone(images)
    proposals, first = theirs.rpn(ImageList(images, SIZES), features, their_targets)
    assert [len(boxes) for boxes in proposals] == [config.proposals] * 2
    _, second = theirs.roi_heads(features, proposals, SIZES, their_targets)
    expected = {**first, **second}
    sum(expected.values()).backward()

    sums = ours(images, targets, keys)
    found = {name: sums[name].sum() / sums[f"count_{COUNTS[name]}"].sum() for name in expected}
    assert {name for name in sums if name.startswith("loss")} == set(expected)
    sum(found.values()).backward()
    for name in expected:
        assert expected[name] > 0
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-7, msg=name)
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        wanted = gradients[name]
        assert parameter.grad is not None and wanted is not None, name
        scale = float(wanted.abs().max())
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-3, atol=1e-4 * scale, msg=name)


@pytest.mark.parametrize("config", [CONFIG, BOXES_ONLY], ids=["with masks", "boxes only"])
def test_detections_are_torchvisions(config: MaskRCNNConfig) -> None:
    ours, theirs = both(config)
    ours.eval()
    theirs.eval()
    images, _, _ = a_batch((3, 3))
    with torch.no_grad():
        features = theirs.backbone(images)
        proposals, _ = theirs.rpn(ImageList(images, SIZES), features)
        expected, _ = theirs.roi_heads(features, proposals, SIZES)
        found = ours.detect(images, torch.tensor(SIZES))
    assert found.counts == [len(one["boxes"]) for one in expected]
    assert sum(found.counts) > 60
    for name in ("boxes", "scores", "labels"):
        wanted = torch.cat([one[name] for one in expected])
        torch.testing.assert_close(getattr(found, name), wanted, rtol=1e-5, atol=1e-4)
    if config.masks:
        masks = torch.cat([one["masks"] for one in expected])[:, 0]
        torch.testing.assert_close(found.masks, masks, rtol=1e-4, atol=1e-5)
    else:
        assert found.masks is None

    originals = [(180, 256), (48, 50)]
    expected = theirs.transform.postprocess(expected, SIZES, originals)
    boxes = found.scaled(torch.tensor(SIZES), torch.tensor(originals))
    torch.testing.assert_close(boxes, torch.cat([one["boxes"] for one in expected]), rtol=1e-5, atol=1e-4)
    for bitmaps, one in zip(found.bitmaps(boxes, originals), expected, strict=config.masks):
        differ = bitmaps != (one["masks"][:, 0] > 0.5)
        assert differ.float().mean() < 1e-3


def test_nothing_to_learn_and_nothing_found() -> None:
    ours, _ = both(CONFIG)
    images, targets, _ = a_batch((0, 0))
    targets = {**targets, "boxes": targets["boxes"][:, :0], "labels": targets["labels"][:, :0]}
    targets["mask_places"], targets["masks"] = targets["mask_places"][:, :0], targets["masks"][:, :0]
    sums = ours(images, targets, torch.tensor([1, 2]))
    for name in ("loss_mask", "loss_box_reg", "loss_rpn_box_reg", "count_mask"):
        assert sums[name].tolist() == [0, 0]
    assert sums["count_region"].tolist() == [CONFIG.region_samples] * 2
    sum(sums[name].sum() for name in NAMES).backward()
    assert all(parameter.grad is not None for parameter in ours.parameters())  # as DDP demands
    ours.eval()
    with torch.no_grad():
        ours.roi_heads.box_predictor.cls_score.bias[0] = 1e4  # all background
    found = ours.detect(images, targets["sizes"])
    assert found.counts == [0, 0] and found.masks.shape == (0, 28, 28)


def test_losses_belong_to_their_images() -> None:
    """With norms that do not look at the batch, images of one frame are learnt as each would be alone."""
    torch.manual_seed(1)
    ours = MaskRCNN(replace(CONFIG, frozen_norms=True), CLASSES)
    images, targets, _ = a_batch((3, 2))
    targets["sizes"] = torch.tensor([[96, 128], [96, 128]])
    keys = torch.tensor([5, 6])
    both_images = ours(images, targets, keys)
    for n in range(2):
        one = {name: tensor[n : n + 1] for name, tensor in targets.items()}
        alone = ours(images[n : n + 1], one, keys[n : n + 1])
        for name, values in both_images.items():
            torch.testing.assert_close(values[n], alone[name][0], rtol=1e-4, atol=1e-4, msg=name)


def test_frozen_norms_keep_the_type_of_activations() -> None:
    torch.manual_seed(2)
    theirs, ours = FrozenBatchNorm2d(6), frozen_norm()(6)
    for buffer in theirs.buffers():
        buffer.uniform_(0.5, 2.0)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 6, 5, 4, requires_grad=True)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-6, atol=1e-6)
    halves = ours(x.bfloat16())
    assert halves.dtype == torch.bfloat16
    torch.testing.assert_close(halves.float(), theirs(x.bfloat16().float()), rtol=2**-7, atol=2**-7)
    model = MaskRCNN(replace(CONFIG, frozen_norms=True), CLASSES)
    assert sum(isinstance(part, frozen_norm()) for part in model.modules()) == 20
    with torch.autocast("cpu", torch.bfloat16):
        levels = model.backbone(torch.randn(1, 3, 64, 64))
    assert {level.dtype for level in levels.values()} == {torch.bfloat16}


def test_a_narrow_network() -> None:
    """Fewer channels from the pyramid on; the names stay."""
    narrow, usual = (MaskRCNN(replace(CONFIG, channels=n), CLASSES) for n in (32, 256))
    assert list(narrow.state_dict()) == list(usual.state_dict())
    shapes = {name: tensor.shape for name, tensor in narrow.state_dict().items()}
    assert shapes["backbone.fpn.layer_blocks.0.0.weight"] == (32, 32, 3, 3)
    assert shapes["roi_heads.box_head.fc7.weight"] == (128, 128)
    assert shapes["roi_heads.mask_predictor.mask_fcn_logits.weight"] == (CLASSES + 1, 32, 1, 1)
    images, targets, _ = a_batch((3, 3))
    sums = narrow(images, targets, torch.tensor([1, 2]))
    assert all(sums[name].sum() > 0 for name in NAMES)


def test_what_does_not_learn_from_trained_weights() -> None:
    config = MaskRCNNConfig(backbone="resnet18", weights=Path("named.safetensors"))
    model = MaskRCNN(config, 3)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    body = {name for name, _ in model.named_parameters() if name.startswith("backbone.body")}
    assert frozen == {name for name in body if name.split(".")[2] in ("conv1", "layer1")}
    assert not any("bn" in name for name in body)


@pytest.mark.parametrize("group", [1 << 26, 5000])
def test_projected_masks_are_roi_align_of_whole_bitmaps(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.models.detection.masks._MAX_VALUES", group)
    _, targets, theirs = a_batch((5, 4))
    random = np.random.default_rng(0)
    for n, (height, width) in enumerate(SIZES):
        objects = torch.from_numpy(random.integers(0, len(theirs[n]["boxes"]), 60))
        limit = torch.tensor([width, height])
        low, part = torch.from_numpy(random.uniform(0, 1, (2, 60, 2))).float()
        low = low * limit
        high = low + part * (limit - low)
        boxes = torch.cat([low, high], dim=1)
        boxes[0] = torch.tensor([0, 0, width, height])
        boxes[1:9] = theirs[n]["boxes"][objects[1:9]]
        rois = torch.cat([objects[:, None].float(), boxes], dim=1)
        expected = roi_align(theirs[n]["masks"][:, None].float(), rois, 14, 1.0)[:, 0]
        image = torch.full((60,), n)
        places, sizes = targets["mask_places"][image, objects], targets["sizes"][image]
        found = project_masks(targets["masks"], places, image, boxes, sizes, 14)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
        assert expected[1:9].mean() > 0.5


def test_giou_and_smoothed_labels() -> None:
    torch.manual_seed(0)
    boxes = torch.tensor([[[10.0, 10, 40, 50], [60, 5, 90, 30]]])
    regions = boxes[0, [0, 1, 0, 1, 1]] + torch.randn(5, 4)
    labels, objects = torch.tensor([2, 3, 1, 0, 0]), torch.tensor([0, 1, 0, 0, 1])
    sampled = Sampled(
        boxes=regions[None],
        there=torch.tensor([[True] * 4 + [False]]),
        labels=labels[None],
        objects=objects[None],
        most_positive=4,
    )
    logits, deltas = torch.randn(5, 6), torch.randn(5, 24)
    config = MaskRCNNConfig(box_loss="giou", label_smoothing=0.1)
    found = region_losses(logits, deltas, sampled, boxes, config)
    spread = torch.full((4, 6), 0.1 / 6)
    spread[torch.arange(4), labels[:4]] += 0.9
    torch.testing.assert_close(found["loss_classifier"][0], -(spread * logits[:4].log_softmax(1)).sum())
    assert found["count_region"].tolist() == [4]
    by_class = deltas.view(5, 6, 4)[torch.arange(3), labels[:3]]
    predicted = decode(by_class, regions[:3], (10, 5))
    expected = generalized_box_iou_loss(predicted, boxes[0, objects[:3]], reduction="sum")
    torch.testing.assert_close(found["loss_box_reg"][0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "values",
    [
        {"frozen_stages": 6},
        {"anchor_sizes": (1, 2)},
        {"proposals": 1},
        {"label_smoothing": 1.0},
        {"channels": 0},
    ],
)
def test_settings_out_of_range(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(values))):
        MaskRCNNConfig(**values)
