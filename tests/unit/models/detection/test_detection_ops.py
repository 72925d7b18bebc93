"""Operations on batches against torchvision's functions on one image: same matches, boxes, pixels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.models.detection._utils import BalancedPositiveNegativeSampler, Matcher
from torchvision.models.detection.roi_heads import paste_masks_in_image
from torchvision.ops import (
    box_iou,
    nms,
)

from shoal import native
from shoal.decide.rng import Stream, random_keys
from shoal.models.detection import matching, suppression
from shoal.models.detection.boxes import pairwise_iou
from shoal.models.detection.masks import paste_bitmaps, paste_probabilities, project_masks
from shoal.models.detection.matching import BELOW_LOW, Samples, match_boxes, sample_balanced
from shoal.models.detection.suppression import NO_BOX, suppress, top_places

LEVELS = native.simd_levels()


@pytest.fixture(params=["native", "torch"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The native pass, and the operations of torch that other devices use, in small parts."""
    if request.param == "torch":
        monkeypatch.setattr(native, "is_built", lambda: False)
        monkeypatch.setattr(matching, "_MAX_PAIRS", 50_000)
        monkeypatch.setattr(suppression, "_MAX_PAIRS", 200_000)
    yield request.param


def made_boxes(*shape: int, seed: int, side: float = 60, whole: bool = True) -> Tensor:
    """Boxes in 200 x 150; whole coordinates make many overlaps equal, so that ties are tested."""
    random = torch.Generator().manual_seed(seed)
    low = torch.rand(*shape, 2, generator=random) * torch.tensor([180.0, 130.0])
    size = 2 + torch.rand(*shape, 2, generator=random) * side
    boxes = torch.cat([low, low + size], dim=-1)
    return boxes.round() if whole else boxes


# ---- boxes ----------------------------------------------------------------------------------------------


def test_iou_of_batches() -> None:
    first, second = made_boxes(3, 40, seed=1), made_boxes(3, 25, seed=2, whole=False)
    for n in range(3):
        assert torch.equal(pairwise_iou(first, second)[n], box_iou(first[n], second[n]))
    assert torch.equal(pairwise_iou(first[0], second)[2], box_iou(first[0], second[2]))


# ---- matching -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("allow_low_quality", [False, True])
@pytest.mark.parametrize("shared", [True, False])
def test_matches(form: str, allow_low_quality: bool, shared: bool) -> None:
    """900 anchors: no multiple of a block; with equal overlaps and an object out of reach."""
    num_objects = torch.tensor([5, 0, 12, 1])
    objects = made_boxes(4, 12, seed=5)
    objects[0, 0] = torch.tensor([900.0, 900, 950, 950])  # overlaps nothing: its best IoU, 0, is everybody's
    objects[2, 7:] = torch.nan
    num_objects[2] = 7
    anchors = made_boxes(*(() if shared else (4,)), 900, seed=6)
    matches = match_boxes(
        objects, num_objects, anchors, high=0.7, low=0.3, allow_low_quality=allow_low_quality
    )
    matcher = Matcher(0.7, 0.3, allow_low_quality)
    for n, count in enumerate(num_objects.tolist()):
        own = anchors if shared else anchors[n]
        expected = torch.full((900,), BELOW_LOW) if not count else matcher(box_iou(objects[n, :count], own))
        assert torch.equal(matches[n], expected)
    assert {-2, -1} < set(matches.flatten().tolist())


def test_matches_without_objects(form: str) -> None:
    matches = match_boxes(
        torch.empty(2, 0, 4), torch.zeros(2).long(), made_boxes(9, seed=1), high=0.5, low=0.5
    )
    assert torch.equal(matches, torch.full((2, 9), BELOW_LOW))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("level", LEVELS)
def test_native_matches_at_every_level(level: str, threads: int) -> None:
    objects, anchors = made_boxes(2, 9, seed=8, whole=False), made_boxes(1, 3000, seed=9, whole=False)
    counts, out = torch.tensor([9, 4]), torch.empty(2, 3000, dtype=torch.int64)
    native.core().match_boxes(objects, counts, anchors, out, 0.6, 0.4, True, threads, level)
    assert torch.equal(out, match_boxes(objects, counts, anchors, high=0.6, low=0.4, allow_low_quality=True))


# ---- suppression ----------------------------------------------------------------------------------------


def expected_keep(boxes: Tensor, scores: Tensor, threshold: float, classes: Tensor) -> Tensor:
    keep = torch.zeros(scores.shape, dtype=torch.bool)
    for group in range(len(boxes)):
        for label in classes[group].unique():
            places = torch.where((classes[group] == label) & (scores[group] > NO_BOX))[0]
            keep[group, places[nms(boxes[group, places], scores[group, places], threshold)]] = True
    return keep


