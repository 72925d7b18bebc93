"""Predicts a training for one choice of hosts and layout: steps, the whole run, memory and cost.

    time to train = start + fill + steps · step + evaluations · (forward passes + pause) + checkpoints

Published times to train are far above what throughput alone gives: there are more epochs at a larger batch,
and evaluations and start-up do not shrink with the number of hosts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.decide.footprint import Footprint
from shoal.decide.layout import RESERVED, Layout, footprint_of
from shoal.decide.workload import Workload
from shoal.errors import UsageError
from shoal.planner.convergence import Convergence
from shoal.planner.hardware import Accelerator, Instance, Machines, require_accelerators, shipped
from shoal.planner.step_time import (
    KERNEL_CLOCK_HZ,
    KERNEL_S,
    MEMORY_EFFICIENCY,
    StepTime,
    achieved_flops_of,
    num_replicas,
    step_time,
)

ASSUMED_UTILISATION = 0.35
"""Share of peak without a published or measured throughput: what tuned trainings of transformers reach
(Chowdhery et al. 2022, arXiv 2204.02311, table 3, lists 21 to 46 %)."""
START_S = 120.0
"""Default time from starting the processes to the first step."""
CHECKPOINT_EVERY_STEPS = 1000
"""Default for models without a recipe."""
CHECKPOINT_BYTES = 12
"""Bytes per parameter: fp32 weight and two moments."""
STAGING_BYTES_PER_S = 10e9
"""From a device to its host's memory, which a step waits for; files are written in the background."""
_SAME_CHIP = {"V100-32GB": "V100-SXM3-32GB"}
"""The accelerator whose published throughputs hold for another one too."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a training with one workload and one batch; most have one."""

    workload: Workload
    convergence: Convergence
    """Epochs for the part's global batch."""
    global_batch: int
    achieved_flops: float
    basis: str
    """Source of ``achieved_flops``."""
    precision: str = "fp16"
    """Type in which the model computes."""
    micro_batch: int | None = None
    """Of the settings; None: as :func:`shoal.decide.batch.plan_batch` divides a worker's share."""
    section: str = "train"
    """Section of the settings that has the batch."""


