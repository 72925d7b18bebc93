# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
"""Matches, suppresses and pools boxes and cuts masks on a GPU, in Triton, without waiting for the device.

Nothing that has the size of all pairs of boxes is in memory, but one bit a pair in a suppression. IoUs have
the bits of :func:`shoal.models.detection.boxes.pairwise_iou`: no product is fused with a sum.

Only the modules beside it call this one, through operators, and load it when it is needed first.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BITS = tl.constexpr(32)
"""Boxes that a word of a suppression tells about."""
_ROWS, _WORDS = tl.constexpr(16), tl.constexpr(4)
"""Boxes and words of a program that compares boxes."""
_ANCHORS = tl.constexpr(512)
"""Anchors of a program."""
_BINS = tl.constexpr(16)
"""Pooled positions of a program at a time."""
_PIXELS = tl.constexpr(256)
"""Pixels of a mask target in a program."""
_EXACT = {"enable_fp_fusion": False}


def overlaps(boxes: Tensor, classes: Tensor, iou_threshold: float) -> Tensor:
    """Return which later boxes of its class each box overlaps, bit by bit, int32 ``[G, N, ⌈N / 32⌉]``.

    Args:
        boxes: float32 ``[G, N, 4]``, the best first.
        classes: int64 ``[G, N]``.
        iou_threshold: from which on, itself excluded, they overlap.
    """
    groups, count = classes.shape
    words = triton.cdiv(count, _BITS.value)
    bits = torch.empty(groups, count, words, dtype=torch.int32, device=boxes.device)
    grid = (triton.cdiv(words, _WORDS.value), triton.cdiv(count, _ROWS.value), groups)
    dense = (boxes.contiguous(), classes.contiguous())
    _launch(_overlaps, grid, *dense, bits, count, words, iou_threshold, **_EXACT)
    return bits


def keep(bits: Tensor, there: Tensor) -> Tensor:
    """Return the boxes that no kept box before them overlaps, bool ``[G, N]``.

    Args:
        bits: of :func:`overlaps`.
        there: bool ``[G, N]``; others are not kept.
    """
    kept = torch.empty_like(there, memory_format=torch.contiguous_format)
    groups, count, words = bits.shape
    columns = triton.next_power_of_2(max(words, 1))
    flags = (there.contiguous().view(torch.uint8), kept.view(torch.uint8))
    _launch(_keep, (groups,), bits, *flags, count, words, columns, num_warps=min(max(columns // 64, 1), 16))
    return kept


def match(
    objects: Tensor, num_objects: Tensor, anchors: Tensor, high: float, low: float, allow_low_quality: bool
) -> Tensor:
    """Compute ``matching.match_boxes``; of equal overlaps the first object is taken."""
    (num_images, most), num_anchors = objects.shape[:2], anchors.shape[1]
    matches = torch.empty(num_images, num_anchors, dtype=torch.int64, device=objects.device)
    highest = torch.zeros(num_images, most, dtype=torch.float32, device=objects.device)
    shared = 0 if len(anchors) == 1 else num_anchors
    dense = (objects.contiguous(), num_objects.contiguous(), anchors.contiguous())
    common = (*dense, highest, most, num_anchors, shared)
    grid = (triton.cdiv(num_anchors, _ANCHORS.value), num_images)
    if allow_low_quality:
        _launch(_highest, grid, *common, **_EXACT)
    _launch(_match, grid, *common, matches, high, low, LOW_QUALITY=allow_low_quality, **_EXACT)
    return matches


def pool(pyramid: Sequence[Tensor], regions: Tensor, level: Tensor, size: int, first_stride: int) -> Tensor:
    """Return the features ``[N, C, size, size]`` of regions, torchvision's ``roi_align`` with 2 × 2 samples.

    Args:
        pyramid: levels ``[B, C, h, w]``, each of half the size of the one before.
        regions: float32 ``[N, 5]``.
        level: int64 ``[N]``, the level that each region is pooled from.
        size: of the result.
        first_stride: of the first level, in pixels.
    """
    out = pyramid[0].new_empty(len(regions), pyramid[0].shape[1], size, size)
    _pool_levels(pyramid, out, regions, level, first_stride, is_backward=False)
    return out


def pool_backward(
    grad: Tensor, like: Sequence[Tensor], regions: Tensor, level: Tensor, first_stride: int
) -> list[Tensor]:
    """Return the gradients of the levels, from that of the pooled features; sums are in float32."""
    sums = [torch.zeros_like(one, dtype=torch.float32) for one in like]
    _pool_levels(sums, grad.contiguous(), regions, level, first_stride, is_backward=True)
    return [one.to(features.dtype) for one, features in zip(sums, like, strict=True)]


def _pool_levels(
    pyramid: Sequence[Tensor],
    pooled: Tensor,
    regions: Tensor,
    level: Tensor,
    first_stride: int,
    *,
    is_backward: bool,
) -> None:
    """Pool the levels, each for its regions, or add the gradients of pooled features to them."""
    num_regions, channels, size, _ = pooled.shape
    block = min(triton.next_power_of_2(channels), 64)
    grid, dense = (num_regions, triton.cdiv(channels, block)), regions.contiguous()
    for number, features in enumerate(pyramid):
        _launch(
            _pool, grid, dense, features, pooled, level, number, 1 / (first_stride << number), channels,
            *features.shape[2:], *features.stride(), SIZE=size, CHANNELS=block, BACKWARD=is_backward,
        )  # fmt: skip


def project(masks: Tensor, places: Tensor, images: Tensor, boxes: Tensor, sizes: Tensor, size: int) -> Tensor:
    """Compute ``masks.project_masks``."""
    out = torch.empty(len(boxes), size, size, dtype=torch.float32, device=boxes.device)
    grid = (len(boxes), triton.cdiv(size**2, _PIXELS.value))
    dense = (each.contiguous() for each in (boxes, masks, places, images, sizes))
    _launch(_project, grid, *dense, out, masks.shape[1], SIZE=size)
    return out


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Queue a kernel on the device of its first argument, unless there is nothing to do."""
    if all(grid):
        with torch.cuda.device_of(arguments[0]):
            kernel[grid](*arguments, **options)