@pytest.mark.parametrize("threshold", [0.1, 0.3, 0.5, 0.7])
@pytest.mark.parametrize("with_classes", [True, False])
def test_kept_boxes(form: str, threshold: float, with_classes: bool) -> None:
    """Scores in steps of 0.05 and boxes on whole pixels: equal scores, and overlaps at the threshold."""
    boxes = made_boxes(3, 400, seed=11, side=80)
    scores = (torch.rand(3, 400, generator=torch.Generator().manual_seed(1)) * 20).round() / 20
    scores[1, 300:] = NO_BOX
    scores[2, 1:] = NO_BOX
    classes = torch.arange(1200).view(3, 400) % 4 - 1 if with_classes else torch.zeros(3, 400).long()
    keep = suppress(boxes, scores, threshold, classes)
    assert torch.equal(keep, expected_keep(boxes, scores, threshold, classes))
    assert 10 < keep[0].sum() < 400
    assert keep[2].tolist() == [True] + [False] * 399


def test_long_chain_of_boxes(form: str) -> None:
    """Each box suppresses the next, which would have suppressed the one after: every other one stays."""
    left = torch.arange(100.0) * 4
    boxes = torch.stack([left, torch.zeros(100), left + 10, torch.ones(100)], dim=1)[None]
    keep = suppress(boxes, torch.linspace(1, 0.1, 100)[None], 0.4, torch.zeros(1, 100).long())
    assert keep[0].tolist() == [True, False] * 50


