"""What a training on images is made of, whichever the recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.data.loader import LoaderConfig
from shoal.data.steps import DataShard, SizedReader
from shoal.decide.order import Order
from shoal.models.resnet import norms_of, running_statistics
from shoal.recipes.images import ImageTrainConfig
from shoal.recipes.mask_rcnn.images_plan import ImagePlan
from shoal.train.checkpoint import Checkpointer, Restored
from shoal.train.clock import StepClock
from shoal.train.config import as_tree
from shoal.train.gradients import DataParallel, LossScale, Precision, data_parallel
from shoal.train.optimizers import build_optimizer
from shoal.train.step import Trained
from shoal.train.world import World


@dataclass(frozen=True, kw_only=True)
class ImageJob:
    """What the steps share; built once, changed only by what it holds."""

    config: ImageTrainConfig
    world: World
    plan: ImagePlan
    precision: Precision
    train_reader: SizedReader
    order: Order
    """Of the training images."""
    model: nn.Module
    trained: Trained
    checkpointer: Checkpointer

    @property
    def ddp(self) -> DataParallel:
        return self.trained.ddp

    @property
    def clock(self) -> StepClock:
        return self.trained.clock

    @property
    def share(self) -> DataShard:
        """Which part of each global batch is this worker's."""
        return DataShard(
            global_batch_size=self.plan.batch.global_batch_size,
            micro_batch_size=self.plan.batch.micro_batch_size,
            rank=self.world.place.rank,
            num_workers=self.world.num_workers,
        )

    @property
    def loader(self) -> LoaderConfig:
        return LoaderConfig(num_loader_processes=self.config.data.loader_processes)

    @property
    def statistics(self) -> list[torch.Tensor]:
        """The running means and variances of the model's norms that learn."""
        return running_statistics(norms_of(self.model))

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint holds; the data's state is the one integer ``samples``."""
        return {
            "model": self.model,
            "optimizer": self.trained.optimizer,
            **self.ddp.wire_state(),
            "loss_scale": self.trained.scale.state_dict(),
            "samples": self.plan.samples(step),
            "config": as_tree(self.config),
        }


def trained_parts(config: ImageTrainConfig, model: nn.Module, world: World, precision: Precision) -> Trained:
    """Return what trains ``model``: the average of gradients, the optimizer, the loss scale, the clock."""
    clock = StepClock(world.device)
    return Trained(
        world=world,
        ddp=data_parallel(model, world, config.distributed, clock),
        optimizer=build_optimizer(model.named_parameters(), config.optim),
        scale=LossScale(enabled=precision.name == "fp16", static=config.train.loss_scale),
        clock=clock,
    )


def restore(job: ImageJob) -> Restored | None:
    """Load the newest good checkpoint of the run, if there is one."""
    restored = job.checkpointer.restore(job.state(0))
    if restored:
        job.trained.scale.load_state_dict(restored.values["loss_scale"])
    return restored
