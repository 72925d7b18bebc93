"""What a finetuning is made of, built in the order in which it depends on each other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from shoal import record
from shoal.data.loader import Batch
from shoal.data.text.task_batches import Sequences, TaskShard
from shoal.decide.batch import BatchPlan, plan_batch
from shoal.errors import UsageError
from shoal.optim.lr_schedules import Schedule
from shoal.recipes.finetune.config import FinetuneConfig
from shoal.train.checkpoint import Checkpointer
from shoal.train.clock import StepClock
from shoal.train.config import as_tree
from shoal.train.gradients import LossScale, Precision, choose_precision, data_parallel
from shoal.train.optimizers import build_optimizer
from shoal.train.step import Trained
from shoal.train.world import World


class Task(Protocol):
    """What tells one task from another; see ``squad``, ``classify`` and ``text_to_text``."""

    @property
    def name(self) -> str: ...

    @property
    def data(self) -> Sequences: ...

    @property
    def model(self) -> nn.Module: ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Run ``model`` and return the loss summed over the targets of a micro-batch, float32."""

    def sample_name(self, index: int) -> str:
        """Return what a person calls a training sequence."""

    def evaluate(self, job: Job, step: int, out: Path | None) -> list[record.Evaluation]:
        """Evaluate with all workers; the main worker writes files to ``out``, if any, and has the rows."""

    def notes(self) -> list[str]:
        """Return lines about the data for the beginning of the run."""

    def save(self, directory: Path) -> None:
        """Write the model as a transformers directory with its tokenizer."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long the run is, and how a batch is computed."""

    total_steps: int
    warmup_steps: int
    batch: BatchPlan


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that the steps share; built once, changed only by what it holds."""

    config: FinetuneConfig
    world: World
    task: Task
    plan: Plan
    precision: Precision
    trained: Trained
    schedule: Schedule
    checkpointer: Checkpointer | None
    """``None`` for a short finetuning inside a pretraining, which is not continued."""

    @property
    def deal(self) -> TaskShard:
        """How global batches are shared out."""
        return TaskShard(
            global_batch_size=self.plan.batch.global_batch_size,
            micro_batch_size=self.plan.batch.micro_batch_size,
            rank=self.world.place.rank,
            num_workers=self.world.num_workers,
            seed=self.config.train.seed,
        )

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint holds; the data's state is the one integer ``samples``."""
        return {
            "model": self.task.model,
            "optimizer": self.trained.optimizer,
            **self.trained.ddp.wire_state(),
            "loss_scale": self.trained.scale.state_dict(),
            "samples": step * self.plan.batch.global_batch_size,
            "config": as_tree(self.config),
        }


def make_plan(config: FinetuneConfig, *, num_sequences: int, num_workers: int) -> Plan:
    """Return the steps that the settings mean for so much data.

    Raises:
        UsageError: the warm-up is longer than the run, or the batch does not divide.
    """
    train, optim = config.train, config.optim
    total = train.total_steps or math.ceil(train.epochs * num_sequences / train.global_batch_size)
    warmup = optim.warmup_steps or round(optim.warmup_share * total)
    if not 0 <= warmup <= total:
        raise UsageError(
            f"optim.warmup_steps {warmup} must lie between 0 and the {total} steps of the run; shorten it or "
            "train longer"
        )
    batch = plan_batch(
        global_batch_size=train.global_batch_size,
        num_workers=num_workers,
        micro_batch_size=train.micro_batch_size,
    )
    return Plan(total_steps=total, warmup_steps=warmup, batch=batch)


def build(config: FinetuneConfig, world: World, task: Task, *, checkpoints: Path | None) -> Job:
    """Make the optimizer and what surrounds it; ``checkpoints`` is the run directory, if there is one."""
    plan = make_plan(config, num_sequences=len(task.data), num_workers=world.num_workers)
    precision = choose_precision(config.train.precision, world.device)
    clock = StepClock(world.device)
    task.model.to(world.device)
    if config.train.compile:
        task.model.compile(dynamic=True)
    optim = config.optim
    return Job(
        config=config,
        world=world,
        task=task,
        plan=plan,
        precision=precision,
        trained=Trained(
            world=world,
            ddp=data_parallel(task.model, world, config.distributed, clock),
            optimizer=build_optimizer(task.model.named_parameters(), optim),
            scale=LossScale(enabled=precision.name == "fp16", static=config.train.loss_scale),
            clock=clock,
        ),
        schedule=Schedule(
            base=optim.learning_rate,
            end=optim.end_learning_rate,
            warmup_steps=plan.warmup_steps,
            constant_steps=optim.constant_steps,
            total_steps=plan.total_steps,
            power=optim.power,
            decay_from=optim.decay_from,
        ),
        checkpointer=Checkpointer(checkpoints, keep=config.run.keep_checkpoints) if checkpoints else None,
    )
