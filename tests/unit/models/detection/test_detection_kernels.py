"""Kernels of detectors against the CPU's operations: Triton's interpreter runs them there."""

from __future__ import annotations

import torch
from torch import Tensor

from interpreted import run_in_interpreter
from shoal.models.detection.masks import project_masks
from shoal.models.detection.matching import match_boxes
from shoal.models.detection.regions import pool
from shoal.models.detection.suppression import NO_BOX, suppress


def made_boxes(*shape: int, seed: int, whole: bool = True) -> Tensor:
    """Boxes in 200 x 150; whole coordinates make many overlaps equal."""
    random = torch.Generator().manual_seed(seed)
    low = torch.rand(*shape, 2, generator=random) * torch.tensor([180.0, 130.0])
    boxes = torch.cat([low, low + 2 + torch.rand(*shape, 2, generator=random) * 70], dim=-1)
    return boxes.round() if whole else boxes


def check_suppression() -> None:
    """Of 1, 40 and 300 boxes: less than a word, two words, and more than a program compares."""
    for count, whole in ((1, True), (40, True), (300, False)):
        boxes = made_boxes(3, count, seed=count, whole=whole)
        scores = (torch.rand(3, count, generator=torch.Generator().manual_seed(1)) * 20).round() / 20
        scores[1, count // 2 :] = NO_BOX
        classes = torch.arange(3 * count).view(3, count) % 2
        expected = suppress(boxes, scores, 0.4, classes)
        order = scores.sort(dim=1, descending=True, stable=True).indices
        at = order[..., None].expand_as(boxes)
        bits = torch.ops.shoal.box_overlaps(boxes.gather(1, at), classes.gather(1, order), 0.4)
        keep = torch.ops.shoal.keep_boxes(bits, scores.gather(1, order) > NO_BOX)
        assert torch.equal(keep, expected.gather(1, order)), count
        assert count < 300 or 5 < keep[0].sum() < count


def check_matches() -> None:
    objects, num_objects = made_boxes(4, 12, seed=5), torch.tensor([5, 0, 7, 1])
    objects[0, 0] = torch.tensor([900.0, 900, 950, 950])  # overlaps nothing: its best IoU, 0, is everybody's
    objects[2, 7:] = torch.nan
    for anchors in (made_boxes(1, 900, seed=6), made_boxes(4, 900, seed=7)):
        for low_quality in (True, False):
            found = torch.ops.shoal.match_boxes(objects, num_objects, anchors, 0.7, 0.3, low_quality)
            expected = match_boxes(
                objects, num_objects, anchors, high=0.7, low=0.3, allow_low_quality=low_quality
            )
            assert torch.equal(found, expected)
            assert {-2, -1, 0} < set(found.flatten().tolist())


def check_pooling() -> None:
    """Both layouts of memory; boxes within an image, on its border and beyond, of all levels."""
    torch.manual_seed(0)
    corners = made_boxes(14, seed=3, whole=False)
    corners[2:5, 2:] = corners[2:5, :2] + torch.tensor([[150.0, 170], [400, 250], [600, 460]])
    corners[0], corners[1] = torch.tensor([0.0, 0, 1, 1]), torch.tensor([-40.0, -30, 900, 700])
    regions = torch.cat([(torch.arange(14) % 2)[:, None].float(), corners], dim=1)
    for layout, channels, size in ((torch.contiguous_format, 3, 7), (torch.channels_last, 70, 2)):
        pyramid = [
            torch.randn(2, channels, 160 >> n, 208 >> n).contiguous(memory_format=layout).requires_grad_()
            for n in range(4)
        ]
        areas = (corners[:, 2:] - corners[:, :2]).prod(dim=1)
        level = (4 + (areas.sqrt() / 224).log2() + 1e-6).floor().clamp(2, 5).long() - 2
        assert set(level.tolist()) == {0, 1, 2, 3}
        expected = pool(pyramid, regions, size)
        found = torch.ops.shoal.pool_regions(pyramid, regions, level, size, 4)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        grad = torch.randn_like(expected)
        for one, other in zip(
            torch.autograd.grad(found, pyramid, grad),
            torch.autograd.grad(expected, pyramid, grad),
            strict=True,
        ):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
            assert one.stride() == pyramid[0].stride() or one.shape != pyramid[0].shape
    halves = [one.detach().bfloat16() for one in pyramid]
    found = torch.ops.shoal.pool_regions(halves, regions, level, 2, 4)
    exact = torch.ops.shoal.pool_regions([one.float() for one in halves], regions, level, 2, 4)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), exact, rtol=2**-7, atol=1e-5)


def check_masks() -> None:
    """Objects whose mask is in the middle, at a corner or nowhere; windows within, around and beside it."""
    random = torch.Generator().manual_seed(2)
    masks = (torch.rand(2, 5000, generator=random) < 0.5).to(torch.uint8)
    places = torch.tensor(
        [[0, 20, 30, 40, 50], [2000, 0, 0, 60, 50], [4990, 110, 180, 1, 10], [7, 0, 0, 0, 0]]
    )
    number = torch.arange(12) % 4
    boxes, image = made_boxes(12, seed=4, whole=False), torch.arange(12) % 2
    boxes[0], boxes[1] = torch.tensor([-1.5, -3, 210, 160]), torch.tensor([3.0, 3, 3.4, 3.2])
    sizes = torch.tensor([[150, 200], [140, 190]])[image]
    for size in (14, 28):
        inputs = (masks, places[number], image, boxes, sizes, size)
        expected, found = project_masks(*inputs), torch.ops.shoal.project_masks(*inputs)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
        assert expected[number < 2].mean() > 0.02 and not found[number == 3].any()


def check_operators() -> None:
    """Schemas, and shapes of results on fake tensors; nothing to do is no error."""
    kinds = ("test_schema", "test_faketensor", "test_autograd_registration")
    boxes, ones = made_boxes(2, 9, seed=1), torch.ones(2, 9, dtype=torch.int64)
    pyramid = [torch.randn(2, 3, 64 >> n, 64 >> n, requires_grad=True) for n in range(4)]
    regions = torch.cat([torch.zeros(5, 1), made_boxes(5, seed=2)], dim=1)
    level, ops = torch.arange(5) % 4, torch.ops.shoal
    masks, places = torch.ones(2, 99, dtype=torch.uint8), torch.tensor([[0, 1, 1, 9, 9]] * 9)
    for operator, *arguments in (
        (ops.box_overlaps, boxes, ones, 0.5),
        (ops.keep_boxes, ops.box_overlaps(boxes, ones, 0.5), ones > 0),
        (ops.match_boxes, boxes[:, :3], torch.tensor([3, 1]), boxes[:1], 0.5, 0.5, True),
        (ops.pool_regions, pyramid, regions, level, 2, 4),
        (ops.project_masks, masks, places, ones[0], boxes[0], torch.full((9, 2), 99), 14),
    ):
        torch.library.opcheck(operator.default, tuple(arguments), test_utils=kinds)
    assert ops.pool_regions(pyramid, regions[:0], level[:0], 2, 4).shape == (0, 3, 2, 2)
    assert ops.keep_boxes(ops.box_overlaps(boxes[:, :0], ones[:, :0], 0.5), ones[:, :0] > 0).shape == (2, 0)
    none = ops.match_boxes(boxes[:, :0], torch.zeros(2).long(), boxes, 0.5, 0.5, True)
    assert torch.equal(none, torch.full((2, 9), -1))


def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


if __name__ == "__main__":
    check_suppression()
    check_matches()
    check_pooling()
    check_masks()
    check_operators()
