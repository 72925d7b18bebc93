"""The loss of a micro-batch: its sums, and its part of the mean over the global batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.data.loader import Batch
from shoal.recipes.resnet.job import Job
from shoal.train.gradients import loss_weight

NUM_SUMS = 2
"""Sums a micro-batch adds to: loss, images whose likeliest class is theirs."""


def images_of(job: Job, batch: Batch) -> Tensor:
    """Return a batch's images ``[B, 3, H, W]`` on the device, in the form that the model computes in."""
    form = torch.channels_last if job.config.train.channels_last else torch.contiguous_format
    return batch["images"].to(job.world.device, non_blocking=True, memory_format=form)


def weighted_loss(job: Job, sums: Tensor, batch: Batch) -> Tensor:
    """Return this micro-batch's part of the mean loss over the global batch, scaled for fp16.

    Its loss and the number of right guesses are added to ``sums``.
    """
    labels = batch["labels"].to(job.world.device, non_blocking=True)
    with job.precision.autocast():
        logits = job.ddp(images_of(job, batch))
    loss = F.cross_entropy(
        logits.float(), labels, label_smoothing=job.config.train.label_smoothing, reduction="sum"
    )
    num_right = (logits.detach().argmax(dim=1) == labels).sum()
    sums += torch.stack([loss.detach(), num_right]).double()
    return loss * (loss_weight(job.world, job.plan.batch.global_batch_size) * job.trained.scale.value)
