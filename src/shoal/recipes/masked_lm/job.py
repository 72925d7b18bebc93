"""What a pretraining job is made of, built in the order in which it depends on each other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from shoal.data.steps import DataShard
from shoal.data.text.examples import ExampleConfig, ExampleReader
from shoal.data.text.shards import TextShards
from shoal.decide.batch import BatchPlan, plan_batch
from shoal.models.pretraining import Pretraining
from shoal.recipes.masked_lm.config import Phase, PretrainConfig
from shoal.train.checkpoint import Checkpointer, Restored
from shoal.train.clock import StepClock
from shoal.train.config import as_tree, required
from shoal.train.gradients import DataParallel, data_parallel
from shoal.train.optimizers import build_optimizer
from shoal.train.precision import LossScale, Precision, choose_precision
from shoal.train.step import Trained
from shoal.train.world import World


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that the steps of a phase share; changed only by what it holds."""

    config: PretrainConfig
    phase: Phase
    world: World
    batch: BatchPlan
    precision: Precision
    train_reader: ExampleReader
    held_out_reader: ExampleReader
    model: Pretraining
    trained: Trained
    checkpointer: Checkpointer

    @property
    def ddp(self) -> DataParallel:
        return self.trained.ddp

    @property
    def clock(self) -> StepClock:
        return self.trained.clock

    @property
    def scale(self) -> LossScale:
        return self.trained.scale

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint holds; the data's state is the one integer ``samples``."""
        return {
            "model": self.model,
            "optimizer": self.trained.optimizer,
            **self.ddp.wire_state(),
            "loss_scale": self.scale.state_dict(),
            "samples": self.phase.samples(step),
            "config": as_tree(self.config),
        }


def build(config: PretrainConfig, world: World, model: Pretraining) -> Job:
    """Open the data and make what surrounds ``model``, for the first phase."""
    phase = config.phases[0]
    precision = choose_precision(config.train.precision, world.device)
    clock = StepClock(world.device)
    train_reader, held_out_reader = open_data(config, phase, verifies=world.is_main)
    ddp = data_parallel(model, world, config.distributed, clock)
    return Job(
        config=config,
        phase=phase,
        world=world,
        batch=batch_of(phase, world.num_workers),
        precision=precision,
        train_reader=train_reader,
        held_out_reader=held_out_reader,
        model=model,
        trained=Trained(
            world=world,
            ddp=ddp,
            optimizer=build_optimizer(model.named_parameters(), config.optim),
            scale=LossScale(enabled=precision.name == "fp16", static=config.train.loss_scale),
            clock=clock,
        ),
        checkpointer=Checkpointer(required(config.run.dir), keep=config.run.keep_checkpoints),
    )


def restore(job: Job) -> Restored | None:
    """Load the newest good checkpoint of the run, if there is one."""
    restored = job.checkpointer.restore(job.state(0))
    if restored:
        job.scale.load_state_dict(restored.values["loss_scale"])
    return restored


def enter_phase(job: Job, phase: Phase, *, after_step: int) -> Job:
    """Return the job of ``phase`` with the weights as they are after ``after_step``.

    A phase begins with a fresh optimizer and loss scale; within it those of ``job`` go on.
    """
    if phase == job.phase:
        return job
    config = job.config
    train_reader, held_out_reader = open_data(config, phase, verifies=False)
    trained = job.trained
    if after_step == phase.steps_before:
        trained = replace(
            trained,
            optimizer=build_optimizer(job.model.named_parameters(), config.optim),
            scale=LossScale(enabled=job.precision.name == "fp16", static=config.train.loss_scale),
        )
    return replace(
        job,
        phase=phase,
        batch=batch_of(phase, job.world.num_workers),
        train_reader=train_reader,
        held_out_reader=held_out_reader,
        trained=trained,
    )


def batch_of(phase: Phase, num_workers: int) -> BatchPlan:
    """Return how the global batch of a phase is computed.

    Raises:
        UsageError: the sizes do not divide.
    """
    return plan_batch(
        global_batch_size=phase.global_batch_size,
        num_workers=num_workers,
        micro_batch_size=phase.micro_batch_size,
        section=phase.section,
    )


def open_data(
    config: PretrainConfig, phase: Phase, *, verifies: bool = True
) -> tuple[ExampleReader, ExampleReader]:
    """Return the readers of the training and the held-out examples; ``verifies`` reads every byte once."""
    data = config.data
    examples = ExampleConfig(
        max_seq_length=phase.max_seq_length,
        max_predictions_per_seq=phase.max_predictions_per_seq,
        mask_prob=data.mask_prob,
        max_ngram=data.max_ngram,
        whole_words=data.whole_words,
        pairs="order" if config.sentence_task == "sop" else "next",
        short_seq_prob=data.short_seq_prob,
        seed=config.train.seed,
    )
    verify = data.verify if verifies else "sizes"
    train, held_out = (
        TextShards(required(data.path), split, verify=verify) for split in ("train", "validation")
    )
    train.manifest.check_vocabulary(config.model.vocab_size)
    return ExampleReader(train, examples), ExampleReader(held_out, examples)


def share_of(job: Job) -> DataShard:
    """Return which part of each global batch is this worker's."""
    return DataShard(
        global_batch_size=job.batch.global_batch_size,
        micro_batch_size=job.batch.micro_batch_size,
        rank=job.world.place.rank,
        num_workers=job.world.num_workers,
    )
