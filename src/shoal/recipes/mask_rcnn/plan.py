"""What the settings come to for so many images and workers: batch, epochs, learning rates. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.decide.batch import plan_batch
from shoal.errors import UsageError
from shoal.optim.lr_schedules import AnySchedule, Cosine, Schedule, Steps
from shoal.recipes.mask_rcnn.config import DetectorOptimConfig, MaskRCNNTrainConfig
from shoal.recipes.mask_rcnn.images_plan import ImagePlan


@dataclass(frozen=True, kw_only=True)
class Plan(ImagePlan):
    """The arithmetic of a run."""

    num_examples: int
    """Images to train on."""
    decay: str
    """What follows the warm-up, in words."""

    def lines(self) -> list[str]:
        """Return the arithmetic in words."""
        epochs = self.samples(self.total_steps) / self.num_examples
        schedule = self.schedule
        assert isinstance(schedule, Schedule | Cosine | Steps)
        return [
            f"batch        {self.batch}",
            f"steps        {self.total_steps:,} = {epochs:,.2f} epochs of {self.num_examples:,} images",
            f"rate         {schedule.warmup_from:g} to {schedule.base:g} in {schedule.warmup_steps:,} steps, "
            f"then {self.decay}",
        ]


def make_plan(config: MaskRCNNTrainConfig, *, num_examples: int, num_workers: int) -> Plan:
    """Return what the settings mean for so many training images.

    Raises:
        UsageError: the sizes do not divide, or the schedule does not fit the run.
    """
    train = config.train
    batch = plan_batch(
        global_batch_size=train.global_batch_size,
        num_workers=num_workers,
        micro_batch_size=train.micro_batch_size,
        unit="images",
    )
    schedule, decay = schedule_of(config.optim, train.total_steps)
    return Plan(
        batch=batch,
        schedule=schedule,
        total_steps=train.total_steps,
        num_examples=num_examples,
        decay=decay,
    )


def schedule_of(optim: DetectorOptimConfig, total_steps: int) -> tuple[AnySchedule, str]:
    """Return the schedule that the settings name, and what follows its warm-up in words.

    Raises:
        UsageError: warm-up or milestones do not fit into the run.
    """
    if not 0 <= optim.warmup_steps <= total_steps:
        raise UsageError(
            f"optim.warmup_steps {optim.warmup_steps} must lie between 0 and train.total_steps {total_steps}"
        )
    base, end = optim.learning_rate, optim.end_factor * optim.learning_rate
    warmed = {
        "base": base,
        "warmup_steps": optim.warmup_steps,
        "warmup_from": optim.warmup_factor * base,
    }
    if optim.decay == "cosine":
        return Cosine(**warmed, total_steps=total_steps, end=end), f"to {end:g} along a cosine"  # type: ignore[arg-type]
    if optim.decay == "polynomial":
        schedule = Schedule(
            **warmed,  # type: ignore[arg-type]
            total_steps=total_steps,
            end=end,
            power=optim.power,
            decay_from=optim.decay_from,
        )
        return schedule, f"to {end:g} with power {optim.power:g}"
    if optim.milestones and optim.milestones[-1] >= total_steps:
        raise UsageError(
            f"optim.milestones {optim.milestones} must lie within train.total_steps {total_steps}: lower "
            "them, or choose --optim.decay cosine"
        )
    words = ", ".join(f"{step:,}" for step in optim.milestones)
    steps = Steps(**warmed, milestones=optim.milestones, factor=optim.milestone_factor)  # type: ignore[arg-type]
    return steps, f"times {optim.milestone_factor:g} after {words or 'no step'}"
