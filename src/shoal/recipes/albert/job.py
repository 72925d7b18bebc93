"""What a pretraining job is made of, built in the order in which it depends on each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoal.data.examples import ExampleConfig, ExampleReader
from shoal.data.shards import TextShards
from shoal.data.steps import Share
from shoal.decide.batch import BatchPlan, plan_batch
from shoal.models.albert import AlbertPretraining, load_transformers_weights
from shoal.optim.schedules import Schedule
from shoal.recipes.albert.config import AlbertPretrainConfig
from shoal.train.checkpoint import Checkpointer, load_model
from shoal.train.clock import StepClock
from shoal.train.config import as_tree, required
from shoal.train.gradients import data_parallel
from shoal.train.optimizers import build_optimizer
from shoal.train.precision import LossScale, Precision, choose_precision
from shoal.train.world import World


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that the steps below share; built once, changed only by what it holds."""

    config: AlbertPretrainConfig
    world: World
    batch: BatchPlan
    precision: Precision
    train_reader: ExampleReader
    held_out_reader: ExampleReader
    model: AlbertPretraining
    ddp: DistributedDataParallel
    optimizer: Optimizer
    schedule: Schedule
    scale: LossScale
    clock: StepClock
    checkpointer: Checkpointer

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint holds; the data's state is the one integer ``samples``."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "loss_scale": self.scale.state_dict(),
            "samples": step * self.batch.global_batch_size,
            "config": as_tree(self.config),
        }


def build(config: AlbertPretrainConfig, world: World) -> Job:
    """Open the data, make the model, the optimizer and what surrounds them."""
    batch = plan_batch(
        global_batch_size=config.train.global_batch_size,
        num_workers=world.num_workers,
        micro_batch_size=config.train.micro_batch_size,
    )
    precision = choose_precision(config.train.precision, world.device)
    clock = StepClock(world.device)
    train_reader, held_out_reader = open_data(config, verifies=world.is_main)
    model = build_model(config, world)
    ddp = data_parallel(model, world, config.distributed, clock)
    optim = config.optim
    return Job(
        config=config,
        world=world,
        batch=batch,
        precision=precision,
        train_reader=train_reader,
        held_out_reader=held_out_reader,
        model=model,
        ddp=ddp,
        optimizer=build_optimizer(model.named_parameters(), optim),
        schedule=Schedule(
            base=optim.learning_rate,
            end=optim.end_learning_rate,
            warmup_steps=optim.warmup_steps,
            total_steps=config.train.total_steps,
            power=optim.power,
            decay_from=optim.decay_from,
        ),
        scale=LossScale(enabled=precision.name == "fp16", static=config.train.loss_scale),
        clock=clock,
        checkpointer=Checkpointer(required(config.run.dir), keep=config.run.keep_checkpoints),
    )


def open_data(config: AlbertPretrainConfig, *, verifies: bool = True) -> tuple[ExampleReader, ExampleReader]:
    """Return the readers of the training and the held-out examples; ``verifies`` reads every byte once."""
    data = config.data
    examples = ExampleConfig(
        max_seq_length=data.max_seq_length,
        max_predictions_per_seq=data.max_predictions_per_seq,
        mask_prob=data.mask_prob,
        max_ngram=data.max_ngram,
        short_seq_prob=data.short_seq_prob,
        seed=config.train.seed,
    )
    verify = data.verify if verifies else "sizes"
    train, held_out = (
        TextShards(required(data.path), split, verify=verify) for split in ("train", "validation")
    )
    train.manifest.check_vocabulary(config.model.vocab_size)
    return ExampleReader(train, examples), ExampleReader(held_out, examples)


def build_model(config: AlbertPretrainConfig, world: World) -> AlbertPretraining:
    """Make the model with the same weights on every worker, from where the settings say."""
    torch.manual_seed(config.train.seed)
    model = AlbertPretraining(config.model)
    if config.model.load_from == "transformers":
        load_transformers_weights(model, required(config.model.checkpoint_path))
    elif config.model.load_from == "checkpoint":
        load_model(required(config.model.checkpoint_path), model)
    model.to(world.device)
    if config.train.compile if config.train.compile is not None else world.device.type == "cuda":
        model.compile()
    return model


def share_of(job: Job) -> Share:
    """Return which part of each global batch is this worker's."""
    return Share(
        global_batch_size=job.batch.global_batch_size,
        micro_batch_size=job.batch.micro_batch_size,
        rank=job.world.place.rank,
        num_workers=job.world.num_workers,
    )
