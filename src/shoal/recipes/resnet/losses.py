"""The loss of a micro-batch: its sums, and its part of the mean over the global batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.data.images.mixing import mix, mixup_weight, soft_targets
from shoal.data.loader import Batch
from shoal.recipes.resnet.evaluation import in_form_of
from shoal.recipes.resnet.job import Job
from shoal.train.gradients import loss_weight

NUM_SUMS = 3
"""Sums a micro-batch adds to: loss, images whose likeliest class is theirs, images that replace bad ones."""


def weighted_loss(job: Job, step: int, sums: Tensor, batch: Batch) -> Tensor:
    """Return this micro-batch's part of the mean loss over the global batch of ``step``, scaled for fp16.

    Its loss and the number of right guesses (of a mixed image: the larger part's class) go to ``sums``,
    and so does the number of images that stand where others could not be decoded.
    """
    train, device = job.config.train, job.world.device
    weight = mixup_weight(train.mixup, train.seed, step)
    images = mix(in_form_of(job.model, job.images_of(batch), device), weight)
    with job.precision.autocast():
        logits = job.ddp(images).float()
    targets = soft_targets(
        batch["labels"].to(device, non_blocking=True),
        logits.shape[1],
        weight=weight,
        smoothing=train.label_smoothing,
    )
    loss = F.cross_entropy(logits, targets, reduction="sum")
    num_right = (logits.detach().argmax(dim=1) == targets.argmax(dim=1)).sum()
    num_replaced = loss.new_full((), float(batch["replaced"].sum()))
    sums += torch.stack([loss.detach(), num_right, num_replaced]).double()
    return loss * (loss_weight(job.world, job.plan.batch.global_batch_size) * job.trained.scale.value)
