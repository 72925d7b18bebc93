"""Registers the kernels of :mod:`shoal.models.detection.kernels` as operators of torch.

So they have gradients, and results without data on fake tensors. The kernels are loaded when the first is
launched: few processes need Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.env.machine import runs_triton


def has_kernels(tensor: Tensor) -> bool:
    """Return whether the device of a tensor runs the kernels."""
    return runs_triton(tensor.device.type)


@torch.library.custom_op(
    "shoal::box_overlaps",
    mutates_args=(),
    schema="(Tensor boxes, Tensor classes, float iou_threshold) -> Tensor",
)
def box_overlaps(boxes: Tensor, classes: Tensor, iou_threshold: float) -> Tensor:
    """Compute :func:`shoal.models.detection.kernels.overlaps`."""
    from shoal.models.detection.kernels import overlaps

    return overlaps(boxes, classes, iou_threshold)


@box_overlaps.register_fake
def _(boxes: Tensor, classes: Tensor, iou_threshold: float) -> Tensor:
    count = classes.shape[1]
    return boxes.new_empty(*classes.shape, (count + 31) // 32, dtype=torch.int32)


@torch.library.custom_op(
    "shoal::keep_boxes", mutates_args=(), schema="(Tensor overlaps, Tensor there) -> Tensor"
)
def keep_boxes(overlaps: Tensor, there: Tensor) -> Tensor:
    """Compute :func:`shoal.models.detection.kernels.keep`."""
    from shoal.models.detection.kernels import keep

    return keep(overlaps, there)


@keep_boxes.register_fake
def _(overlaps: Tensor, there: Tensor) -> Tensor:
    return there.new_empty(there.shape)


@torch.library.custom_op(
    "shoal::match_boxes",
    mutates_args=(),
    schema="(Tensor objects, Tensor num_objects, Tensor anchors, float high, float low,"
    " bool allow_low_quality) -> Tensor",
)
def match_on_device(objects: Tensor, *others: Any) -> Tensor:
    """Compute :func:`shoal.models.detection.kernels.match`."""
    from shoal.models.detection.kernels import match

    return match(objects, *others)


@match_on_device.register_fake
def _(objects: Tensor, num_objects: Tensor, anchors: Tensor, *others: Any) -> Tensor:
    return num_objects.new_empty(len(objects), anchors.shape[1])


@torch.library.custom_op(
    "shoal::project_masks",
    mutates_args=(),
    schema="(Tensor masks, Tensor places, Tensor images, Tensor boxes, Tensor sizes, int size) -> Tensor",
)
def project_on_device(masks: Tensor, *others: Any) -> Tensor:
    """Compute :func:`shoal.models.detection.kernels.project`."""
    from shoal.models.detection.kernels import project

    return project(masks, *others)


@project_on_device.register_fake
def _(masks: Tensor, places: Tensor, images: Tensor, boxes: Tensor, sizes: Tensor, size: int) -> Tensor:
    return boxes.new_empty(len(boxes), size, size)


@torch.library.custom_op(
    "shoal::pool_regions",
    mutates_args=(),
    schema="(Tensor[] pyramid, Tensor regions, Tensor level, int size, int first_stride) -> Tensor",
)
def pool_on_device(pyramid: Sequence[Tensor], *others: Any) -> Tensor:
    """Compute :func:`shoal.models.detection.kernels.pool`."""
    from shoal.models.detection.kernels import pool

    return pool(pyramid, *others)


@pool_on_device.register_fake
def _(pyramid: Sequence[Tensor], regions: Tensor, level: Tensor, size: int, first_stride: int) -> Tensor:
    return pyramid[0].new_empty(len(regions), pyramid[0].shape[1], size, size)


@torch.library.custom_op(
    "shoal::pool_regions_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor[] pyramid, Tensor regions, Tensor level, int first_stride) -> Tensor[]",
)
def _pool_backward(grad: Tensor, *others: Any) -> list[Tensor]:
    """Compute :func:`shoal.models.detection.kernels.pool_backward`."""
    from shoal.models.detection.kernels import pool_backward

    return pool_backward(grad, *others)


@_pool_backward.register_fake
def _(grad: Tensor, pyramid: Sequence[Tensor], *others: Any) -> list[Tensor]:
    return [torch.empty_like(features) for features in pyramid]


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    pyramid, regions, level, _, ctx.first_stride = inputs
    ctx.save_for_backward(*pyramid, regions, level)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *pyramid, regions, level = ctx.saved_tensors
    grads = torch.ops.shoal.pool_regions_backward(grad, pyramid, regions, level, ctx.first_stride)
    return grads, None, None, None, None


pool_on_device.register_autograd(_differentiate, setup_context=_keep_for_backward)
