"""Trains ResNet-50 (He et al. 2015, arXiv 1512.03385), or another residual network, to classify images.

    python -m shoal.recipes.resnet50 --preset tiny
    torchrun --nproc-per-node 8 -m shoal.recipes.resnet50 --preset imagenet-16k --data.path /data/imagenet
    shoal train resnet50 --preset tiny --workers 2

In an optimizer step each worker takes its part of the global batch as micro-batches, which threads have
decoded and augmented ahead. Losses are sums, divided by the number of images of the global batch. The last
backward averages the gradients over the workers. Leaving the step updates the weights, and averages the
running statistics of norms over the workers. Norms use the statistics of one micro-batch, so its size is part
of the recipe, and the number of workers is not.

The run is defined in epochs; its optimizer steps follow from the batch and are printed.
"""

# Annotations are types here, not texts, and what needs torch is imported in functions: `--help` is quick.

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from cyclopts import Parameter

from shoal.data.images.augment import AugmentConfig
from shoal.data.images.shards import ImageShards
from shoal.decide.batch import BatchPlan, MicroBatch, plan_batch
from shoal.decide.epochs import Epochs
from shoal.decide.order import BlockShuffle, ShuffledOrder
from shoal.env.worker import WorkerEnv
from shoal.errors import UsageError, require_positive
from shoal.models.resnet_config import ResNetConfig
from shoal.optim.lr_schedules import LRSchedule, learning_rate, set_learning_rate
from shoal.recipes import DryRun, Row, Sample, images, run_script, using
from shoal.recipes.images import ImageDataConfig, ImageTrainConfig
from shoal.recipes.model_source import NETWORK, find_run
from shoal.recipes.using import EvaluateConfig, PredictConfig
from shoal.train.config import REQUIRED, LoopConfig, RunOutputConfig, load_toml, required, settings_lines
from shoal.train.optim_config import DecayConfig, VisionOptimizerConfig
from shoal.train.run_dir import CONFIG_FILE, description_in

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.data.images.gpu import DecodedAhead
    from shoal.data.images.reader import DTypeName, ImageReader, Transform
    from shoal.data.images.transform import CentreTransform
    from shoal.data.loader import Batch
    from shoal.data.sources import ReaderSource
    from shoal.data.steps import Reader
    from shoal.train.gradients import Precision
    from shoal.train.run import Run
    from shoal.train.world import Float32Array, World

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
    """Train until the last step, a signal, or a loss that stays not finite; return the exit code."""
    import torch
    import torch.nn.functional as F

    from shoal.data.images.mixing import mix, mixup_weight
    from shoal.recipes.shard_cache import record_reads
    from shoal.train.optimizers import build_optimizer
    from shoal.train.run import Run
    from shoal.train.weight_averaging import WeightAverage

    with Run.open(config=config, recipe="resnet50", immutable=IMMUTABLE, worker=worker) as run:
        # ----------------------------------------------------------------------------------------- data
        train, held_out = open_images(config, run)
        num_classes = count_classes(config, len(train.manifest.classes))
        plan = make_plan(config, num_examples=len(train), num_workers=run.world.num_workers)
        source, images_of = open_training(config, run, train)
        held_out_reader = open_held_out(config, run, held_out)

        # ----------------------------------------------------------------------------------------- model
        model = build_model(config, run, num_classes, source.reader, images_of)
        decay = config.train.average_decay
        average = WeightAverage(model, decay) if decay else None
        ddp = run.data_parallel(model, average=config.optim.clip == "global")
        run.compile(model, dynamic=False)  # images of another side compile again
        torch.backends.cudnn.benchmark = True  # for the same reason
        optimizer = build_optimizer(model.named_parameters(), config.optim)
        run.keep(model=model, optimizer=optimizer, **({"average": average.model} if average else {}))

        # ----------------------------------------------------------------------------------------- evaluation
        def score() -> "nn.Module":
            """Evaluate the weights, or their average, and return the model that was evaluated."""
            scored, validation = average.model if average else model, config.validation
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
        validation_ends = plan.epochs.ends(config.validation.every_epochs, last)
        run.lines = epoch_ends
        scored: nn.Module | None = None
        notes, chance = [*plan.lines(), f"held out     {len(held_out):,} images"], {TOP1: 1 / num_classes}
        steps = run.steps(source, plan.batch, until=last, on_host=True, references=chance, notes=notes)
        for step in steps:
            with step:
                set_learning_rate(optimizer, learning_rate(plan.schedule, step.number - 1))
                weight = mixup_weight(config.train.mixup, run.seed, step.number)
                for batch in step:
                    labels = run.to_device(batch["labels"])
                    logits = ddp(mix(images.like_weights(images_of(batch), model), weight))
                    targets = mix(F.one_hot(labels, num_classes).float(), weight)
                    smoothing = config.train.label_smoothing
                    loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
                    step.backward(loss / step.num_samples)
                    right = logits.argmax(dim=1) == targets.argmax(dim=1)  # the larger part of a mixed image
                    step.add(step.num_samples, top1_accuracy=right.sum())
                    if config.data.on_bad == "skip":
                        step.add(0, replaced_images=batch["replaced"].sum())
                step.update(optimizer, max_norm=config.optim.max_grad_norm)
            if not step.is_done:
                continue
            if average and not step.is_given:
                average.update(model, run.step)
            if run.due(validation_ends, evaluation=True):
                scored = run.workers.together(score)
            if run.due(epoch_ends):
                run.save()
        record_reads(run, train)
        if scored is None and not run.stopped and not run.is_over:  # a kill came before the end
            scored = run.workers.together(score)
        return export(config, run, scored, num_classes, train.manifest.classes)


