"""Defines the settings of ``mask_rcnn.py``, and derives batch, epochs and learning rates from them."""

# Annotations are types here, not texts: the command line resolves texts in the module of the subclass.

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from shoal.data.coco.augment import DetectionAugmentConfig
from shoal.decide.batch import BatchPlan, MicroBatch, plan_batch
from shoal.errors import UsageError, require_positive
from shoal.models.detection.config import MaskRCNNConfig
from shoal.optim.lr_schedules import Cosine, Steps
from shoal.recipes import images
from shoal.train.config import LoopConfig, RunOutputConfig
from shoal.train.optim_config import VisionOptimizerConfig, check_warmup

# ------------------------------------------------------------------------------------------------- config


@dataclass(frozen=True, kw_only=True)
class TrainConfig(LoopConfig):
    """Length of the run, batch, and memory format."""

    total_steps: int = 90_000
    """Optimizer steps of the whole run."""
    global_batch_size: int = 16
    """Images in one optimizer step, over all workers."""
    micro_batch_size: MicroBatch = 2
    """Images per worker and forward pass, all wide or all tall; trained norms average over them; auto: the
    largest that fits into memory."""
    compile: bool | None = None
    """Compile the backbone with torch.compile; default: no, because most batches differ in size."""
    channels_last: bool = True
    """Use the channels-last memory format, which matrix units prefer."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig(VisionOptimizerConfig):
    """Optimizer and schedule, in optimizer steps."""

    learning_rate: float = 0.02
    """Learning rate at the end of the warm-up."""
    warmup_steps: int = 1_000
    """Steps of linear warm-up."""
    warmup_factor: float = 0.001
    """First learning rate of the warm-up, as a fraction of the learning rate."""
    decay: Literal["steps", "cosine"] = "steps"
    """Decay after the warm-up: steps at milestones, or half a cosine."""
    milestones: tuple[int, ...] = (60_000, 80_000)
    """With decay steps: optimizer steps after which the rate is multiplied by milestone_factor."""
    milestone_factor: float = 0.1
    """With decay steps: factor of the learning rate at a milestone."""
    end_factor: float = 0.0
    """With decay cosine: last learning rate, as a fraction of the learning rate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = ("warmup_factor", "milestone_factor", "end_factor")
        require_positive("optim", self, *names, least=0, most=1)


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Evaluation on held-out images."""

    shorter: int = 800
    """Length of an image's shorter side, in pixels, unless the longer one would exceed its limit."""
    longer: int = 1_333
    """Limit of the longer side, in pixels."""
    batch_size: int = 1
    """Images per worker and evaluation batch; independent of the number of workers, as are the scores. More
    than one changes scores slightly, because images of a batch are padded to one size."""

    def __post_init__(self) -> None:
        require_positive("validation", self, "shorter", "longer", "batch_size")

    @property
    def view(self) -> DetectionAugmentConfig:
        """Size of images in the evaluation; nothing is drawn at random."""
        return DetectionAugmentConfig(shorter=(self.shorter,), longer=self.longer, flip=0.0)


@dataclass(frozen=True, kw_only=True)
class DetectionRunConfig(RunOutputConfig):
    """Place of the run, and when it writes lines, scores and checkpoints."""

    log_frequency: int = 20
    """Steps between log lines."""
    validation_frequency: int = 5_000
    """Steps between evaluations on held-out images; 0: only at the end."""
    checkpoint_frequency: int = 1_000
    """Steps between checkpoints."""


@dataclass(frozen=True, kw_only=True)
class MaskRCNNTrainConfig(images.ImageTrainConfig):
    """All settings of training Mask R-CNN; presets are TOML files in ``presets/mask_rcnn``."""

    longer: ClassVar[str] = "--train.total-steps"
    prepare: ClassVar[str] = "shoal prepare coco"
    scores: ClassVar[dict[str, tuple[str, ...]]] = {
        "validation": ("box_AP", "box_AP50", "box_AP75", "mask_AP", "mask_AP50", "mask_AP75")
    }

    model: MaskRCNNConfig = field(default_factory=MaskRCNNConfig)
    augment: DetectionAugmentConfig = field(default_factory=DetectionAugmentConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    run: DetectionRunConfig = field(default_factory=DetectionRunConfig)


# ------------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Arithmetic of a run."""

    batch: BatchPlan
    schedule: Cosine | Steps
    lines: tuple[str, ...]
    """Epochs and learning rates in words."""


def make_plan(config: MaskRCNNTrainConfig, *, num_examples: int, num_workers: int) -> Plan:
    """Return batch, schedule and epochs for so many training images.

    Raises:
        UsageError: the sizes do not divide, or the schedule does not fit the run.
    """
    train = config.train
    batch = plan_batch(train, num_workers, unit="images")
    schedule, decay = make_schedule(config.optim, train.total_steps)
    epochs = train.total_steps * train.global_batch_size / num_examples
    lines = (
        f"steps        {train.total_steps:,} = {epochs:,.2f} epochs of {num_examples:,} images",
        f"rate         {schedule.warmup_from:g} to {schedule.base:g} in {schedule.warmup_steps:,} steps, "
        f"then {decay}",
    )
    return Plan(batch=batch, schedule=schedule, lines=lines)


def make_schedule(optim: OptimConfig, total_steps: int) -> tuple[Cosine | Steps, str]:
    """Return the schedule that the settings name, and its decay in words.

    Raises:
        UsageError: warm-up or milestones do not fit into the run.
    """
    check_warmup("optim", optim.warmup_steps, "train", total_steps)
    base, end = optim.learning_rate, optim.end_factor * optim.learning_rate
    warmed = {
        "base": base,
        "warmup_steps": optim.warmup_steps,
        "warmup_from": optim.warmup_factor * base,
    }
    if optim.decay == "cosine":
        return Cosine(**warmed, total_steps=total_steps, end=end), f"to {end:g} along a cosine"  # type: ignore[arg-type]
    if optim.milestones and optim.milestones[-1] >= total_steps:
        raise UsageError(
            f"optim.milestones {optim.milestones} must lie within train.total_steps {total_steps}: lower "
            "them, or choose --optim.decay cosine"
        )
    words = ", ".join(f"{step:,}" for step in optim.milestones)
    steps = Steps(**warmed, milestones=optim.milestones, factor=optim.milestone_factor)  # type: ignore[arg-type]
    return steps, f"times {optim.milestone_factor:g} after {words or 'no step'}"