def test_overlaps_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: of many boxes, only some overlaps are in memory at a time.

    No overlap is the threshold itself: torchvision compares it in double precision, this form in single.
    """
    monkeypatch.setattr("shoal.models.detection.suppression.native.is_built", lambda: False)
    boxes = made_boxes(2, 300, seed=11, side=80, whole=False)
    scores = torch.rand(2, 300, generator=torch.Generator().manual_seed(1))
    classes = torch.arange(600).view(2, 300) % 3
    whole = suppress(boxes, scores, 0.4, classes)
    monkeypatch.setattr("shoal.models.detection.suppression._MAX_OVERLAPS", 7 * 2 * 300)
    assert torch.equal(suppress(boxes, scores, 0.4, classes), whole)
    assert torch.equal(whole, expected_keep(boxes, scores, 0.4, classes))
    monkeypatch.setattr("shoal.models.detection.suppression._MAX_PAIRS", 1)
    assert torch.equal(suppress(boxes, scores, 0.4, classes), whole)


def test_autocast_rounds_neither_overlaps_nor_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.models.detection.suppression.native.is_built", lambda: False)
    boxes, scores = made_boxes(2, 300, seed=12, side=80), torch.rand(2, 300)
    classes = torch.zeros(2, 300, dtype=torch.int64)
    masks = torch.ones(1, 5000, dtype=torch.uint8)
    places, image = torch.tensor([[0, 3, 5, 50, 90]]).expand(4, -1), torch.zeros(4, dtype=torch.int64)
    corners = torch.tensor([[1.3, 2.7, 60.1, 40.9], [7, 8, 99, 31], [0, 0, 17.7, 19.9], [3, 4, 5, 6]])
    sizes = torch.tensor([[70, 110]]).expand(4, -1)

    def found() -> list[Tensor]:
        pasted = paste_probabilities(torch.rand(4, 28, 28, generator=torch.Generator().manual_seed(1)), corners, 70, 110)  # fmt: skip  # noqa: E501
        return [
            suppress(boxes, scores, 0.4, classes).float(),
            project_masks(masks, places, image, corners, sizes, 14),
            pasted,
        ]

    exact = found()
    with torch.autocast("cpu", torch.bfloat16):
        assert (boxes[0] @ boxes[0].T).dtype == torch.bfloat16
        for one, other in zip(found(), exact, strict=True):
            assert torch.equal(one, other)


def test_no_boxes(form: str) -> None:
    for shape in ((0, 7), (2, 0)):
        classes = torch.zeros(shape, dtype=torch.int64)
        assert suppress(torch.empty(*shape, 4), torch.empty(shape), 0.5, classes).shape == shape


def test_top_places() -> None:
    scores = torch.tensor([[0.2, 0.9, 0.9, 0.5], [0.1, 0.2, 0.3, NO_BOX]])
    keep = torch.tensor([[True, False, True, True], [True, False, False, False]])
    places, there = top_places(scores, keep, 2)
    assert places[0].tolist() == [2, 3]
    assert places[1, 0] == 0
    assert there.tolist() == [[True, True], [True, False]]
    assert top_places(scores, keep, 9)[0].shape == (2, 4)


# ---- sampling -------------------------------------------------------------------------------------------


def keys_of(*images: int) -> Tensor:
    return torch.from_numpy(random_keys(7, Stream.EXAMPLE, np.array(images)).view(np.int64))


def members(samples: Samples, image: int) -> tuple[list[int], list[int]]:
    """Return the drawn positives and negatives of an image, in their order."""
    there, positive = samples.there[image], samples.is_positive[image]
    assert not (positive & ~there).any() and not positive[samples.most_positive :].any()
    return samples.index[image, positive].tolist(), samples.index[image, there & ~positive].tolist()


def test_balanced_samples() -> None:
    """As many as torchvision takes: enough of both, few positives, few negatives, nothing."""
    labels = torch.full((4, 500), -1)
    labels[0, :300], labels[0, 300:500] = 0, 2
    labels[1, :400], labels[1, 400:410] = 0, 1
    labels[2, :20], labels[2, 20:400] = 0, 3
    samples = sample_balanced(labels, keys_of(0, 1, 2, 3), num_samples=128, positive_fraction=0.3)
    assert samples.index.shape == (4, 128) and samples.most_positive == 38
    theirs = BalancedPositiveNegativeSampler(128, 0.3)(list(labels))
    for n in range(4):
        positive, negative = members(samples, n)
        assert [len(positive), len(negative)] == [int(theirs[0][n].sum()), int(theirs[1][n].sum())]
        assert len(set(positive + negative)) == len(positive + negative)
        assert (labels[n, positive] >= 1).all() and (labels[n, negative] == 0).all()
    again = sample_balanced(labels[1:2], keys_of(1), num_samples=128, positive_fraction=0.3)
    assert members(again, 0) == members(samples, 1)  # whatever else is in the batch
    other = sample_balanced(labels[1:2], keys_of(9), num_samples=128, positive_fraction=0.3)
    assert members(other, 0)[1] != members(samples, 1)[1]


def test_samples_are_even() -> None:
    labels = torch.zeros(2000, 40)
    samples = sample_balanced(labels, keys_of(*range(2000)), num_samples=10, positive_fraction=0.5)
    counts = samples.index[samples.there].bincount().double()
    assert counts.sum() == 20_000
    # chi-square of 40 cells that are drawn without replacement, scaled to 39 degrees of freedom: 99.9 % is 72
    assert float(((counts - 500) ** 2 / 500).sum()) * 39 / 30 < 72


# ---- pasting --------------------------------------------------------------------------------------------

COUNTS, SIZES = [6, 0, 9], [(150, 200), (20, 30), (131, 217)]


def made_masks() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(12)
    boxes = made_boxes(15, seed=13, whole=False)
    boxes[0] = torch.tensor([-20.0, -30, 100, 90])
    boxes[1] = torch.tensor([190.0, 140, 260, 230])
    boxes[2] = torch.tensor([3.0, 3, 3.2, 3.2])
    boxes[3] = torch.tensor([-10.5, -10.5, 300, 300])
    return torch.rand(15, 28, 28, generator=random), boxes


def test_pasted_masks(form: str) -> None:
    masks, boxes = made_masks()
    parts = paste_bitmaps(masks, boxes, COUNTS, SIZES, threshold=0.4)
    for part, own, where, size in zip(parts, masks.split(COUNTS), boxes.split(COUNTS), SIZES, strict=True):
        probabilities = paste_masks_in_image(own[:, None], where, size)[:, 0]
        assert part.shape == probabilities.shape
        clear = (probabilities - 0.4).abs() > 1e-5
        assert torch.equal(part[clear], (probabilities > 0.4)[clear])
        assert clear.double().mean() > 0.999 or not len(part)
        # where the native pass rounds like torch's, which is not promised, not one pixel differs
        torch.testing.assert_close(paste_probabilities(own, where, *size), probabilities, rtol=0, atol=1e-5)


def test_mask_outside_its_image(form: str) -> None:
    """torchvision's function fails there."""
    far = torch.tensor([[-50.0, -50, -40, -40], [500, 3, 600, 9]])
    (part,) = paste_bitmaps(torch.ones(2, 28, 28), far, [2], [(40, 30)])
    assert part.shape == (2, 40, 30)
    assert not part.any()


@pytest.mark.parametrize("level", LEVELS)
def test_native_masks_at_every_level(level: str) -> None:
    masks, boxes = made_masks()
    out = torch.zeros(15 * 150 * 200, dtype=torch.uint8)
    images = torch.tensor([[n * 30_000, 150, 200] for n in range(15)])
    native.core().paste_masks(masks, boxes, images, out, 0.5, 2, level)
    assert torch.equal(out.view(15, 150, 200).bool(), paste_bitmaps(masks, boxes, [15], [(150, 200)])[0])


@pytest.mark.parametrize("level", LEVELS)
def test_native_suppression_at_every_level(level: str) -> None:
    boxes = made_boxes(5, 300, seed=21, whole=False)
    scores = torch.rand(5, 300, generator=torch.Generator().manual_seed(2))
    keep = torch.empty(5, 300, dtype=torch.uint8)
    classes = torch.zeros(5, 300, dtype=torch.int64)
    native.core().suppress_boxes(boxes, scores, classes, keep, 0.5, 2, level)
    assert torch.equal(keep.bool(), expected_keep(boxes, scores, 0.5, classes))
