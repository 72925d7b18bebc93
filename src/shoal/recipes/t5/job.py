"""What a T5 pretraining is made of, built in the order in which it depends on each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from shoal.data.loader import Batch
from shoal.data.manifest import Manifest
from shoal.data.steps import DataShard
from shoal.data.text.shards import TextShards
from shoal.data.text.span_corruption import SpanReader
from shoal.decide.batch import BatchPlan
from shoal.models.directory import copy_weights
from shoal.models.t5 import T5, new_t5
from shoal.optim.sharded import model_norm
from shoal.pipelining.api import make_mesh, pipeline
from shoal.pipelining.runtime import Pipeline
from shoal.recipes.t5.config import T5PretrainConfig
from shoal.recipes.t5.start import plan_of
from shoal.train.checkpoint import Checkpointer, Restored, load_model
from shoal.train.clock import StepClock
from shoal.train.config import as_tree, required
from shoal.train.gradients import Precision, choose_precision
from shoal.train.optimizers import build_optimizer
from shoal.train.world import World

MODEL_INPUTS = ("input_ids", "labels")
"""What of a batch goes to the model."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that the steps share; built once, changed only by what it holds."""

    config: T5PretrainConfig
    world: World
    batch: BatchPlan
    share: DataShard
    """Which part of each global batch is this replica's; all stages of a replica read the same."""
    precision: Precision
    reader: SpanReader
    held_out_reader: SpanReader
    mesh: DeviceMesh
    """Replicas × stages: the axes ``dp`` and ``pp``."""
    stage: Pipeline
    """This worker's part of the model."""
    optimizer: Optimizer
    clock: StepClock
    checkpointer: Checkpointer

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint holds; the data's state is the one integer ``samples``."""
        return {
            "model": self.stage.module,
            "optimizer": self.optimizer,
            "samples": step * self.batch.global_batch_size,
            "config": as_tree(self.config),
        }

    def norm(self, *, gradients: bool) -> float:
        """Return the Euclidean norm of all stages' gradients, or weights; alike on all workers."""
        owned = [p for name, p in self.stage.module.named_parameters() if self.stage.owned(name)]
        if gradients:
            owned = [parameter for parameter in owned if parameter.grad is not None]
        tensors = [parameter.grad if gradients else parameter.detach() for parameter in owned]
        group = self.mesh["pp"].get_group() if self.mesh["pp"].size() > 1 else None
        return model_norm(owned, tensors, group=group, device=self.world.device)


def build(config: T5PretrainConfig, world: World) -> Job:
    """Open the data, make the model and what surrounds it."""
    reader, held_out_reader = open_data(config, verifies=world.is_main)
    batch = plan_of(config, world.num_workers)
    share = DataShard(
        global_batch_size=batch.global_batch_size,
        micro_batch_size=batch.worker_batch_size,  # one batch a step; the stage cuts it into micro-batches
        rank=world.place.rank // config.parallel.pipeline,
        num_workers=batch.num_workers,
    )
    mesh = make_mesh(world.device.type, pipeline=config.parallel.pipeline, data=batch.num_workers)
    stage = make_stage(config, world, mesh, batch, reader)
    return Job(
        config=config,
        world=world,
        batch=batch,
        share=share,
        precision=choose_precision(config.train.precision, world.device),
        reader=reader,
        held_out_reader=held_out_reader,
        mesh=mesh,
        stage=stage,
        optimizer=build_optimizer(stage.module.named_parameters(), config.optim),
        clock=StepClock(world.device),
        checkpointer=Checkpointer(required(config.run.dir), keep=config.run.keep_checkpoints),
    )


def make_stage(
    config: T5PretrainConfig, world: World, mesh: DeviceMesh, batch: BatchPlan, reader: SpanReader
) -> Pipeline:
    """Make the model and keep this worker's part of it: all of it where the pipeline has one worker."""
    parallel = config.parallel
    example = reader.batch(0, np.arange(batch.worker_batch_size) % reader.num_examples)
    return pipeline(
        make_model(config, reader.shards.manifest),
        {name: torch.from_numpy(example[name]) for name in MODEL_INPUTS},
        mesh=mesh["pp"],
        data_parallel=mesh["dp"],
        microbatches=batch.accumulation_steps,
        schedule=parallel.schedule,
        virtual_stages=parallel.virtual_stages,
        optimize=parallel.optimize,
        shard=parallel.shard,
        seed=config.train.seed,
        device=world.device,
    )


def restore(job: Job) -> Restored | None:
    """Load the newest good checkpoint of the run, if there is one, whatever layout wrote it."""
    restored = job.checkpointer.restore(job.state(0))
    if restored:
        job.stage.step_number = restored.step  # dropout depends on it
    return restored


def open_data(config: T5PretrainConfig, *, verifies: bool = True) -> tuple[SpanReader, SpanReader]:
    """Return the readers of the training and the held-out examples; ``verifies`` reads every byte once."""
    verify = config.data.verify if verifies else "sizes"
    train, held_out = (
        TextShards(required(config.data.path), split, verify=verify) for split in ("train", "validation")
    )
    config.check_vocabulary(train.manifest.vocab_size)
    return SpanReader(train, config.spans()), SpanReader(held_out, config.spans())


def make_model(config: T5PretrainConfig, manifest: Manifest) -> T5:
    """Return the model with the same weights on every worker, from where the settings say.

    Raises:
        UsageError: the weights that it shall begin with are not there, or are of another model.
        ShoalError: they cannot be read.
    """
    torch.manual_seed(config.train.seed)
    model = new_t5(config.model, pad_id=manifest.pad_id, end_id=manifest.sep_id)
    if config.model.load_from == "transformers":
        copy_weights(model, required(config.model.checkpoint_path))
    elif config.model.load_from == "checkpoint":
        load_model(required(config.model.checkpoint_path), model)
    return model


def model_inputs(job: Job, batch: Batch) -> Batch:
    """Return what of a batch the model takes, on the device."""
    return {name: batch[name].to(job.world.device, non_blocking=True) for name in MODEL_INPUTS}
