"""The losses of a micro-batch: sums, and its part of the mean over the global batch."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.data.loader import Batch
from shoal.recipes.masked_lm.job import Job
from shoal.train.gradients import loss_weight

INPUTS = (
    "tokens",
    "types",
    "positions",
    "lengths",
    "grid",
    "places",
    "masked_rows",
    "masked_ids",
    "labels",
)
"""What of a micro-batch goes to the model."""

NUM_SUMS = 4
"""Sums a micro-batch adds to: masked-LM loss and correct, sentence loss and correct."""


def losses_of(job: Job, batch: Batch, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return a micro-batch's summed losses (masked-LM, sentence); add its figures to ``sums``."""
    inputs = {name: batch[name].to(job.world.device, non_blocking=True) for name in INPUTS}
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