@dataclass(frozen=True, kw_only=True)
class StoredData:
    """Data in a store that hosts read once together, before the first step, into their caches."""

    num_bytes: float
    store_bytes_per_s: float = math.inf
    """Rate at which the store gives them to all hosts together."""
    cache_bytes: float = math.inf
    """Size of each host's cache."""

    def read_once(self, num_hosts: int) -> float:
        """Return the bytes that the store gives until the caches are full: each byte once."""
        return min(self.num_bytes, num_hosts * self.cache_bytes)

    def held(self, num_hosts: int) -> float:
        """Return the bytes that each host receives until then, by :func:`~shoal.decide.cache_policy`.

        All data if they fit, from the store and from its peers; otherwise its part of them.
        """
        if self.num_bytes <= self.cache_bytes:
            return self.num_bytes
        return self.read_once(num_hosts) / num_hosts

    def store_s(self, workers: Machines) -> float:
        """Return the time that the store takes."""
        return self.read_once(workers.count) / self.store_bytes_per_s

    def fill_s(self, workers: Machines) -> float:
        """Return the time until the caches are full, by the store or by the network of each host."""
        return max(self.store_s(workers), self.held(workers.count) / workers.instance.effective_nic)

    def network_share(self, workers: Machines) -> float:
        """Return the share of a host's network that bytes from its peers take until then."""
        from_peers = self.held(workers.count) * (1 - 1 / workers.count)
        return from_peers / workers.instance.effective_nic / self.fill_s(workers)


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training to predict."""

    recipe: str
    parts: tuple[Part, ...]
    start_s: float = START_S
    """From starting the hosts' processes to the first step: communicators, compilation."""
    data: StoredData | None = None
    """Data that are read before the first step; None: they are on the hosts."""
    checkpoint_every_steps: int | None = CHECKPOINT_EVERY_STEPS
    shard_optimizer: bool = False
    """The settings divide the optimizer's state over the replicas; else it is divided where it must be."""
    has_stages: bool = True
    """The model can be divided into stages of a pipeline."""
    has_shards: bool = True
    """All state can be divided over the replicas."""
    has_tensor: bool = True
    """Each layer can be divided, where the workloads have parts."""
    validation_hosts: int = 0
    """Hosts that evaluate beside those that train; the run waits for its last evaluation there."""
    command: tuple[str, ...] = ()
    """Starts it, up to the options that a plan chooses; empty: no recipe trains it."""


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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A layout on given hosts with its predicted step, run, memory and cost, summed over the parts."""

    training: Training
    workers: Machines
    helpers: Machines | None
    layouts: tuple[Layout, ...]
    steps: tuple[StepTime, ...]
    runs: tuple[RunTime, ...]
    memory: Footprint
    """Of the fullest accelerator, in the part that needs most."""
    samples_per_s: float
    """Throughput of the first part."""
    efficiency: float
    """Throughput of the first part over that of as many single hosts that need no network."""
    total_s: float
    dollars: float | None
    """For the hosts over the whole run; None where one of them has no price."""

    @property
    def hosts(self) -> str:
        """The hosts that train, those that evaluate, and the helpers."""
        apart = self.training.validation_hosts
        evaluating = f" + {apart} that evaluate{'s' if apart == 1 else ''}" if apart else ""
        return f"{self.workers}{evaluating}{f' + {self.helpers}' if self.helpers else ''}"

    @property
    def seconds_by_cause(self) -> dict[str, float]:
        """Seconds of the whole run by cause; they add up to ``total_s``."""
        return seconds_by_cause(self.steps, self.runs)


def seconds_by_cause(steps: Sequence[StepTime], runs: Sequence[RunTime]) -> dict[str, float]:
    """Return the seconds of all runs, each of which repeats its step."""
    pairs = list(zip(steps, runs, strict=True))
    return {
        "compute": sum(run.num_steps * (step.forward_s + step.backward_s) for step, run in pairs),
        "bubble": sum(run.num_steps * step.bubble_s for step, run in pairs),
        "stragglers": sum(run.num_steps * step.straggler_s for step, run in pairs),
        "several hosts": sum(run.num_steps * step.several_hosts_s for step, run in pairs),
        "network": sum(run.num_steps * step.exposed_s for step, run in pairs),
        "input": sum(run.num_steps * step.input_s for step, run in pairs),
        "optimizer": sum(run.num_steps * step.optimizer_s for step, run in pairs),
        "start": sum(run.start_s for run in runs),
        "evaluation": sum(run.evaluations_s for run in runs),
        "checkpoints": sum(run.checkpoints_s for run in runs),
    }


def predict(
    training: Training, workers: Machines, layouts: Sequence[Layout], helpers: Machines | None = None
) -> Plan:
    """Predict the time, memory and cost of a training on given hosts.

    Args:
        layouts: one per part, with the part's global batch.

    Raises:
        UsageError: a layout does not divide the accelerators.
    """
    steps: list[StepTime] = []
    runs: list[RunTime] = []
    memories: list[Footprint] = []
    for part, layout in zip(training.parts, layouts, strict=True):
        step = step_time(part.workload, workers, layout, achieved_flops=part.achieved_flops, helpers=helpers)
        steps.append(step)
        runs.append(
            run_time(
                part,
                workers,
                step_s=step.total_s,
                per_replica=layout.per_replica,
                micro_batch=layout.micro_batch,
                start_s=0.0 if runs else training.start_s,
                num_evaluators=training.validation_hosts * workers.instance.num_accelerators,
                checkpoint_every_steps=training.checkpoint_every_steps,
            )
        )
        replicas = num_replicas(workers, layout)
        memories.append(
            footprint_of(
                part.workload,
                layout,
                micro_batch=part.global_batch / replicas / step.micro_batches,
                num_micro_batches=step.micro_batches,
                replicas=replicas,
                numerics=require_accelerators(workers).numerics(part.precision),
            )
        )
    if training.data is not None:
        runs[0] = replace(runs[0], start_s=runs[0].start_s + training.data.fill_s(workers))
    total_s = sum(run.total_s for run in runs)
    alone = _alone(training.parts[0], workers, layouts[0])
    rate = training.parts[0].global_batch / steps[0].total_s
    rented = replace(workers, count=workers.count + training.validation_hosts)
    prices = [machines.price_per_hour for machines in (rented, helpers) if machines]
    return Plan(
        training=training,
        workers=workers,
        helpers=helpers,
        layouts=tuple(layouts),
        steps=tuple(steps),
        runs=tuple(runs),
        memory=max(memories, key=lambda each: each.total_bytes),
        samples_per_s=rate,
        efficiency=rate / (alone * workers.count),
        total_s=total_s,
        dollars=None if None in prices else sum(filter(None, prices)) * total_s / 3600,
    )


def _alone(part: Part, workers: Machines, layout: Layout) -> float:
    """Return samples/s of one host that has its share of the work to itself.

    Where a replica needs several hosts, that is the smallest set of hosts that holds one.
    """
    per_host = workers.instance.num_accelerators
    hosts = max(1, math.ceil(layout.per_replica / per_host))
    batch = max(1, round(part.global_batch * hosts / workers.count))
    one = replace(layout, global_batch=batch, algorithm="hierarchical-ring")
    few = Machines(count=hosts, instance=workers.instance)
    step = step_time(part.workload, few, one, achieved_flops=part.achieved_flops)
    return batch / step.total_s / hosts


def achieved(
    workload: Workload,
    recipe: str,
    instance: Instance,
    *,
    precision: str = "fp16",
    samples_per_s: float | None = None,
    global_batch: int | None = None,
    published: bool = True,
) -> tuple[float, str]:
    """Return the FLOP/s of an accelerator and the source of the figure.

    It follows from ``samples_per_s`` of one host where given, else from a published throughput of a host with
    the same accelerator, which are all of 16 bits, unless ``published`` is false, else from a share of the
    peak in ``precision``.
    """
    accelerator = require_accelerators(Machines(count=1, instance=instance))
    if samples_per_s is not None:
        batch = global_batch or instance.num_accelerators
        rate = _from_rate(workload, instance, batch, samples_per_s)
        return rate, f"measured: {samples_per_s:g} {workload.unit}/s on one host"
    names = {accelerator.name, _SAME_CHIP.get(accelerator.name)}
    for entry in shipped("throughput.toml")["host"] if published and precision != "fp32" else ():
        length = entry.get("sequence_length", workload.tokens_per_sample)
        same_work = (entry["recipe"], length) == (recipe, workload.tokens_per_sample)
        if same_work and entry["accelerator"] in names:
            host = replace(instance, num_accelerators=entry["num_accelerators"])
            rate = _from_rate(workload, host, entry["global_batch"], entry["samples_per_s"])
            return rate, f"published: {entry['samples_per_s']:g} {workload.unit}/s, {entry['source']}"
    text = (
        f"assumed: {100 * ASSUMED_UTILISATION:.0f} % of the {precision} peak of {accelerator.name}; measure "
    )
    return rates_of(instance, precision)[0], f"{text}one host"


def rates_of(instance: Instance, precision: str) -> tuple[float, float, float]:
    """Return assumed FLOP/s, bytes/s and the seconds of the smallest kernel of an accelerator."""
    accelerator = require_accelerators(Machines(count=1, instance=instance))
    return (
        ASSUMED_UTILISATION * accelerator.peak(precision),
        MEMORY_EFFICIENCY * accelerator.memory_bytes_per_s,
        KERNEL_S * KERNEL_CLOCK_HZ / accelerator.clock_hz,
    )


def largest_micro_batch(
    workload: Workload, accelerator: Accelerator, *, share: float, precision: str | None = None
) -> float:
    """Return the largest power-of-two part of a replica's ``share`` of the batch that fits on one device.

    Args:
        precision: default: the 16-bit type of the device.

    Raises:
        UsageError: one sample does not fit.
    """

    def needed(micro: float) -> int:
        return footprint_of(
            workload,
            Layout(global_batch=1),
            micro_batch=micro,
            num_micro_batches=1,
            replicas=1,
            numerics=accelerator.numerics(precision or accelerator.precision),
        ).total_bytes

    room = accelerator.memory_bytes * (1 - RESERVED)
    if (least := needed(min(1.0, share))) > room:
        raise UsageError(
            f"{workload.name} needs {least / 2**30:.1f} GiB for one sample and {accelerator.name} has "
            f"{accelerator.memory_bytes / 2**30:.0f} GiB, {100 * RESERVED:.0f} % of it reserved; split the "
            "model or take larger devices"
        )
    while needed(share) > room:
        share /= 2
    return share


def _from_rate(workload: Workload, instance: Instance, batch: int, samples_per_s: float) -> float:
    host = Machines(count=1, instance=instance)
    share = batch / instance.num_accelerators
    micro = largest_micro_batch(workload, require_accelerators(host), share=share)
    return achieved_flops_of(workload, host, Layout(global_batch=batch, micro_batch=micro), samples_per_s)


# ---- the run -----------------------------------------------------------------------------------------------


def run_time(
    part: Part,
    workers: Machines,
    *,
    step_s: float,
    per_replica: int = 1,
    micro_batch: float | None = None,
    start_s: float = 0.0,
    num_evaluators: int = 0,
    checkpoint_every_steps: int | None = None,
) -> RunTime:
    """Predict a run to the target of the part's convergence, which gives epochs for the global batch.

    Args:
        micro_batch: samples of a forward pass; None: all that a replica evaluates.
        num_evaluators: accelerators that evaluate and do not train; 0: all that train.
    """
    workload, convergence = part.workload, part.convergence
    samples = convergence.samples(part.global_batch)
    num_steps = math.ceil(samples / part.global_batch)
    epochs = samples / convergence.samples_per_epoch
    num_evaluations = math.ceil(epochs / convergence.evaluate_every_epochs) if convergence.points else 0
    evaluations_s = 0.0
    if convergence.evaluation_samples:  # forward passes of the fullest replica, and the pause around them
        evaluators = num_evaluators or workers.num_accelerators
        most = math.ceil(convergence.evaluation_samples * per_replica / evaluators)
        each_s = workload.forward_flops / (part.achieved_flops * per_replica)
        passes = math.ceil(most / max(micro_batch or most, 1.0))
        forward_s = passes * KERNEL_S * workload.num_kernels / 3 + most * each_s
        evaluations_s = num_evaluations * (convergence.evaluation_pause_s + forward_s)
    checkpoints_s = 0.0
    if checkpoint_every_steps:
        staged = workload.num_parameters * CHECKPOINT_BYTES / max(workers.num_accelerators, 1)
        checkpoints_s = num_steps // checkpoint_every_steps * staged / STAGING_BYTES_PER_S
    return RunTime(
        start_s=start_s,
        steps_s=num_steps * step_s,
        evaluations_s=evaluations_s,
        checkpoints_s=checkpoints_s,
        num_steps=num_steps,
        num_samples=samples,
    )