@triton.jit
def _corners(boxes):
    return tl.load(boxes), tl.load(boxes + 1), tl.load(boxes + 2), tl.load(boxes + 3)


@triton.jit
def _corners_where(boxes, inside):
    return (
        tl.load(boxes, mask=inside, other=0.0),
        tl.load(boxes + 1, mask=inside, other=0.0),
        tl.load(boxes + 2, mask=inside, other=0.0),
        tl.load(boxes + 3, mask=inside, other=0.0),
    )


@triton.jit
def _iou(a0, a1, a2, a3, b0, b1, b2, b3):
    width = tl.maximum(tl.minimum(a2, b2) - tl.maximum(a0, b0), 0.0)
    height = tl.maximum(tl.minimum(a3, b3) - tl.maximum(a1, b1), 0.0)
    inter = width * height
    return tl.div_rn(inter, (a2 - a0) * (a3 - a1) + (b2 - b0) * (b3 - b1) - inter)


@triton.jit
def _overlaps(boxes, classes, bits, count, words, iou_threshold):
    group = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(1) * _ROWS + tl.arange(0, _ROWS)
    word = tl.program_id(0) * _WORDS + tl.arange(0, _WORDS)
    columns = tl.program_id(0) * _WORDS * _BITS + tl.arange(0, _WORDS * _BITS)
    boxes += group * count * 4
    classes += group * count
    packed = tl.zeros((_ROWS, _WORDS), tl.int32)
    if (tl.program_id(0) + 1) * _WORDS * _BITS > tl.program_id(1) * _ROWS:
        a0, a1, a2, a3 = _corners_where(boxes + rows * 4, rows < count)
        b0, b1, b2, b3 = _corners_where(boxes + columns * 4, columns < count)
        iou = _iou(
            a0[:, None], a1[:, None], a2[:, None], a3[:, None],
            b0[None, :], b1[None, :], b2[None, :], b3[None, :],
        )  # fmt: skip
        own = tl.load(classes + rows, mask=rows < count, other=0)
        other = tl.load(classes + columns, mask=columns < count, other=0)
        over = (iou > iou_threshold) & (own[:, None] == other[None, :])
        over = over & (columns[None, :] > rows[:, None]) & (columns < count)[None, :]
        shifted = over.to(tl.int32) << (columns % _BITS)[None, :]
        packed = tl.sum(tl.reshape(shifted, (_ROWS, _WORDS, _BITS)), axis=2)
    at = (group * count + rows[:, None]) * words + word[None, :]
    tl.store(bits + at, packed, mask=(rows < count)[:, None] & (word < words)[None, :])


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _keep(bits, there, kept, count, words, COLUMNS: tl.constexpr):
    """Decide about 32 boxes at a time: those that they suppress among them, then among the later ones."""
    group = tl.program_id(0).to(tl.int64)
    word, lane = tl.arange(0, COLUMNS), tl.arange(0, _BITS)
    suppressed = tl.zeros((COLUMNS,), tl.int32)
    for block in range(0, words):
        row = block * _BITS + lane
        inside = row < count
        at = (group * count + row[:, None]) * words + word[None, :]
        over = tl.load(bits + at, mask=inside[:, None] & (word < words)[None, :], other=0)
        is_there = tl.load(there + group * count + row, mask=inside, other=0) != 0
        gone = tl.sum(tl.where(word == block, suppressed, 0)) | tl.sum(
            tl.where(is_there, 0, 1).to(tl.int32) << lane
        )
        own = tl.sum(tl.where(word[None, :] == block, over, 0), axis=1)
        for number in range(0, _BITS):
            of_one = tl.sum(tl.where(lane == number, own, 0))
            gone |= tl.where((gone >> number) & 1 == 0, of_one, 0)
        is_kept = (gone >> lane) & 1 == 0
        tl.store(kept + group * count + row, is_kept.to(tl.uint8), mask=inside)
        suppressed |= tl.reduce(tl.where(is_kept[:, None], over, 0), 0, _or)


