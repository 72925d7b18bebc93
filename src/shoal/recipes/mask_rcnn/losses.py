"""The loss of a micro-batch: its sums, and its part of the mean over the global batch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from shoal.data.loader import Batch
from shoal.decide.rng import Stream, random_keys
from shoal.recipes.mask_rcnn.job import Job
from shoal.train.gradients import loss_weight

LOSSES = {
    "loss_objectness": "count_proposal",
    "loss_rpn_box_reg": "count_proposal",
    "loss_classifier": "count_region",
    "loss_box_reg": "count_region",
    "loss_mask": "count_mask",
}
"""The parts of the loss by torchvision's names, and what each is divided by in every image."""

NUM_SUMS = len(LOSSES)
"""Sums a micro-batch adds to: each part, over its images."""

_TARGETS = ("sizes", "boxes", "labels", "num_objects", "masks", "mask_places")


def weighted_loss(job: Job, step: int, sums: Tensor, batch: Batch) -> Tensor:
    """Return this micro-batch's part of the mean loss over the global batch of ``step``, scaled for fp16.

    An image's loss is the mean over what was sampled of it, so that neither the number of workers nor the
    micro-batch changes the gradient (norms that learn apart). The parts go to ``sums``.
    """
    device = job.world.device
    images = images_on(device, batch["images"], channels_last=job.config.train.channels_last)
    targets = {name: batch[name].to(device, non_blocking=True) for name in _TARGETS}
    keys = sampling_keys(job.config.train.seed, batch).to(device, non_blocking=True)
    with job.precision.autocast():
        parts = mean_parts(job.ddp(images, targets, keys))
    sums += parts.detach().double()
    weight = loss_weight(job.world, job.plan.batch.global_batch_size)
    return parts.sum() * (weight * job.trained.scale.value)


def mean_parts(found: Mapping[str, Tensor]) -> Tensor:
    """Return the parts of the loss, each the sum over images of the mean within one, ``[5]``."""
    return torch.stack([(found[name] / found[count].clamp(min=1)).sum() for name, count in LOSSES.items()])


def sampling_keys(seed: int, batch: Batch) -> Tensor:
    """Return the keys ``[B]`` that decide what is sampled of each image."""
    keys = random_keys(seed, Stream.ROI_SAMPLING, batch["epoch"].numpy(), batch["index"].numpy())
    return torch.from_numpy(keys.view(np.int64))


def images_on(device: torch.device, images: Tensor, *, channels_last: bool) -> Tensor:
    """Return ``images`` ``[B, 3, H, W]`` on ``device`` in the form that the model computes in."""
    form = torch.channels_last if channels_last else torch.contiguous_format
    return images.to(device, non_blocking=True, memory_format=form)
