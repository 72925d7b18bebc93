"""Defines the settings of ``resnet50.py``, and derives batch, epochs, rates and classes from them."""

# Annotations are types here, not texts: the command line resolves texts in the module of the subclass.

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from shoal.data.images.augment import AugmentConfig
from shoal.decide.batch import BatchPlan, MicroBatch, plan_batch
from shoal.decide.epochs import Epochs
from shoal.errors import UsageError, require_positive
from shoal.models.resnet_config import ResNetConfig
from shoal.optim.lr_schedules import Schedule
from shoal.recipes import images
from shoal.recipes.images import ImageDataConfig, ImageTrainConfig
from shoal.train.config import LoopConfig, RunOutputConfig
from shoal.train.optim_config import DecayConfig, VisionOptimizerConfig

# ------------------------------------------------------------------------------------------------- config


@dataclass(frozen=True, kw_only=True)
class DataConfig(ImageDataConfig):
    """Images, and how to read them."""

    decode: Literal["host", "device"] = "host"
    """Decode and augment training images in threads of the host, or on the worker's device (nvJPEG on a GPU;
    without colour jitter and padded crops)."""
    on_bad: Literal["refuse", "skip"] = "refuse"
    """For a training image that cannot be decoded: end the run and name it, or replace it by another
    image."""
    block_size: int = 0
    """For slow storage: shuffle within windows of blocks of this many consecutive images; 0: shuffle all. A
    full cache then evicts the least recently used shards."""
    blocks_in_window: int = 16
    """Blocks in such a window."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("data", self, "blocks_in_window")
        if self.decode == "device" and self.on_bad == "skip":
            raise UsageError("data.on_bad 'skip' is done on the host only: set data.decode 'host', or refuse")
        require_positive("data", self, "block_size", least=0)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(LoopConfig):
    """Length of the run, batch, memory format, and regularization."""

    total_epochs: float = 90.0
    """Passes over the images; the number of optimizer steps follows from it."""
    total_steps: int | None = None
    """Optimizer steps of the whole run, instead of its epochs; the warm-up shrinks in proportion."""
    global_batch_size: int = 16_384
    """Images in one optimizer step, over all workers."""
    micro_batch_size: MicroBatch | None = None
    """Images per worker and forward pass, over which norms average; default: the largest divisor of its share
    up to 64; auto: the largest that fits into memory."""
    channels_last: bool = True
    """Use the channels-last memory format, which matrix units prefer."""
    label_smoothing: float = 0.0
    """Fraction of the target that is spread evenly over all classes."""
    mixup: float = 0.0
    """Mix each image with its neighbour, with a weight drawn from Beta(this, this) per step; 0: no mixup."""
    average_decay: float = 0.0
    """Evaluate and export an exponential average of the weights with this decay per step; 0: the weights
    themselves."""
    norm_images: int = 0
    """Recompute the norms' statistics from this many training images before each evaluation; 0: use the
    running statistics."""
    whiten_images: int = 0
    """Compute resnet8's first convolution from this many training images, so that its outputs are
    uncorrelated; 0: it is the identity."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("train", self, "norm_images", "whiten_images", least=0)
        require_positive("train", self, "total_steps")
        if not self.total_epochs > 0:
            raise UsageError(f"train.total_epochs {self.total_epochs} must be above 0")
        require_positive("train", self, "label_smoothing", "average_decay", least=0, below=1)
        require_positive("train", self, "mixup", least=0, most=1)


@dataclass(frozen=True, kw_only=True)
class OptimConfig(DecayConfig, VisionOptimizerConfig):
    """Optimizer and schedule, in epochs."""

    power: float = 2.0
    """Power of the polynomial decay."""
    base_learning_rate: float = 0.1
    """Learning rate for a batch of 256; it is scaled linearly with the batch."""
    learning_rate: float | None = None
    """Learning rate at the end of the warm-up, for any batch; default: from base_learning_rate."""
    warmup_epochs: float = 10.0
    """Epochs of linear warm-up."""
    warmup_from: float = 0.001
    """Learning rate of the first step, if there is a warm-up."""
    end_learning_rate: float = 0.0
    """Learning rate after the last step."""


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Evaluation on held-out images."""

    every_epochs: int = 1
    """Epochs between evaluations; 0: only at the end."""
    size: int = 224
    """Side of the centre crop that is the model's input, in pixels."""
    resize: int = 256
    """Length of the shorter side of an image before the crop, in pixels."""
    mirror: bool = False
    """Average the logits of each image and of its mirror image."""
    batch_size: int = 256
    """Images per worker and evaluation batch; independent of the number of workers, as are the scores."""

    def __post_init__(self) -> None:
        require_positive("validation", self, "size", "resize", "batch_size")
        require_positive("validation", self, "every_epochs", least=0)
        if self.size > self.resize:
            raise UsageError(
                f"validation.size {self.size} does not fit into validation.resize {self.resize}: lower the "
                "one or raise the other"
            )