# ------------------------------------------------------------------------------------------------- plan

NUM_CLASSES_MADE = 10
"""Classes of the images that a run makes for itself."""

BASE_BATCH = 256
"""Batch of ``optim.base_learning_rate``; others scale it linearly (Goyal et al. 2017, arXiv 1706.02677)."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Arithmetic of a run: its batch, and its epochs and learning rates in optimizer steps."""

    batch: BatchPlan
    epochs: Epochs
    total_epochs: float
    schedule: LRSchedule

    def lines(self) -> list[str]:
        """Return epochs and learning rates in words."""
        schedule, per_epoch = self.schedule, self.epochs.num_examples / self.batch.global_batch_size
        return [
            f"epochs       {self.total_epochs:.4g} of {self.epochs.num_examples:,} images = "
            f"{schedule.total_steps:,} steps, {per_epoch:,.2f} an epoch",
            f"rate         {schedule.warmup_from:g} to {schedule.base:g} in {schedule.warmup_steps:,} steps, "
            f"then to {schedule.end:g} with power {schedule.power:g}",
        ]


def make_plan(config: ResNetTrainConfig, *, num_examples: int, num_workers: int) -> RunPlan:
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
    schedule = LRSchedule(
        base=base,
        end=optim.end_learning_rate,
        warmup_steps=warmup_steps,
        warmup_from=min(optim.warmup_from, base),
        total_steps=total_steps,
        power=optim.power,
        decay_from=optim.decay_from,
    )
    return RunPlan(batch=batch, epochs=epochs, total_epochs=total_epochs, schedule=schedule)


def count_classes(config: ResNetTrainConfig, num_found: int) -> int:
    """Return the number of classes of the model; ``num_found`` is that of the images.

    Raises:
        UsageError: the settings name fewer, or the images have no labels.
    """
    wanted, location = config.model.num_classes or num_found, images.location_of(config)
    if not num_found:
        raise UsageError(f"{location} holds images without labels: prepare class folders")
    if wanted < num_found:
        raise UsageError(
            f"model.num_classes {wanted} is too small for the {num_found:,} classes of {location}"
        )
    return wanted


# ------------------------------------------------------------------------------------------------- data


def open_images(config: ResNetTrainConfig, run: "Run") -> tuple[ImageShards, ImageShards]:
    """Return the images to train and to validate on, made if none are named; the run keeps what they are.

    Raises:
        UsageError: they are not there, or there are none to validate on.
    """
    from shoal.data.images.synthetic import make_images
    from shoal.data.manifest import MANIFEST

    images.make_images(config, run.world, partial(make_images, num_classes=NUM_CLASSES_MADE))
    shards = images.open_shards(config, run.world, evict=config.data.block_size > 0)
    images.keep_description(config, run, MANIFEST)
    return shards


