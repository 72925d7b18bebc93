"""The losses of a micro-batch: sums, and its part of the mean over the global batch."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.data.loader import Batch, to_device
from shoal.models.pretraining import PRETRAINING_INPUTS
from shoal.recipes.masked_lm.job import Job
from shoal.train.gradients import loss_weight

NUM_SUMS = 4
"""Sums a micro-batch adds to: masked-LM loss and correct, sentence loss and correct."""


def losses_of(job: Job, batch: Batch, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return a micro-batch's summed losses (masked-LM, sentence); add its figures to ``sums``."""
    inputs = to_device({name: batch[name] for name in PRETRAINING_INPUTS}, job.world.device)
    with job.precision.autocast():
        mlm_loss, mlm_correct, sentence_loss, sentence_correct = job.ddp(**inputs)
    sums += torch.stack([mlm_loss.detach(), mlm_correct, sentence_loss.detach(), sentence_correct]).double()
    return mlm_loss, sentence_loss


def weighted_loss(job: Job, num_masked: int, sums: Tensor, batch: Batch) -> Tensor:
    """Return this micro-batch's part of the mean losses over the global batch, scaled for fp16."""
    mlm_loss, sentence_loss = losses_of(job, batch, sums)
    loss = mlm_loss * loss_weight(job.world, num_masked)
    loss = loss + sentence_loss * loss_weight(job.world, job.batch.global_batch_size)
    return loss * job.scale.value
