"""What a training is made of, built in the order in which it depends on each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.data.images.cache import CacheConfig
from shoal.data.images.reader import ImageReader
from shoal.data.images.shards import ImageShards
from shoal.data.images.threads import default_decode_threads
from shoal.data.images.transform import CentreTransform, TrainTransform
from shoal.data.loader import LoaderConfig
from shoal.data.steps import Share
from shoal.decide.order import BlockShuffle
from shoal.models.resnet import new_resnet, norms_of, running_statistics
from shoal.recipes.resnet.config import ResNetTrainConfig
from shoal.recipes.resnet.data import location_of
from shoal.recipes.resnet.plan import Plan, make_plan
from shoal.train.checkpoint import Checkpointer, Restored
from shoal.train.clock import StepClock
from shoal.train.config import as_tree, required
from shoal.train.ema import WeightAverage
from shoal.train.gradients import DataParallel, data_parallel
from shoal.train.optimizers import build_optimizer
from shoal.train.parallel_config import parse_bytes
from shoal.train.precision import LossScale, Precision, choose_precision
from shoal.train.step import Trained
from shoal.train.world import World


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that the steps share; built once, changed only by what it holds."""

    config: ResNetTrainConfig
    world: World
    plan: Plan
    precision: Precision
    train_reader: ImageReader
    held_out_reader: ImageReader
    model: nn.Module
    trained: Trained
    average: WeightAverage | None
    checkpointer: Checkpointer

    @property
    def ddp(self) -> DataParallel:
        return self.trained.ddp

    @property
    def clock(self) -> StepClock:
        return self.trained.clock

    @property
    def share(self) -> Share:
        """Which part of each global batch is this worker's."""
        return Share(
            global_batch_size=self.plan.batch.global_batch_size,
            micro_batch_size=self.plan.batch.micro_batch_size,
            rank=self.world.place.rank,
            num_workers=self.world.num_workers,
        )

    @property
    def blocks(self) -> BlockShuffle | None:
        """The order for slow storage, where that is asked for."""
        data = self.config.data
        if not data.block_size:
            return None
        return BlockShuffle(block_size=data.block_size, blocks_in_window=data.blocks_in_window)

    @property
    def loader(self) -> LoaderConfig:
        return LoaderConfig(num_loader_processes=self.config.data.loader_processes)

    @property
    def statistics(self) -> list[torch.Tensor]:
        """The running means and variances of the model's norms."""
        return running_statistics(norms_of(self.model))

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint holds; the data's state is the one integer ``samples``."""
        average = {"average": self.average.model} if self.average else {}
        return {
            "model": self.model,
            **average,
            "optimizer": self.trained.optimizer,
            **self.ddp.wire_state(),
            "loss_scale": self.trained.scale.state_dict(),
            "samples": self.plan.samples(step),
            "config": as_tree(self.config),
        }


def build(config: ResNetTrainConfig, world: World) -> Job:
    """Open the images, make the model and what surrounds it."""
    train_reader, held_out_reader = open_data(config, world)
    precision = choose_precision(config.train.precision, world.device)
    clock = StepClock(world.device)
    model = make_model(config, world)
    return Job(
        config=config,
        world=world,
        plan=make_plan(config, num_examples=train_reader.num_examples, num_workers=world.num_workers),
        precision=precision,
        train_reader=train_reader,
        held_out_reader=held_out_reader,
        model=model,
        trained=Trained(
            world=world,
            ddp=data_parallel(model, world, config.distributed, clock),
            optimizer=build_optimizer(model.named_parameters(), config.optim),
            scale=LossScale(enabled=precision.name == "fp16", static=config.train.loss_scale),
            clock=clock,
        ),
        average=WeightAverage(model, config.train.average_decay) if config.train.average_decay else None,
        checkpointer=Checkpointer(required(config.run.dir), keep=config.run.keep_checkpoints),
    )


def restore(job: Job) -> Restored | None:
    """Load the newest good checkpoint of the run, if there is one."""
    restored = job.checkpointer.restore(job.state(0))
    if restored:
        job.trained.scale.load_state_dict(restored.values["loss_scale"])
    return restored


def make_model(config: ResNetTrainConfig, world: World) -> nn.Module:
    """Return the model with the same weights on every worker, compiled where that is asked for.

    Evaluation calls ``model.forward``, which is never compiled: its last batch is smaller than the others.
    """
    torch.manual_seed(config.train.seed)
    model = new_resnet(config.model, required(config.model.num_classes))
    form = torch.channels_last if config.train.channels_last else torch.contiguous_format
    model.to(world.device).to(memory_format=form)
    if config.train.compile if config.train.compile is not None else world.device.type == "cuda":
        model.compile(dynamic=False)  # a new side of the images compiles anew
    return model


def open_data(config: ResNetTrainConfig, world: World) -> tuple[ImageReader, ImageReader]:
    """Return the readers of the training and the held-out images; the main worker verifies their bytes."""
    data, augment, validation = config.data, config.augment, config.validation
    cache = None
    if data.cache is not None:
        size = parse_bytes(data.cache_bytes, "data.cache_bytes")
        cache = CacheConfig(directory=data.cache, num_bytes=size, evict=data.block_size > 0)
    verify = data.verify if world.is_main else "sizes"
    location = location_of(config)
    train, held_out = (
        ImageShards(location, split, verify=verify, cache=cache) for split in ("train", "validation")
    )
    threads = data.decode_threads or default_decode_threads(
        world.place.num_local_workers, data.loader_processes
    )
    seed, last = config.train.seed, config.train.channels_last
    centre = CentreTransform(validation.size, validation.resize, mean=augment.mean, std=augment.std)
    return (
        ImageReader(
            train,
            TrainTransform(augment),
            seed=seed,
            threads=threads,
            channels_last=last,
            on_bad=data.on_bad,
        ),
        ImageReader(held_out, centre, seed=seed, threads=threads, channels_last=last),
    )