def open_reader(
    config: ResNetTrainConfig,
    run: "Run",
    shards: ImageShards,
    transform: "Transform",
    num_processes: int = 0,
    **options: Any,
) -> "ImageReader":
    """Return a reader of decoded images, in the layout of the model's weights.

    Args:
        num_processes: that share the host's processors, each with the reader; 0: this one has them.
    """
    from shoal.data.images.reader import ImageReader

    return ImageReader(
        shards,
        transform,
        seed=run.seed,
        threads=images.decode_threads(config.data, run.world, num_processes),
        channels_last=config.train.channels_last,
        **options,
    )


def open_training(
    config: ResNetTrainConfig, run: "Run", train: ImageShards
) -> "tuple[ReaderSource | DecodedAhead, Callable[[Batch], Tensor]]":
    """Return the training images in their order, and how a batch becomes images on the device.

    These are ``[B, 3, S, S]``, float32 or bfloat16.
    """
    import torch

    from shoal.data.images.gpu import DecodedAhead, EncodedReader, GpuTransform, streams_of
    from shoal.data.images.normalise import Normalisation
    from shoal.data.images.transform import TrainTransform
    from shoal.data.sources import ReaderSource

    run.epoch_samples = len(train)
    data, augment = config.data, config.augment
    reader: ImageReader | EncodedReader
    images_of: Callable[[Batch], Tensor]
    if data.decode == "device":
        num_processes = data.loader_processes or 0
        reader = EncodedReader(train, seed=run.seed)
        transform = GpuTransform(augment, seed=run.seed, device=run.world.device)
    else:
        # The first convolution rounds its input to bf16: rounded here, half the bytes are copied.
        halves = run.precision.name == "bf16" and not (config.train.mixup or config.train.whiten_images)
        in_bytes = images.copies_bytes(run.world, augment)
        normalise = Normalisation(run.world.device, mean=augment.mean, std=augment.std)
        dtype: DTypeName = "uint8" if in_bytes else "uint16" if halves else "float32"
        num_processes = images.loader_processes(data, run.world)
        reader = open_reader(
            config, run, train, TrainTransform(augment), num_processes, dtype=dtype, **data.bad_images
        )

        def images_of(batch: "Batch") -> "Tensor":
            pixels: Tensor = run.to_device(batch["images"])
            if in_bytes:
                return normalise(pixels, dtype=torch.bfloat16 if halves else torch.float32)
            return pixels.view(torch.bfloat16) if halves else pixels

    blocks = None
    if data.block_size:
        blocks = BlockShuffle(block_size=data.block_size, blocks_in_window=data.blocks_in_window)
    order = ShuffledOrder(num_examples=len(train), seed=run.seed, blocks=blocks)
    source = ReaderSource(reader=reader, order=order, processes=num_processes)
    if data.decode == "device":
        decoded = DecodedAhead(source, transform, streams_of(run.world.device))
        return decoded, decoded.images_of
    return source, images_of


def open_held_out(config: ResNetTrainConfig, run: "Run", held_out: ImageShards) -> "ImageReader":
    """Return a reader of the middles of the held-out images."""
    from shoal.data.images.transform import CentreTransform

    validation, augment = config.validation, config.augment
    centre = CentreTransform(validation.size, validation.resize, mean=augment.mean, std=augment.std)
    return open_reader(config, run, held_out, centre)


# ------------------------------------------------------------------------------------------------- model


