"""Trains ResNet-50 (He et al. 2015, arXiv 1512.03385), or another residual network, to classify images.

    python -m shoal.recipes.resnet50 --preset tiny
    torchrun --nproc-per-node 8 -m shoal.recipes.resnet50 --preset imagenet-16k --data.path /data/imagenet
    shoal train resnet50 --preset tiny --workers 2

One optimizer step: each worker takes its part of the global batch as micro-batches, which threads have
decoded and augmented ahead; losses are sums, divided by the images of the whole global batch; the last
backward averages the gradients over the workers, then the norms' running statistics are averaged too; leaving
the step updates the weights. Norms compute with the statistics of a micro-batch, so its size is part of the
recipe, and the number of workers is not.

The run is defined in epochs; its optimizer steps follow from the batch and are printed.
"""

# Annotations are types here, not texts, and what needs torch is imported in functions: `--help` is quick.

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shoal.data.images.augment import AugmentConfig
from shoal.data.manifest import MANIFEST
from shoal.decide.batch import BatchPlan, MicroBatch, plan_batch
from shoal.decide.epochs import Epochs
from shoal.decide.order import BlockShuffle, ShuffledOrder
from shoal.env import WorkerEnv
from shoal.errors import UsageError, require_positive
from shoal.models.resnet_config import ResNetConfig
from shoal.optim.lr_schedules import Schedule, learning_rate, set_learning_rate
from shoal.recipes import images, run_script
from shoal.recipes.images import ImageDataConfig, ImageTrainConfig
from shoal.train.config import (
    DecayConfig,
    LoopConfig,
    RunOutputConfig,
    VisionOptimizerConfig,
    required,
    settings_lines,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.data.images.reader import DTypeName, ImageReader, Transform
    from shoal.data.images.shards import ImageShards
    from shoal.data.loader import Batch
    from shoal.data.sources import ReaderSource
    from shoal.recipes.resnet50_export import Exported
    from shoal.train.run import Run

# ------------------------------------------------------------------------------------------------- config

PRESETS = (
    "imagenet-16k",
    "imagenet-16k-scripts",
    "imagenet-lars-32k",
    "imagenet-fast",
    "cifar10",
    "tiny",
)


@dataclass(frozen=True, kw_only=True)
class DataConfig(ImageDataConfig):
    """Images, and how to read them."""

    decode: Literal["host", "device"] = "host"
    """Decode and augment training images in threads of the host, or on the worker's device (nvJPEG on a GPU;
    without colour jitter and padded crops)."""
    on_bad: Literal["refuse", "skip"] = "refuse"
    """For a training image that cannot be decoded: end the run and name it, or train on another instead."""
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
        require_positive("data", self, "block_size", least=0)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(LoopConfig):
    """Length of the run, batch, memory format, and regularization."""

    total_epochs: float = 90.0
    """Passes over the images; the optimizer steps follow from it."""
    total_steps: int | None = None
    """Optimizer steps of the whole run, instead of its epochs; the warm-up shrinks in proportion."""
    global_batch_size: int = 16_384
    """Images in one optimizer step, over all workers."""
    micro_batch_size: MicroBatch | None = None
    """Images a worker computes at once, over which its norms average; default: the largest divisor of its
    share up to 64; auto: up to as many as fit into memory."""
    channels_last: bool = True
    """Keep the channels of a pixel together in memory, as matrix units want them."""
    label_smoothing: float = 0.0
    """Part of the target that is spread evenly over all classes."""
    mixup: float = 0.0
    """Mix each image with its neighbour, by a share drawn from Beta(this, this) per step; 0: no mixup."""
    average_decay: float = 0.0
    """Evaluate and export an exponential average of the weights with this decay per step; 0: the weights."""
    norm_images: int = 0
    """Estimate the norms' statistics from so many training images before each evaluation; 0: keep them."""
    whiten_images: int = 0
    """Compute resnet8's first convolution from so many training images, so that its outputs are uncorrelated
    on them; 0: it passes the pixels on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("train", self, "norm_images", "whiten_images", least=0)
        require_positive("train", self, "total_steps")
        if not self.total_epochs > 0:
            raise UsageError(f"train.total_epochs {self.total_epochs} must be above 0")
        require_positive("train", self, "label_smoothing", "average_decay", least=0, below=1)
        if not 0 <= self.mixup <= 1:
            raise UsageError(f"train.mixup {self.mixup} must be from 0 (off) to 1")


@dataclass(frozen=True, kw_only=True)
class OptimConfig(DecayConfig, VisionOptimizerConfig):
    """Optimizer and schedule, in epochs."""

    power: float = 2.0
    """Power of the polynomial decay."""
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
    """Evaluation on held-out images."""

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


IMMUTABLE = (
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
"""Settings that must stay when a run continues: weights, optimizer state or data order depend on them."""


def main(config: ResNetTrainConfig, worker: WorkerEnv | None = None) -> int:
    """Train until the last step, a signal, or a loss that stays not finite; return the exit code.

    Raises:
        UsageError: settings that do not go together, or with the images or the run that is there.
        ShoalError: damaged images or checkpoints, a lost worker, no memory, a loss that is not finite.
    """
    import torch
    import torch.nn.functional as F
    from torch import nn

    from shoal.data.images.mixing import mix, mixup_weight
    from shoal.data.images.synthetic import make_images
    from shoal.data.images.transform import CentreTransform
    from shoal.data.loader import held_out_batches
    from shoal.models.resnet import new_resnet
    from shoal.models.resnet8 import ResNet8
    from shoal.recipes.resnet50_export import write_export
    from shoal.recipes.resnet50_score import TOP1, evaluate
    from shoal.train.optimizers import build_optimizer
    from shoal.train.run import Run
    from shoal.train.weight_averaging import WeightAverage, average_norms

    with Run.open(config=config, recipe="resnet50", immutable=IMMUTABLE, worker=worker) as run:
        # ----------------------------------------------------------------------------------------- data
        data, augment, validation = config.data, config.augment, config.validation
        images.make_images(config, run.world, partial(make_images, num_classes=NUM_CLASSES_MADE))
        train, held_out = images.open_shards(config, run.world, evict=data.block_size > 0)
        images.keep_description(config, run, MANIFEST)
        num_classes = count_classes(config, len(train.manifest.classes))
        plan = make_plan(config, num_examples=len(train), num_workers=run.world.num_workers)
        run.epoch_samples = len(train)
        source, images_of = open_training(config, run, train)
        centre = CentreTransform(validation.size, validation.resize, mean=augment.mean, std=augment.std)
        held_out_reader = open_reader(config, run, held_out, centre)

        # ----------------------------------------------------------------------------------------- model
        torch.manual_seed(run.seed)
        model = new_resnet(config.model, num_classes).to(run.world.device)
        if config.train.channels_last:
            model.to(memory_format=torch.channels_last)
        if config.train.whiten_images:
            assert isinstance(model, ResNet8)
            first = held_out_batches(source.reader, micro_batch_size=256, limit=config.train.whiten_images)
            model.whiten(map(images_of, first))  # the same images on all workers
        decay = config.train.average_decay
        average = WeightAverage(model, decay) if decay else None
        ddp = run.data_parallel(model, average=config.optim.clip == "global")
        run.compile(model, dynamic=False)  # images of another side compile again
        torch.backends.cudnn.benchmark = True  # for the same reason
        optimizer = build_optimizer(model.named_parameters(), config.optim)
        run.keep(model=model, optimizer=optimizer, **({"average": average.model} if average else {}))

        # ----------------------------------------------------------------------------------------- evaluation
        def score() -> nn.Module:
            """Evaluate the weights, or their average, and return the model that was evaluated."""
            scored = average.model if average else model
            if config.train.norm_images:  # the running statistics are of other weights, or of smaller images
                scored = with_norms_of(scored, config, run, train)
            scores, num_samples = evaluate(
                scored,
                held_out_reader,
                run.world,
                run.precision,
                batch_size=validation.batch_size,
                mirror=validation.mirror,
            )
            run.evaluation("validation", scores, num_samples=num_samples)
            return scored

        # ----------------------------------------------------------------------------------------- loop
        last = plan.schedule.total_steps
        epoch_ends = plan.epochs.ends(1, last)
        validation_ends = plan.epochs.ends(validation.every_epochs, last)
        scored: nn.Module | None = None
        steps = run.steps(
            source,
            plan.batch,
            until=last,
            on_host=True,
            references={TOP1: 1 / num_classes},
            notes=[*plan.lines(), f"held out     {len(held_out):,} images"],
        )
        for step in steps:
            with step:
                set_learning_rate(optimizer, learning_rate(plan.schedule, step.number - 1))
                weight = mixup_weight(config.train.mixup, run.seed, step.number)
                for batch in step:
                    labels = run.to_device(batch["labels"])
                    logits = ddp(mix(images.like_weights(images_of(batch), model), weight)).float()
                    targets = mix(F.one_hot(labels, num_classes).float(), weight)
                    smoothing = config.train.label_smoothing
                    loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
                    step.backward(loss / step.num_samples)
                    right = logits.argmax(dim=1) == targets.argmax(dim=1)  # the larger part of a mixed image
                    step.add(step.num_samples, top1_accuracy=right.sum())
                    if data.on_bad == "skip":
                        step.add(0, replaced_images=batch["replaced"].sum())
                average_norms(model, run.world)
                run.timer.lap("gradient_wait")
                step.update(optimizer, max_norm=config.optim.max_grad_norm)
                if step.number in epoch_ends:
                    run.writes_line = True
            if not step.is_done:
                continue
            if average:
                average.update(model, step.number)
            if run.due(validation_ends, evaluation=True):
                scored = score()
            if run.due(epoch_ends):
                run.save()
        if scored is None and not run.stopped and not run.is_over:  # a kill came before the end
            scored = score()

        # ----------------------------------------------------------------------------------------- export
        directory = required(run.directory) / images.EXPORT

        def verdict(scores: Any) -> str:
            top1, count = scores["validation"].metrics[TOP1], scores["validation"].num_samples
            return (
                f"top-1 {100 * top1:.2f} %: {round(top1 * count):,} of {count:,} held-out images; "
                f"the model is in {directory}"
            )

        return run.finish(
            lambda _: write_export(
                exported(config, required(scored), num_classes, train.manifest.classes), directory
            ),
            verdict,
        )


def exported(
    config: ResNetTrainConfig, model: "nn.Module", num_classes: int, classes: tuple[str, ...]
) -> "Exported":
    """Return a trained network with the form of its inputs."""
    from shoal.recipes.resnet50_export import Exported

    return Exported(
        model=model,
        network=replace(config.model, num_classes=num_classes),
        classes=classes,
        size=config.validation.size,
        resize=config.validation.resize,
        mirror=config.validation.mirror,
        mean=config.augment.mean,
        std=config.augment.std,
    )


# ------------------------------------------------------------------------------------------------- data

NUM_CLASSES_MADE = 10


def open_reader(
    config: ResNetTrainConfig, run: "Run", shards: "ImageShards", transform: "Transform", **options: Any
) -> "ImageReader":
    """Return a reader of decoded images, in the layout of the model's weights."""
    from shoal.data.images.reader import ImageReader

    return ImageReader(
        shards,
        transform,
        seed=run.seed,
        threads=images.decode_threads(config.data, run.world),
        channels_last=config.train.channels_last,
        **options,
    )


def open_training(
    config: ResNetTrainConfig, run: "Run", train: "ImageShards"
) -> "tuple[ReaderSource, Callable[[Batch], Tensor]]":
    """Return the training images in their order, and how a batch becomes images on the device.

    These are ``[B, 3, S, S]``, float32 or bfloat16.
    """
    import torch

    from shoal.data.images.gpu import EncodedReader, GpuTransform
    from shoal.data.images.normalise import Normalisation
    from shoal.data.images.transform import TrainTransform
    from shoal.data.sources import ReaderSource

    data, augment = config.data, config.augment
    reader: ImageReader | EncodedReader
    images_of: Callable[[Batch], torch.Tensor]
    if data.decode == "device":
        reader = EncodedReader(train, seed=run.seed)
        images_of = GpuTransform(augment, seed=run.seed, device=run.world.device)
    else:
        # The first convolution rounds its input to bf16: rounded here, half the bytes are copied.
        halves = run.precision.name == "bf16" and not (config.train.mixup or config.train.whiten_images)
        in_bytes = images.copies_bytes(run.world, augment)
        normalise = Normalisation(run.world.device, mean=augment.mean, std=augment.std)
        dtype: DTypeName = "uint8" if in_bytes else "uint16" if halves else "float32"
        reader = open_reader(config, run, train, TrainTransform(augment), on_bad=data.on_bad, dtype=dtype)

        def images_of(batch: "Batch") -> torch.Tensor:
            pixels: torch.Tensor = run.to_device(batch["images"])
            if in_bytes:
                return normalise(pixels, dtype=torch.bfloat16 if halves else torch.float32)
            return pixels.view(torch.bfloat16) if halves else pixels

    blocks = None
    if data.block_size:
        blocks = BlockShuffle(block_size=data.block_size, blocks_in_window=data.blocks_in_window)
    order = ShuffledOrder(num_examples=len(train), seed=run.seed, blocks=blocks)
    return ReaderSource(reader=reader, order=order, processes=data.loader_processes), images_of


def with_norms_of(
    model: "nn.Module", config: ResNetTrainConfig, run: "Run", train: "ImageShards"
) -> "nn.Module":
    """Return a copy of a model whose norms have the statistics of training images of full size."""
    from shoal.data.images.transform import TrainTransform
    from shoal.recipes.resnet50_score import estimate_norms

    scored = copy.deepcopy(model)
    full_size = TrainTransform(replace(config.augment, first_size=None))
    reader = open_reader(config, run, train, full_size, on_bad=config.data.on_bad)
    batch_size, num_images = config.validation.batch_size, config.train.norm_images
    estimate_norms(scored, reader, run, batch_size, num_images=num_images)
    return scored


def count_classes(config: ResNetTrainConfig, found: int) -> int:
    """Return how many classes the model tells apart, ``found`` being those of the images.

    Raises:
        UsageError: the settings name fewer, or the images have no labels.
    """
    wanted, location = config.model.num_classes or found, images.location_of(config)
    if not found:
        raise UsageError(f"{location} holds images without labels: prepare class folders")
    if wanted < found:
        raise UsageError(f"model.num_classes {wanted} is too small for the {found:,} classes of {location}")
    return wanted


# ------------------------------------------------------------------------------------------------- dry run

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


def check(config: ResNetTrainConfig, num_workers: int, dry_run: bool) -> list[str]:
    """Check the settings for a number of workers before any starts; return the lines of a dry run.

    Raises:
        UsageError: sizes that do not divide, no images, or fewer classes than theirs.
    """
    made = config.data.made_images, config.data.num_made_held_out, NUM_CLASSES_MADE
    if config.data.path is not None or not config.data.made_images:
        train, held_out = images.open_shards(config)
        made = len(train), len(held_out), len(train.manifest.classes)
    elif min(made) < NUM_CLASSES_MADE:
        raise UsageError(
            f"data.made_images {made[0]} leaves {made[1]} held-out images for {NUM_CLASSES_MADE} classes: "
            f"make {5 * NUM_CLASSES_MADE} or more"
        )
    num_train, num_held_out, found = made
    plan = make_plan(config, num_examples=num_train, num_workers=num_workers)
    num_classes = count_classes(config, found)
    if not dry_run:
        return []

    import torch
    import torch.nn.functional as F

    from shoal.models.profile import profile_step
    from shoal.models.resnet import new_resnet

    size, num_images = config.augment.size, plan.batch.micro_batch_size
    with torch.device("meta"):
        model = new_resnet(config.model, num_classes)
        inputs, labels = torch.empty(num_images, 3, size, size), torch.empty(num_images, dtype=torch.int64)
    profile = profile_step(model, lambda: F.cross_entropy(model(inputs), labels), num_samples=num_images)
    return [
        *settings_lines(config),
        f"batch        {plan.batch}",
        *plan.lines(),
        f"held out     {num_held_out:,} images of {found:,} classes",
        f"parameters   {profile.num_trainable:,}",
        f"memory       {images.memory_of(profile, config)}",
    ]


if __name__ == "__main__":
    run_script("resnet50")