@dataclass(frozen=True, kw_only=True)
class ResNetTrainConfig(ImageTrainConfig):
    """All settings of training a residual network; presets are TOML files in ``presets/resnet50``."""

    prepare: ClassVar[str] = "shoal prepare images"
    scores: ClassVar[dict[str, tuple[str, ...]]] = {"validation": ("loss", "top1_accuracy", "top5_accuracy")}

    model: ResNetConfig = field(default_factory=ResNetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    run: RunOutputConfig = field(default_factory=RunOutputConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.optim.warmup_epochs <= self.train.total_epochs:
            raise UsageError(
                f"optim.warmup_epochs {self.optim.warmup_epochs} must lie between 0 and train.total_epochs "
                f"{self.train.total_epochs}"
            )
        if self.run.until is not None and not self.validation.every_epochs:
            raise UsageError(
                f"run.until {self.run.until!r} needs evaluations: set --validation.every-epochs N"
            )
        if self.train.whiten_images and self.model.network != "resnet8":
            raise UsageError(
                f"train.whiten_images {self.train.whiten_images} is for model.network resnet8, whose first "
                f"convolution does not learn; leave it out with {self.model.network}"
            )

    @property
    def longer(self) -> str:
        return "--train.total-epochs" if self.train.total_steps is None else "--train.total-steps"


# ------------------------------------------------------------------------------------------------- plan

NUM_CLASSES_MADE = 10
"""Classes of the images that a run makes for itself."""

BASE_BATCH = 256
"""Batch of ``optim.base_learning_rate``; others scale it linearly (Goyal et al. 2017, arXiv 1706.02677)."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Arithmetic of a run: its batch, and its epochs and learning rates in optimizer steps."""

    batch: BatchPlan
    epochs: Epochs
    total_epochs: float
    schedule: Schedule

    def lines(self) -> list[str]:
        """Return epochs and learning rates in words."""
        schedule, per_epoch = self.schedule, self.epochs.num_examples / self.batch.global_batch_size
        return [
            f"epochs       {self.total_epochs:.4g} of {self.epochs.num_examples:,} images = "
            f"{schedule.total_steps:,} steps, {per_epoch:,.2f} an epoch",
            f"rate         {schedule.warmup_from:g} to {schedule.base:g} in {schedule.warmup_steps:,} steps, "
            f"then to {schedule.end:g} with power {schedule.power:g}",
        ]


def make_plan(config: ResNetTrainConfig, *, num_examples: int, num_workers: int) -> Plan:
    """Return the steps that the settings mean for so many training images.

    Raises:
        UsageError: the sizes do not divide, or the rates are not in order.
    """
    train, optim = config.train, config.optim
    batch = plan_batch(train, num_workers, unit="images")
    if train.mixup and batch.micro_batch_size % 2:
        raise UsageError(
            f"train.mixup pairs neighbours, but a micro-batch has {batch.micro_batch_size} images: choose an "
            "even train.micro_batch_size"
        )
    epochs = Epochs(num_examples=num_examples, global_batch_size=train.global_batch_size)
    total_epochs, total_steps = train.total_epochs, epochs.steps(train.total_epochs)
    warmup_steps = epochs.steps(optim.warmup_epochs)
    if train.total_steps is not None:
        warmup_steps = warmup_steps * min(train.total_steps, total_steps) // max(total_steps, 1)
        total_steps = train.total_steps
        total_epochs = total_steps * train.global_batch_size / num_examples
    if total_steps < 1:
        raise UsageError(
            f"train.total_epochs {train.total_epochs:g} of {num_examples:,} images are less than half of one "
            f"train.global_batch_size {train.global_batch_size}: train longer or lower the batch"
        )
    scaled = optim.base_learning_rate * train.global_batch_size / BASE_BATCH
    base = scaled if optim.learning_rate is None else optim.learning_rate
    schedule = Schedule(
        base=base,
        end=optim.end_learning_rate,
        warmup_steps=warmup_steps,
        warmup_from=min(optim.warmup_from, base),
        total_steps=total_steps,
        power=optim.power,
        decay_from=optim.decay_from,
    )
    return Plan(batch=batch, epochs=epochs, total_epochs=total_epochs, schedule=schedule)


def count_classes(config: ResNetTrainConfig, found: int) -> int:
    """Return the number of classes of the model; ``found`` is that of the images.

    Raises:
        UsageError: the settings name fewer, or the images have no labels.
    """
    wanted, location = config.model.num_classes or found, images.location_of(config)
    if not found:
        raise UsageError(f"{location} holds images without labels: prepare class folders")
    if wanted < found:
        raise UsageError(f"model.num_classes {wanted} is too small for the {found:,} classes of {location}")
    return wanted