def build_model(
    config: ResNetTrainConfig,
    run: "Run",
    num_classes: int,
    reader: "Reader",
    images_of: "Callable[[Batch], Tensor]",
) -> "nn.Module":
    """Return the network with its first weights on the device, in the memory format of the settings.

    Args:
        reader: of training images, on which a first convolution is whitened.
        images_of: makes images of its batches.
    """
    import torch

    from shoal.data.loader import held_out_batches
    from shoal.models.resnet import new_resnet
    from shoal.models.resnet8 import ResNet8

    torch.manual_seed(run.seed)
    model = new_resnet(config.model, num_classes).to(run.world.device)
    if config.train.channels_last:
        model.to(memory_format=torch.channels_last)
    if config.train.whiten_images:
        assert isinstance(model, ResNet8)
        first = held_out_batches(reader, micro_batch_size=256, limit=config.train.whiten_images)
        model.whiten(map(images_of, first))  # the same images on all workers
    return model


# ------------------------------------------------------------------------------------------------- evaluation

LOSS, TOP1, TOP5 = "loss", "top1_accuracy", "top5_accuracy"


def evaluate(
    model: "nn.Module",
    reader: "ImageReader",
    world: "World",
    precision: "Precision",
    *,
    batch_size: int,
    mirror: bool,
) -> tuple[dict[str, float], int]:
    """Return mean loss and the accuracies of the likeliest class and the five likeliest; number of images.

    Each image counts once, and the figures are the same bits on any number of workers.

    Args:
        batch_size: images that a worker computes at once.
        mirror: average the logits of an image and its mirror image.
    """
    import torch
    import torch.nn.functional as F

    from shoal.train.world import all_gather_json, infer

    def scored(batch: "Batch") -> "tuple[Tensor, Tensor, int]":
        labels = batch["labels"].to(world.device, non_blocking=True)
        logits = image_logits(model, batch["images"], precision, mirror=mirror)
        likeliest = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
        right = torch.stack([likeliest[:, 0].sum(), likeliest.sum()])
        return F.cross_entropy(logits, labels, reduction="sum"), right, len(labels)

    was_training = model.training
    model.eval()
    num_right = torch.zeros(2, dtype=torch.int64, device=world.device)
    losses: list[torch.Tensor] = []
    num_images = 0
    for loss, right, count in infer(scored, images.shared_batches(reader, world, batch_size), world.device):
        losses.append(loss)
        num_right += right
        num_images += count
    model.train(was_training)
    own = {"counts": [num_images, *num_right.tolist()], "losses": [float(loss) for loss in losses]}
    parts = all_gather_json(world.control, own)
    total, top1, top5 = (sum(column) for column in zip(*(part["counts"] for part in parts), strict=True))
    sum_of_losses = math.fsum(loss for part in parts for loss in part["losses"])  # in any order the same
    return {LOSS: sum_of_losses / total, TOP1: top1 / total, TOP5: top5 / total}, total


def image_logits(model: "nn.Module", inputs: "Tensor", precision: "Precision", *, mirror: bool) -> "Tensor":
    """Return the logits ``[B, num_classes]`` of images ``[B, 3, H, W]``, in fp32.

    Args:
        mirror: average those of each image and its mirror image.
    """
    inputs = images.like_weights(inputs, model)
    with precision.autocast():  # forward is not compiled: the last batch is smaller
        logits: Tensor = model.forward(inputs).float()
        if mirror:
            logits = (logits + model.forward(inputs.flip(3)).float()) / 2
    return logits


def estimate_norms(
    model: "nn.Module", reader: "ImageReader", run: "Run", batch_size: int, *, num_images: int
) -> None:
    """Set the statistics of the norms to those of ``num_images`` images, always the same."""
    from shoal.train.weight_averaging import reestimate_norms

    def forward(batch: "Batch") -> None:
        with run.precision.autocast():
            model.forward(images.like_weights(batch["images"], model))

    batches = images.shared_batches(reader, run.world, batch_size, limit=num_images)
    reestimate_norms(model, batches, forward, run.world.control)


def with_norms_of(
    model: "nn.Module", config: ResNetTrainConfig, run: "Run", train: ImageShards
) -> "nn.Module":
    """Return a copy of a model whose norms have the statistics of training images of full size."""
    from shoal.data.images.transform import TrainTransform

    scored = copy.deepcopy(model)
    full_size = TrainTransform(replace(config.augment, first_size=None))
    reader = open_reader(config, run, train, full_size, **config.data.bad_images)
    batch_size, num_images = config.validation.batch_size, config.train.norm_images
    estimate_norms(scored, reader, run, batch_size, num_images=num_images)
    return scored


