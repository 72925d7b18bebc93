"""What the settings come to for so many images and workers: steps, batch, learning rates. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.decide.batch import plan_batch
from shoal.decide.epochs import Epochs
from shoal.errors import UsageError
from shoal.optim.lr_schedules import Schedule, linear_scaled
from shoal.recipes.images.plan import ImagePlan
from shoal.recipes.resnet.config import ResNetTrainConfig

BASE_BATCH = 256
"""The batch that ``optim.base_learning_rate`` is for (Goyal et al. 2017, arXiv 1706.02677, section 2.1)."""


@dataclass(frozen=True, kw_only=True)
class Plan(ImagePlan):
    """The arithmetic of a run."""

    epochs: Epochs
    schedule: Schedule

    def lines(self, total_epochs: float) -> list[str]:
        """Return the arithmetic in words."""
        schedule, size = self.schedule, self.batch.global_batch_size
        per_epoch = self.epochs.num_examples / size
        return [
            f"batch        {self.batch}",
            f"epochs       {total_epochs:g} of {self.epochs.num_examples:,} images = {self.total_steps:,} "
            f"steps, {per_epoch:,.2f} an epoch",
            f"rate         {schedule.warmup_from:g} to {schedule.base:g} in {schedule.warmup_steps:,} steps, "
            f"then to {schedule.end:g} with power {schedule.power:g}",
        ]


def make_plan(config: ResNetTrainConfig, *, num_examples: int, num_workers: int) -> Plan:
    """Return the steps that the settings mean for so many training images.

    Raises:
        UsageError: the sizes do not divide, or the rates are not in order.
    """
    train, optim = config.train, config.optim
    batch = plan_batch(
        global_batch_size=train.global_batch_size,
        num_workers=num_workers,
        micro_batch_size=train.micro_batch_size,
        unit="images",
    )
    if train.mixup and batch.micro_batch_size % 2:
        raise UsageError(
            f"train.mixup pairs neighbours, but a micro-batch has {batch.micro_batch_size} images: choose an "
            "even train.micro_batch_size"
        )
    epochs = Epochs(num_examples=num_examples, global_batch_size=train.global_batch_size)
    total_steps = epochs.steps(train.total_epochs)
    if total_steps < 1:
        raise UsageError(
            f"train.total_epochs {train.total_epochs:g} of {num_examples:,} images are less than half of one "
            f"train.global_batch_size {train.global_batch_size}: train longer or lower the batch"
        )
    scaled = linear_scaled(optim.base_learning_rate, BASE_BATCH, train.global_batch_size)
    base = scaled if optim.learning_rate is None else optim.learning_rate
    schedule = Schedule(
        base=base,
        end=optim.end_learning_rate,
        warmup_steps=epochs.steps(optim.warmup_epochs),
        warmup_from=min(optim.warmup_from, base),
        total_steps=total_steps,
        power=optim.power,
        decay_from=optim.decay_from,
    )
    return Plan(epochs=epochs, batch=batch, schedule=schedule, total_steps=total_steps)
