"""All settings of training a residual network; presets are the TOML files beside this one. No torch."""

# Annotations are types here, not texts: the command line resolves texts in the module of the subclass.

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from shoal.data.images.augment import AugmentConfig
from shoal.errors import UsageError
from shoal.models.resnet_config import ResNetConfig
from shoal.recipes.images.config import ImageDataConfig, ImageTrainConfig
from shoal.train.config import LoopConfig, RunPlaceConfig, VisionOptimizerConfig, require_positive

PRESETS = ("imagenet-16k", "imagenet-lars-32k", "imagenet-fast", "cifar10", "tiny")


@dataclass(frozen=True, kw_only=True)
class DataConfig(ImageDataConfig):
    """Which images, and how they are read."""

    decode: Literal["host", "device"] = "host"
    """Where training images are decoded and varied: in threads of the host, or on the worker's device (nvJPEG
    on a GPU; without colour jitter and padded crops)."""
    on_bad: Literal["refuse", "skip"] = "refuse"
    """What to do with a training image that cannot be decoded: end, naming it, or take another instead."""
    block_size: int = 0
    """For slow storage: shuffle within windows of blocks of so many consecutive images; 0: shuffle all. In a
    full cache the shards that were not needed for longest then make room."""
    blocks_in_window: int = 16
    """Blocks in such a window."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("data", self, "blocks_in_window")
        if self.decode == "device" and self.on_bad == "skip":
            raise UsageError("data.on_bad 'skip' is done on the host only: set data.decode 'host', or refuse")
        if self.block_size < 0:
            raise UsageError(f"data.block_size {self.block_size} must be at least 0")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(LoopConfig):
    """The loop: how long, how large a batch, in what form."""

    total_epochs: float = 90.0
    """Times that the images are seen; the optimizer steps follow from it."""
    global_batch_size: int = 16_384
    """Images in one optimizer step, over all workers."""
    micro_batch_size: int | None = None
    """Images a worker computes at once, over which its norms average; default: the largest divisor of its
    share up to 64."""
    channels_last: bool = True
    """Keep the channels of a pixel together in memory, as matrix units want them."""
    label_smoothing: float = 0.0
    """Part of the target that is spread evenly over all classes."""
    mixup: float = 0.0
    """Mix each image with its neighbour, a share drawn from Beta(this, this) for each step; 0: not."""
    average_decay: float = 0.0
    """Evaluate and export an exponential average of the weights with this decay a step; 0: the weights."""
    norm_images: int = 0
    """Take the norms' statistics anew from so many training images before each evaluation; 0: not."""
    whiten_images: int = 0
    """Compute resnet8's first convolution from so many training images, so that its outputs are uncorrelated
    on them; 0: it passes the pixels on."""

    def __post_init__(self) -> None:
        require_positive("train", self, "global_batch_size", "micro_batch_size", "max_nonfinite_steps")
        if not self.total_epochs > 0:
            raise UsageError(f"train.total_epochs {self.total_epochs} must be above 0")
        for name in ("label_smoothing", "average_decay"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"train.{name} {getattr(self, name)} must be at least 0 and below 1")
        if not 0 <= self.mixup <= 1:
            raise UsageError(f"train.mixup {self.mixup} must be from 0 (off) to 1")
        for name in ("norm_images", "whiten_images"):
            if getattr(self, name) < 0:
                raise UsageError(f"train.{name} {getattr(self, name)} must be at least 0")


@dataclass(frozen=True, kw_only=True)
class ResNetOptimConfig(VisionOptimizerConfig):
    """The optimizer and its schedule, in epochs."""

    base_learning_rate: float = 0.1
    """Learning rate for a batch of 256; the run's is in proportion to its batch (linear scaling)."""
    learning_rate: float | None = None
    """Learning rate at the end of the warm-up, whatever the batch; default: by base_learning_rate."""
    warmup_epochs: float = 10.0
    """Epochs of linear warm-up."""
    warmup_from: float = 0.001
    """Learning rate of the first step, where there is a warm-up."""
    end_learning_rate: float = 0.0
    """Learning rate after the last step."""


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """How held-out images are seen."""

    every_epochs: int = 1
    """Epochs between evaluations; 0: only at the end."""
    size: int = 224
    """Side of the square in the middle of an image that the model sees, in pixels."""
    resize: int = 256
    """Length of an image's shorter side before that."""
    mirror: bool = False
    """Score the mean of the logits of each image and of its mirror image."""
    batch_size: int = 256
    """Images a worker evaluates at once. It does not follow the number of workers, so scores do not."""

    def __post_init__(self) -> None:
        require_positive("validation", self, "size", "resize", "batch_size")
        if self.every_epochs < 0:
            raise UsageError(f"validation.every_epochs {self.every_epochs} must be at least 0")
        if self.size > self.resize:
            raise UsageError(
                f"validation.size {self.size} does not fit into validation.resize {self.resize}: lower the "
                "one or raise the other"
            )


@dataclass(frozen=True, kw_only=True)
class EpochRunConfig(RunPlaceConfig):
    """Where the run lives and what it writes when."""

    log_frequency: int = 50
    """Steps between lines of the record; the end of an epoch has one too."""
    checkpoint_every_epochs: int = 1
    """Epochs between checkpoints."""
    keep_checkpoints: int = 3
    """How many checkpoints stay on disk."""

    def __post_init__(self) -> None:
        require_positive("run", self, "log_frequency", "checkpoint_every_epochs", "keep_checkpoints")


@dataclass(frozen=True, kw_only=True)
class ResNetTrainConfig(ImageTrainConfig):
    """Training a residual network on images with a label each."""

    recipe: ClassVar[str] = "resnet50"
    prepare: ClassVar[str] = "shoal prepare images"
    fixed: ClassVar[tuple[str, ...]] = (
        "model",
        "augment",
        "data.made_images",
        "data.made_size",
        "data.block_size",
        "data.blocks_in_window",
        "train.seed",
        "train.global_batch_size",
        "train.mixup",
        "train.average_decay",
        "train.whiten_images",
        "optim.optimizer",
    )

    model: ResNetConfig = field(default_factory=ResNetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: ResNetOptimConfig = field(default_factory=ResNetOptimConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    run: EpochRunConfig = field(default_factory=EpochRunConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.optim.warmup_epochs <= self.train.total_epochs:
            raise UsageError(
                f"optim.warmup_epochs {self.optim.warmup_epochs} must lie between 0 and train.total_epochs "
                f"{self.train.total_epochs}"
            )
        if self.train.whiten_images and self.model.network != "resnet8":
            raise UsageError(
                f"train.whiten_images {self.train.whiten_images} is for model.network resnet8, whose first "
                f"convolution does not learn; leave it out with {self.model.network}"
            )