@triton.jit
def _anchors_of(anchors, image, num_anchors, shared):
    """Return the numbers of this program's anchors, whether they are there, and their corners."""
    anchor = tl.program_id(0) * _ANCHORS + tl.arange(0, _ANCHORS)
    inside = anchor < num_anchors
    a0, a1, a2, a3 = _corners_where(anchors + (image.to(tl.int64) * shared + anchor) * 4, inside)
    return anchor, inside, a0, a1, a2, a3


@triton.jit
def _highest(objects, num_objects, anchors, highest, most, num_anchors, shared):
    """Find the highest IoU of each object with any anchor."""
    image = tl.program_id(1)
    _, inside, a0, a1, a2, a3 = _anchors_of(anchors, image, num_anchors, shared)
    for number in range(0, tl.load(num_objects + image)):
        b0, b1, b2, b3 = _corners(objects + (image * most + number) * 4)
        iou = tl.where(inside, _iou(b0, b1, b2, b3, a0, a1, a2, a3), 0.0)
        tl.atomic_max(highest + image * most + number, tl.max(iou))


@triton.jit
def _match(
    objects, num_objects, anchors, highest, most, num_anchors, shared, matches, high, low,
    LOW_QUALITY: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(1)
    anchor, inside, a0, a1, a2, a3 = _anchors_of(anchors, image, num_anchors, shared)
    best = tl.full((_ANCHORS,), -1.0, tl.float32)
    which = tl.zeros((_ANCHORS,), tl.int64)
    is_best_of_object = tl.zeros((_ANCHORS,), tl.int1)
    for number in range(0, tl.load(num_objects + image)):
        b0, b1, b2, b3 = _corners(objects + (image * most + number) * 4)
        iou = _iou(b0, b1, b2, b3, a0, a1, a2, a3)
        which = tl.where(iou > best, number, which)
        best = tl.where(iou > best, iou, best)
        if LOW_QUALITY:
            is_best_of_object |= iou == tl.load(highest + image * most + number)
    matched = tl.where(best < high, -2, which)
    matched = tl.where(best < low, -1, matched)
    matched = tl.where(is_best_of_object, which, matched)
    tl.store(matches + image.to(tl.int64) * num_anchors + anchor, matched, mask=inside)


@triton.jit
def _samples(low, high, position, sub, num_samples, limit, SIZE: tl.constexpr):
    """Return the first of two cells that a sample at ``position`` lies between, and the weights of both.

    It is the sample ``sub`` of so many; there are ``limit`` cells, and none has a weight for one beyond them.
    """
    cell = tl.maximum(high - low, 1.0) / SIZE
    at = low + (position + (sub + 0.5) / num_samples) * cell
    inside = (at >= -1.0) & (at <= limit)
    at = tl.maximum(at, 0.0)
    first = tl.minimum(at.to(tl.int32), limit - 1)
    rest = tl.where(first < limit - 1, at - first, 0.0)
    return first, tl.where(inside, 1 - rest, 0.0), tl.where(inside, rest, 0.0)


@triton.jit
def _region(regions, row, scale):
    at = regions + row * 5
    return (
        tl.load(at).to(tl.int64), tl.load(at + 1) * scale, tl.load(at + 2) * scale, tl.load(at + 3) * scale,
        tl.load(at + 4) * scale,
    )  # fmt: skip


@triton.jit
def _pool(
    regions, features, pooled, level, LEVEL, scale, channels, height, width, stride_b, stride_c, stride_h,
    stride_w, SIZE: tl.constexpr, CHANNELS: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Write the means of four samples a bin; or add the gradients of such means to those of the features."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = (channel < channels)[None, :]
    if tl.load(level + row) == LEVEL:
        image, x1, y1, x2, y2 = _region(regions, row, scale)
        base = features + image * stride_b + channel[None, :] * stride_c
        for begin in range(0, SIZE * SIZE, _BINS):
            bins = begin + tl.arange(0, _BINS)
            of_bins = pooled + (row * channels + channel[None, :]) * SIZE * SIZE + bins[:, None]
            is_bin = is_channel & (bins < SIZE * SIZE)[:, None]
            total = tl.zeros((_BINS, CHANNELS), tl.float32)
            if BACKWARD:
                total += tl.load(of_bins, mask=is_bin, other=0.0) / 4
            for sample in range(0, 4):
                top, of_top, of_bottom = _samples(y1, y2, bins // SIZE, sample // 2, 2, height, SIZE)
                left, of_left, of_right = _samples(x1, x2, bins % SIZE, sample % 2, 2, width, SIZE)
                for corner in tl.static_range(4):
                    y, of_y = (top, of_top) if corner < 2 else (top + 1, of_bottom)
                    x, of_x = (left, of_left) if corner % 2 == 0 else (left + 1, of_right)
                    at = base + (y * stride_h + x * stride_w)[:, None]
                    weight = tl.where(bins < SIZE * SIZE, of_y * of_x, 0.0)[:, None]
                    is_read = is_channel & (weight > 0)
                    if BACKWARD:
                        tl.atomic_add(at, total * weight, mask=is_read, sem="relaxed")
                    else:
                        total += tl.load(at, mask=is_read, other=0.0).to(tl.float32) * weight
            if not BACKWARD:
                tl.store(of_bins, total / 4, mask=is_bin)


@triton.jit
def _bit(masks, y, x, height, width, last):
    inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
    return tl.load(masks + tl.minimum(y * width + x, last), mask=inside, other=0).to(tl.float32)


@triton.jit
def _project(boxes, masks, places, images, sizes, out, num_bytes, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    pixel = tl.program_id(1) * _PIXELS + tl.arange(0, _PIXELS)
    start, top, left, height = _corners(places + row * 5)
    width = tl.load(places + row * 5 + 4)
    x1, y1, x2, y2 = _corners(boxes + row * 4)
    limit_y, limit_x = tl.load(sizes + row * 2), tl.load(sizes + row * 2 + 1)
    num_y = tl.ceil(tl.maximum(y2 - y1, 1.0) / SIZE).to(tl.int32)
    num_x = tl.ceil(tl.maximum(x2 - x1, 1.0) / SIZE).to(tl.int32)
    bits = masks + tl.load(images + row) * num_bytes + start
    last = num_bytes - 1 - start
    total = tl.zeros((_PIXELS,), tl.float32)
    for sub_y in range(0, num_y):
        y, of_y, of_next_y = _samples(y1, y2, pixel // SIZE, sub_y, num_y, limit_y, SIZE)
        for sub_x in range(0, num_x):
            x, of_x, of_next_x = _samples(x1, x2, pixel % SIZE, sub_x, num_x, limit_x, SIZE)
            total += of_y * of_x * _bit(bits, y - top, x - left, height, width, last)
            total += of_y * of_next_x * _bit(bits, y - top, x + 1 - left, height, width, last)
            total += of_next_y * of_x * _bit(bits, y + 1 - top, x - left, height, width, last)
            total += of_next_y * of_next_x * _bit(bits, y + 1 - top, x + 1 - left, height, width, last)
    tl.store(out + row * SIZE * SIZE + pixel, total / (num_y * num_x), mask=pixel < SIZE * SIZE)