# ------------------------------------------------------------------------------------------------- export

FORMAT = "shoal-resnet"
_FORM = ("size", "resize", "mirror", "mean", "std")


@dataclass(frozen=True, kw_only=True)
class ExportedNetwork:
    """A network, its classes, and the form of its inputs."""

    model: "nn.Module"
    network: ResNetConfig
    classes: tuple[str, ...]
    """Names in the order of the labels."""
    size: int
    """Side of the square in the middle of an image that the model sees, in pixels."""
    resize: int
    """Length of an image's shorter side before that."""
    mirror: bool
    """Score the mean of the logits of an image and of its mirror image."""
    mean: tuple[float, float, float]
    """Subtracted from red, green and blue, values from 0 to 1."""
    std: tuple[float, float, float]
    """They are divided by it."""

    @property
    def centre(self) -> "CentreTransform":
        """Brings images into the form of the inputs."""
        from shoal.data.images.transform import CentreTransform

        return CentreTransform(self.size, self.resize, mean=self.mean, std=self.std)


def _made(network: dict[str, Any], classes: tuple[str, ...], form: Mapping[str, Any]) -> ExportedNetwork:
    """Return a network with random weights; ``form`` is that of its inputs."""
    from shoal.data.images.augment import check_normalisation
    from shoal.models.resnet import new_resnet

    config = ResNetConfig(**network)
    check_normalisation(form["mean"], form["std"])
    return ExportedNetwork(
        model=new_resnet(config, config.num_classes or len(classes)),
        network=config,
        classes=classes,
        size=int(form["size"]),
        resize=int(form["resize"]),
        mirror=bool(form["mirror"]),
        mean=tuple(form["mean"]),
        std=tuple(form["std"]),
    )


def export(
    config: ResNetTrainConfig,
    run: "Run",
    scored: "nn.Module | None",
    num_classes: int,
    classes: tuple[str, ...],
) -> int:
    """Write the network that was scored with the form of its inputs; return the exit code of the run."""
    directory = required(run.directory) / NETWORK

    def write(_: Path) -> None:
        made = ExportedNetwork(
            model=required(scored),
            network=replace(config.model, num_classes=num_classes),
            classes=classes,
            size=config.validation.size,
            resize=config.validation.resize,
            mirror=config.validation.mirror,
            mean=config.augment.mean,
            std=config.augment.std,
        )
        use.write_export(made, directory)

    def verdict(scores: Any) -> str:
        top1, count = scores["validation"].metrics[TOP1], scores["validation"].num_samples
        return (
            f"top-1 {100 * top1:.2f} %: {round(top1 * count):,} of {count:,} held-out images; "
            f"the model is in {directory}"
        )

    return run.finish(write, verdict)


# ------------------------------------------------------------------------------------------------- use


@dataclass(frozen=True, kw_only=True)
class ResNetPredictConfig(PredictConfig):
    """The network, and how images are classified."""

    model: Annotated[Path, Parameter(group=REQUIRED)]
    """A run of `shoal train resnet50`, one of its checkpoints, or a directory that `shoal export` wrote."""
    mirror: bool | None = None
    """Average the logits of each image and its mirror image; default: as in training."""
    top: int = 5
    """Classes to list for each image, the likeliest first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top < 1:
            raise UsageError(f"--top {self.top} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class ResNetEvaluateConfig(EvaluateConfig):
    """The network, the images to score, and where the figures go."""

    model: Annotated[Path, Parameter(parse=False)] = Path()
    data: Annotated[str, Parameter(group=REQUIRED)]
    """Directory that `shoal prepare images` wrote, or s3://BUCKET/PREFIX of one."""
    split: Literal["validation", "train"] = "validation"
    """The split to score."""
    batch_size: int = 256
    """Images per worker and forward pass."""
    mirror: bool | None = None
    """Average the logits of each image and its mirror image; default: as in training."""
    json: Path | None = None
    """File for the figures."""
    out: Annotated[Path | None, Parameter(parse=False)] = None


