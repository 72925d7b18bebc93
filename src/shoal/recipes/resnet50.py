"""Trains ResNet-50 (He et al. 2015, arXiv 1512.03385), or another residual network, to classify images.

    python -m shoal.recipes.resnet50 --preset tiny
    torchrun --nproc-per-node 8 -m shoal.recipes.resnet50 --preset imagenet-16k --data.path /data/imagenet
    shoal train resnet50 --preset tiny --workers 2

In an optimizer step each worker takes its part of the global batch as micro-batches, which threads have
decoded and augmented ahead. Losses are sums, divided by the number of images of the global batch. The last
backward averages the gradients over the workers. Leaving the step updates the weights, and averages the
running statistics of norms over the workers. Norms use the statistics of one micro-batch, so its size is part
of the recipe, and the number of workers is not.

The run is defined in epochs; its optimizer steps follow from the batch and are printed. The settings are in
``resnet50_config.py``.
"""

# Annotations are types here, not texts, and what needs torch is imported in functions: `--help` is quick.

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.env.worker import WorkerEnv
from shoal.errors import UsageError
from shoal.optim.lr_schedules import learning_rate, set_learning_rate
from shoal.recipes import Sample, images, run_script
from shoal.recipes.model_source import NETWORK
from shoal.recipes.resnet50_config import NUM_CLASSES_MADE, ResNetTrainConfig, count_classes, make_plan
from shoal.train.config import (
    required,
    settings_lines,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.data.loader import Batch
    from shoal.data.steps import Reader
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

    from shoal.data.images.mixing import mix, mixup_weight
    from shoal.recipes import resnet50_data as data
    from shoal.recipes.resnet50_score import TOP1, evaluate
    from shoal.train.optimizers import build_optimizer
    from shoal.train.run import Run
    from shoal.train.weight_averaging import WeightAverage

    with Run.open(config=config, recipe="resnet50", immutable=IMMUTABLE, worker=worker) as run:
        # ----------------------------------------------------------------------------------------- data
        train, held_out = data.open_images(config, run)
        num_classes = count_classes(config, len(train.manifest.classes))
        plan = make_plan(config, num_examples=len(train), num_workers=run.world.num_workers)
        source, images_of = data.open_training(config, run, train)
        held_out_reader = data.open_held_out(config, run, held_out)

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
                scored = data.with_norms_of(scored, config, run, train)
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
            if average:
                average.update(model, run.step)
            if run.due(validation_ends, evaluation=True):
                scored = score()
            if run.due(epoch_ends):
                run.save()
        if scored is None and not run.stopped and not run.is_over:  # a kill came before the end
            scored = score()
        return export(config, run, scored, num_classes, train.manifest.classes)


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


# ------------------------------------------------------------------------------------------------- export


def export(
    config: ResNetTrainConfig,
    run: "Run",
    scored: "nn.Module | None",
    num_classes: int,
    classes: tuple[str, ...],
) -> int:
    """Write the network that was scored with the form of its inputs; return the exit code of the run."""
    from shoal.recipes.resnet50_export import Exported, write_export
    from shoal.recipes.resnet50_score import TOP1

    directory = required(run.directory) / NETWORK

    def write(_: Path) -> None:
        made = Exported(
            model=required(scored),
            network=replace(config.model, num_classes=num_classes),
            classes=classes,
            size=config.validation.size,
            resize=config.validation.resize,
            mirror=config.validation.mirror,
            mean=config.augment.mean,
            std=config.augment.std,
        )
        write_export(made, directory)

    def verdict(scores: Any) -> str:
        top1, count = scores["validation"].metrics[TOP1], scores["validation"].num_samples
        return (
            f"top-1 {100 * top1:.2f} %: {round(top1 * count):,} of {count:,} held-out images; "
            f"the model is in {directory}"
        )

    return run.finish(write, verdict)


# ------------------------------------------------------------------------------------------------- dry run


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

    from shoal.recipes.workloads import memory_of, profile_of

    profile = profile_of(sample(replace(config, model=replace(config.model, num_classes=num_classes))))
    return [
        *settings_lines(config),
        f"batch        {plan.batch}",
        *plan.lines(),
        f"held out     {num_held_out:,} images of {found:,} classes",
        f"parameters   {profile.num_trainable:,}",
        f"memory       {memory_of(profile, config, plan.batch.micro_batch_size)}",
    ]


# ------------------------------------------------------------------------------------------------- sample

IMAGENET_CLASSES = 1000
"""Classes of a model whose data is not named."""


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
    )


def trial(config: ResNetTrainConfig, folder: Path) -> ResNetTrainConfig:
    """Return the settings of a short run, on images that it makes where none are named."""
    data, model = config.data, config.model
    if data.path is None:
        num_images = max(64, config.train.global_batch_size)
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
