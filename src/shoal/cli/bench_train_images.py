"""A worker of ``shoal bench train resnet50``: made images, the recipe's own job and steps, a clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from shoal.bench.step_timing import TrainBench, TrainResult
from shoal.cli.bench_train_clock import result_of, timed
from shoal.recipes.resnet.config import ResNetTrainConfig
from shoal.train.world import World

_MICRO_BATCH = 64
"""Images where neither the command nor the preset says how many a worker computes at once."""
_NUM_CLASSES = 1000
"""ImageNet's, so that the last layer has its size."""
_NUM_IMAGES = 64
"""At least so many are made; a step that needs more sees them again, varied anew."""
_LARGER = 8 / 7
"""Of a made image's side over that of what the model sees: 256 over 224."""


def prepared(
    config: ResNetTrainConfig, folder: Path, what: TrainBench, *, num_workers: int
) -> ResNetTrainConfig:
    """Return the settings of a run over made images that is long enough for the steps that are timed."""
    micro = what.batch or config.train.micro_batch_size or _MICRO_BATCH
    batch = micro * what.accumulate * num_workers
    num_images = max(_NUM_IMAGES, batch)
    num_steps = what.warm_up + what.steps + 1
    train = replace(
        config.train,
        micro_batch_size=micro,
        global_batch_size=batch,
        total_epochs=max(num_steps * batch / num_images, 1.0),
    )
    return replace(
        config,
        data=replace(
            config.data, path=None, made_images=num_images, made_size=round(_LARGER * config.augment.size)
        ),
        model=replace(config.model, num_classes=config.model.num_classes or _NUM_CLASSES),
        train=train,
        optim=replace(config.optim, warmup_epochs=0.0),
        run=replace(config.run, name="bench", dir=folder / "run"),
    )


def measure_images(config: ResNetTrainConfig, world: World, what: TrainBench) -> TrainResult:
    """Train on made images; return what the timed steps took."""
    import torch

    from shoal.models.profile import profile_step
    from shoal.models.resnet import new_resnet
    from shoal.recipes.images.step import agree, batches_after
    from shoal.recipes.resnet.data import make_images_if_due
    from shoal.recipes.resnet.job import build
    from shoal.recipes.resnet.losses import NUM_SUMS
    from shoal.recipes.resnet.step import take_step, warm_up
    from shoal.train.signals import StopRequest
    from shoal.train.window import Meter

    make_images_if_due(config)
    job = build(config, world)
    warm_up(job)
    meter, stop = Meter.of(config.train, NUM_SUMS), StopRequest()

    def steps() -> Iterator[None]:
        with batches_after(job, 0) as batches:
            for step, micro_batches in batches:
                agree(job, meter, step, stop)
                take_step(job, meter, step, micro_batches)
                yield

    samples_s, parts_s = timed(steps(), job.clock, what)
    with torch.device("meta"):
        model = new_resnet(config.model, config.model.num_classes or _NUM_CLASSES).train()
        images = torch.empty(2, 3, config.augment.size, config.augment.size)
    profile = profile_step(model, lambda: model(images).sum(), num_samples=len(images))
    return result_of(
        world,
        name=config.model.network,
        unit="images",
        sequence_length=1,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        global_batch=config.train.global_batch_size,
        micro_batch=job.plan.batch.micro_batch_size,
        precision=job.precision.name,
        samples_s=samples_s,
        parts_s=parts_s,
        flops=3 * sum(flops for _, _, flops in profile.layers) / len(images),
    )