class Classifying(images.ImageUse):
    """Classifies images with a trained network."""

    Predict, Evaluate = ResNetPredictConfig, ResNetEvaluateConfig

    @classmethod
    def read_checkpoint(cls, source: Path) -> tuple[ExportedNetwork, int]:
        """Return the network with the average of its weights where the run keeps one."""
        from shoal.data.images.manifest import ImageManifest
        from shoal.train.checkpoint import load_model

        run_dir = find_run(source, "--model")
        config = load_toml(run_dir / CONFIG_FILE)
        try:
            form = {**config["augment"], **config["validation"]}
            classes = ImageManifest.load(description_in(run_dir)).classes
            exported = _made(config["model"], classes, form)
            key = "average" if config["train"]["average_decay"] else "model"
        except (KeyError, TypeError) as error:
            raise UsageError(f"{run_dir} is not a run of `shoal train resnet50` ({error})") from None
        return exported, load_model(source, exported.model, key=key)

    @classmethod
    def read_export(cls, directory: Path) -> ExportedNetwork:
        from safetensors.torch import load_file

        with images.reading(directory):
            tree = images.read_tree(directory, FORMAT)
            exported = _made(tree["model"], tuple(map(str, tree["classes"])), tree)
            exported.model.load_state_dict(load_file(directory / images.WEIGHTS))
        return exported

    @classmethod
    def write_export(cls, network: ExportedNetwork, out: Path) -> None:
        tree = {
            "format": FORMAT,
            "model": asdict(network.network),
            "classes": network.classes,
            **{name: getattr(network, name) for name in _FORM},
        }
        images.write_directory(out, network.model, tree)

    def read_model(self) -> None:
        import torch

        self.network: ExportedNetwork = self.read_network(self.settings.model)
        self.model = self.network.model.to(self.world.device).to(memory_format=torch.channels_last).eval()
        mirror = self.settings.mirror
        self.mirror: bool = self.network.mirror if mirror is None else mirror

    def outputs(self, data: list[Path]) -> "Float32Array | None":
        """Return the logits of the images, ``[N, classes]``."""
        import numpy as np
        import torch

        from shoal.data.images.files import FileReader
        from shoal.train.world import gather_rows, infer

        world, size = self.world, self.settings.batch_size
        reader = FileReader(data, self.network.centre, threads=world.cores)

        def logits_of(batch: Any) -> torch.Tensor:
            return image_logits(self.model, batch["images"], self.precision, mirror=self.mirror).cpu()

        batches = images.shared_batches(reader, world, size)
        own = [torch.empty(0, len(self.network.classes)), *infer(logits_of, batches, world.device)]
        cuts = np.array_split(np.arange(len(data)), range(size, len(data), size))
        rows = [
            np.concatenate([np.empty(0, dtype=np.int64), *cuts[rank :: world.num_workers]])
            for rank in range(world.num_workers)
        ]
        return gather_rows(world, torch.cat(own), rows)

    def rows(self, data: list[Path], outputs: "Float32Array") -> Iterator[Row]:
        classes = self.network.classes
        for path, row, chances in zip(data, outputs, using.probabilities(outputs), strict=True):
            best = (-row).argsort(kind="stable")[: self.settings.top].tolist()
            listed = [{"label": classes[label], "probability": float(chances[label])} for label in best]
            yield {"image": str(path), **listed[0], "top": listed}

    def labelled(self, inputs: tuple[Path, ...]) -> list[ImageShards]:
        shards = ImageShards(self.settings.data, self.settings.split)
        theirs = shards.manifest.classes
        check_classes(self.settings.model, self.network.classes, self.settings.data, theirs)
        return [shards]

    def score(self, data: ImageShards) -> str | None:
        from shoal.atomic_io import write_json
        from shoal.data.images.reader import ImageReader

        world, size = self.world, self.settings.batch_size
        reader = ImageReader(data, self.network.centre, seed=0, threads=world.cores, channels_last=True)
        metrics, count = evaluate(
            self.model, reader, world, self.precision, batch_size=size, mirror=self.mirror
        )
        if not world.is_main:
            return None
        top1, top5 = (round(metrics[name] * count) for name in (TOP1, TOP5))
        if self.settings.json is not None:
            tree = {"num_images": count, "top1": top1, "top5": top5, **metrics}
            write_json(self.settings.json, {**tree, "precision": self.precision.name})
        return (
            f"top-1 {100 * metrics[TOP1]:.3f} % ({top1:,} of {count:,} images), top-5 "
            f"{100 * metrics[TOP5]:.3f} % ({top5:,}), loss {metrics[LOSS]:.4f}, in {self.precision.name}"
        )


