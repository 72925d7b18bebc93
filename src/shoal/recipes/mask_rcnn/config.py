"""All settings of training Mask R-CNN; presets are the TOML files beside this one. No torch."""

# Annotations are types here, not texts: the command line resolves texts in the module of the subclass.

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from shoal.data.coco.augment import DetectionAugmentConfig
from shoal.errors import UsageError
from shoal.models.detection.config import MaskRCNNConfig
from shoal.recipes.images import ImageDataConfig, ImageTrainConfig
from shoal.train.config import LoopConfig, RunOutputConfig, VisionOptimizerConfig, require_positive

PRESETS = (
    "coco-1x",
    "coco-novograd-32",
    "coco-novograd-64",
    "coco-novograd-256",
    "coco-novograd-512",
    "tiny",
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(LoopConfig):
    """The loop: how long, how large a batch, in what form."""

    total_steps: int = 90_000
    """Optimizer steps of the whole run."""
    global_batch_size: int = 16
    """Images in one optimizer step, over all workers."""
    micro_batch_size: int = 2
    """Images a worker computes at once; they are all wide or all tall, and norms that learn average over
    them."""
    compile: bool | None = None
    """torch.compile the backbone; default: no, since most batches have another size."""
    channels_last: bool = True
    """Keep the channels of a pixel together in memory, as matrix units want them."""

    def __post_init__(self) -> None:
        names = ("total_steps", "global_batch_size", "micro_batch_size", "max_nonfinite_steps")
        require_positive("train", self, *names)


@dataclass(frozen=True, kw_only=True)
class DetectorOptimConfig(VisionOptimizerConfig):
    """The optimizer and its schedule, in optimizer steps."""

    learning_rate: float = 0.02
    """Learning rate at the end of the warm-up."""
    warmup_steps: int = 1_000
    """Steps of linear warm-up."""
    warmup_factor: float = 0.001
    """The first rate of the warm-up, as a part of the learning rate."""
    decay: Literal["steps", "cosine", "polynomial"] = "steps"
    """After the warm-up: down at milestones; along half a cosine; or a polynomial, by power."""
    milestones: tuple[int, ...] = (60_000, 80_000)
    """With steps: after so many optimizer steps the rate is multiplied."""
    milestone_factor: float = 0.1
    """With steps: by this."""
    end_factor: float = 0.0
    """With cosine and polynomial: the last rate, as a part of the learning rate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("warmup_factor", "milestone_factor", "end_factor"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"optim.{name} {getattr(self, name)} must be from 0 to 1")


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """How held-out images are seen."""

    every_steps: int = 5_000
    """Steps between evaluations; 0: only at the end."""
    shorter: int = 800
    """Length of an image's shorter side, in pixels, unless the longer one would exceed its limit."""
    longer: int = 1_333
    """The longer side has at most so many pixels."""
    batch_size: int = 1
    """Images a worker evaluates at once. It does not follow the number of workers, so scores do not; more
    than one changes scores a little, since images of a batch are padded to one size."""

    def __post_init__(self) -> None:
        require_positive("validation", self, "shorter", "longer", "batch_size")
        if self.every_steps < 0:
            raise UsageError(f"validation.every_steps {self.every_steps} must be at least 0")


@dataclass(frozen=True, kw_only=True)
class StepRunConfig(RunOutputConfig):
    """Where the run lives and what it writes when."""

    log_frequency: int = 20
    """Steps between lines of the record."""
    checkpoint_every_steps: int = 1_000
    """Steps between checkpoints."""
    keep_checkpoints: int = 3
    """How many checkpoints stay on disk."""

    def __post_init__(self) -> None:
        require_positive("run", self, "log_frequency", "checkpoint_every_steps", "keep_checkpoints")


@dataclass(frozen=True, kw_only=True)
class MaskRCNNTrainConfig(ImageTrainConfig):
    """Training Mask R-CNN on images with boxes and masks."""

    recipe: ClassVar[str] = "mask_rcnn"
    prepare: ClassVar[str] = "shoal prepare coco"
    fixed: ClassVar[tuple[str, ...]] = (
        "model",
        "augment",
        "data.made_images",
        "data.made_size",
        "train.seed",
        "train.global_batch_size",
        "train.micro_batch_size",
        "optim.optimizer",
    )

    model: MaskRCNNConfig = field(default_factory=MaskRCNNConfig)
    data: ImageDataConfig = field(default_factory=ImageDataConfig)
    augment: DetectionAugmentConfig = field(default_factory=DetectionAugmentConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: DetectorOptimConfig = field(default_factory=DetectorOptimConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    run: StepRunConfig = field(default_factory=StepRunConfig)
