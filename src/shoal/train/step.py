"""One optimizer step of a data-parallel model, and the line about it in the record."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.decide.order import BlockShuffle, samples
from shoal.decide.rng import Stream, random_keys
from shoal.optim.lr_schedules import set_learning_rate
from shoal.record import Step
from shoal.train.clock import StepClock
from shoal.train.config import OptimizerConfig
from shoal.train.gradients import DataParallel, LossScale, MicroBatches, accumulate, average_and_clip, norm_of
from shoal.train.window import StepWindow, peak_memory_bytes
from shoal.train.world import World


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a step changes and what it goes through."""

    world: World
    ddp: DataParallel
    optimizer: Optimizer
    scale: LossScale
    clock: StepClock


def take_step(
    trained: Trained,
    micro_batches: MicroBatches,
    compute_loss: Callable[[Any], Tensor],
    optim: OptimizerConfig,
    *,
    learning_rate: float,
    dropout_seed: int,
) -> float:
    """Do one optimizer step; return the norm of its gradient, not finite if it was skipped.

    Args:
        micro_batches: this worker's part of the global batch.
        compute_loss: runs the model on one and returns its part of the loss, times the loss scale.
        optim: how to clip.
        dropout_seed: seed of torch's random draws in this step, so that no generator's state need be saved.
    """
    torch.manual_seed(dropout_seed)
    set_learning_rate(trained.optimizer, learning_rate)
    accumulate(trained.ddp, micro_batches, compute_loss, trained.clock, average=optim.clip == "global")
    grad_norm = average_and_clip(
        trained.ddp.parameters(),
        trained.world,
        max_norm=optim.max_grad_norm,
        per_worker=optim.clip == "worker",
        loss_scale=trained.scale.value,
        clock=trained.clock,
    )
    if math.isfinite(grad_norm):
        trained.optimizer.step()
    trained.scale.update(finite=math.isfinite(grad_norm))
    trained.optimizer.zero_grad()
    trained.clock.mark("optimizer")
    return grad_norm


def dropout_seed(seed: int, step: int, rank: int) -> int:
    """Return the seed of a worker's random draws in a step."""
    return int(random_keys(seed, Stream.DROPOUT, step, rank).item())


def sample_names(
    first: int, count: int, num_examples: int, seed: int, blocks: BlockShuffle | None = None
) -> list[str]:
    """Return which examples ``count`` samples from ``first`` on are, as epoch:index."""
    epochs, indices = samples(first, count, num_examples, seed, blocks)
    return [f"{epoch}:{index}" for epoch, index in zip(epochs, indices, strict=True)]


def step_row(
    trained: Trained,
    window: StepWindow,
    *,
    step: int,
    samples: int,
    global_batch_size: int,
    learning_rate: float,
    loss: float,
    metrics: dict[str, float],
) -> Step:
    """Return the line of the record about the steps in ``window``, the last of which is ``step``."""
    clock = trained.clock
    return Step(
        step=step,
        samples=samples,
        loss=loss,
        metrics=metrics,
        learning_rate=learning_rate,
        loss_scale=trained.scale.value,
        grad_norm=window.mean_grad_norm(),
        weight_norm=norm_of(p.detach() for p in trained.ddp.parameters()),
        samples_per_s=global_batch_size / clock.step_s(),
        step_s=clock.step_s(),
        parts_s=clock.parts_s(),
        num_skipped=window.num_skipped(),
        peak_memory_bytes=peak_memory_bytes(trained.world.device),
    )