def check_classes(source: Path, ours: tuple[str, ...], data: str, theirs: tuple[str, ...]) -> None:
    """Check that labels mean the same in the network and in the images.

    Raises:
        UsageError: they do not.
    """
    for label, (our, their) in enumerate(zip_longest(ours, theirs)):
        if our != their:
            raise UsageError(
                f"label {label} is {our!r} in the network {source} and {their!r} in the images "
                f"{data}: evaluate on images that were prepared with the classes of its training"
            )


use = Classifying


# ------------------------------------------------------------------------------------------------- dry run


def check(config: ResNetTrainConfig, num_workers: int, dry_run: DryRun | None) -> list[str]:
    """Check the settings for a number of workers before any starts; return the lines of a dry run."""
    made = config.data.made_images, config.data.num_made_held_out, NUM_CLASSES_MADE
    if config.data.path is not None or not config.data.made_images:
        train, held_out = images.open_shards(config)
        made = len(train), len(held_out), len(train.manifest.classes)
    elif min(made) < NUM_CLASSES_MADE:
        raise UsageError(
            f"data.made_images {made[0]} leaves {made[1]} held-out images for {NUM_CLASSES_MADE} classes: "
            f"make {5 * NUM_CLASSES_MADE} or more"
        )
    num_train, num_held_out, num_labels = made
    plan = make_plan(config, num_examples=num_train, num_workers=num_workers)
    num_classes = count_classes(config, num_labels)
    if not dry_run:
        return []
    counted = sample(replace(config, model=replace(config.model, num_classes=num_classes)))
    return [
        *settings_lines(config),
        f"batch        {plan.batch}",
        *plan.lines(),
        f"held out     {num_held_out:,} images of {num_labels:,} classes",
        f"parameters   {counted.num_trainable:,}",
        dry_run.memory_line(config, (counted, plan.batch)),
    ]


# ------------------------------------------------------------------------------------------------- sample

IMAGENET_CLASSES = 1000
"""Classes of a model whose data is not named."""


READ_S = 110 / 132 / 359
"""Of ImageNet's images, 110 kB on average, into 224 × 224 pixels: one core of an EPYC reads 359 images of
132 kB a second (``benchmarks.image_loader``, 2026-11-27)."""


def sample(config: ResNetTrainConfig) -> Sample:
    """Return two images and the network, without data."""
    import torch

    from shoal.models.resnet import new_resnet

    size = config.augment.size
    with torch.device("meta"):
        model = new_resnet(config.model, config.model.num_classes or IMAGENET_CLASSES)
    return Sample(
        model=model,
        inputs={"images": torch.empty(2, 3, size, size, device="meta")},
        loss=lambda model, inputs: model(inputs["images"]).sum(),
        num_samples=2,
        input_s=READ_S * (size / 224) ** 2,
    )


def trial(config: ResNetTrainConfig, folder: Path) -> ResNetTrainConfig:
    """Return the settings of a short run, on images that it makes where none are named."""
    data, model = config.data, config.model
    if data.path is None:
        num_images = max(64, 4 * config.train.global_batch_size)  # each epoch's end waits for the GPU
        data = replace(data, made_images=num_images, made_size=round(config.augment.size * 8 / 7))
        model = replace(model, num_classes=model.num_classes or IMAGENET_CLASSES)
    return replace(
        config,
        data=data,
        model=model,
        train=replace(config.train, norm_images=0),
        validation=replace(config.validation, every_epochs=0, size=32, resize=32),
    )


if __name__ == "__main__":
    run_script("resnet50")
