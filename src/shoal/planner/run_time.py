"""Adds up a whole run: start, steps, evaluations, checkpoints, and its cost.

    time to train = start + steps · step + evaluations · (forward passes + pause) + checkpoints

Published times to train are far above what throughput alone gives: there are more epochs at a larger batch,
and evaluations and start-up do not shrink with the number of hosts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.planner.convergence import Convergence
from shoal.planner.hardware import Machines
from shoal.planner.step_time import KERNEL_S
from shoal.planner.workload import Workload

CHECKPOINT_BYTES = 12
"""Bytes per parameter: fp32 weight and two moments."""
STAGING_BYTES_PER_S = 10e9
"""From a device to its host's memory, which a step waits for; files are written in the background."""


@dataclass(frozen=True, kw_only=True)
class RunTime:
    """Time of a run by cause, in seconds."""

    start_s: float
    steps_s: float
    evaluations_s: float
    checkpoints_s: float
    num_steps: int
    num_samples: float

    @property
    def total_s(self) -> float:
        return self.start_s + self.steps_s + self.evaluations_s + self.checkpoints_s


def run_time(
    workload: Workload,
    convergence: Convergence,
    workers: Machines,
    *,
    global_batch: int,
    step_s: float,
    achieved_flops: float,
    per_replica: int = 1,
    start_s: float = 0.0,
    checkpoint_every_steps: int | None = None,
) -> RunTime:
    """Predict a run to the target of ``convergence``, which gives epochs for the global batch."""
    samples = convergence.samples(global_batch)
    num_steps = math.ceil(samples / global_batch)
    epochs = samples / convergence.samples_per_epoch
    num_evaluations = math.ceil(epochs / convergence.evaluate_every_epochs) if convergence.points else 0
    each_s = evaluation_s(
        workload, convergence, workers, achieved_flops=achieved_flops, per_replica=per_replica
    )
    checkpoints_s = 0.0
    if checkpoint_every_steps:
        staged = workload.num_parameters * CHECKPOINT_BYTES / max(workers.num_accelerators, 1)
        checkpoints_s = num_steps // checkpoint_every_steps * staged / STAGING_BYTES_PER_S
    return RunTime(
        start_s=start_s,
        steps_s=num_steps * step_s,
        evaluations_s=num_evaluations * each_s,
        checkpoints_s=checkpoints_s,
        num_steps=num_steps,
        num_samples=samples,
    )


def evaluation_s(
    workload: Workload,
    convergence: Convergence,
    workers: Machines,
    *,
    achieved_flops: float,
    per_replica: int = 1,
) -> float:
    """Return the time of one evaluation: forward passes of the fullest replica, and the pause around it."""
    if not convergence.evaluation_samples:
        return 0.0
    most = math.ceil(convergence.evaluation_samples * per_replica / workers.num_accelerators)
    each_s = workload.forward_flops / (achieved_flops * per_replica)
    forward_s = KERNEL_S * workload.num_kernels / 3 + most * each_s
    return convergence.evaluation_pause_s + forward_s


def cost(total_s: float, workers: Machines, helpers: Machines | None = None) -> float | None:
    """Return dollars for the hosts over the whole run, or None where one of them has no price."""
    prices = [machines.price_per_hour for machines in (workers, helpers) if machines]
    known = [price for price in prices if price is not None]
    return sum(known) * total_s / 3600 if len(known) == len(prices) else None
