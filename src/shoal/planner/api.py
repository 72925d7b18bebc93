"""Predicts the training of a model from Python; ``shoal plan`` calls the same functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Union

from shoal.decide.epochs import Epochs, covering_steps
from shoal.decide.workload import Workload
from shoal.env.worker import num_training_hosts
from shoal.errors import UsageError
from shoal.planner.calibration import MeasuredComm, MeasuredTrain, read_measured
from shoal.planner.convergence import Convergence, DataSet, Phase, at_any_batch, convergence_of
from shoal.planner.goal import Goal
from shoal.planner.hardware import ON_DEMAND, Catalog, Instance, Machines, require_accelerators, shipped
from shoal.planner.prediction import (
    CHECKPOINT_EVERY_STEPS,
    START_S,
    Part,
    Plan,
    StoredData,
    Training,
    achieved,
)
from shoal.planner.recipe_workloads import Count, Preset, Presets, workload
from shoal.planner.search import helpers_to_try, search

if TYPE_CHECKING:
    from torch import Tensor, nn

Model = Union[str, "nn.Module", Workload]

AUTO = "auto"
_DEFAULT_SAMPLES = 1e6
_MOST_SAMPLES = 256
"""Largest default batch per accelerator and step."""


def plan(
    model: Model,
    workers: str,
    helpers: str | None = None,
    *,
    inputs: Mapping[str, Tensor] | None = None,
    global_batch: int | None = None,
    sequence_length: int | None = None,
    train_samples: float | None = None,
    samples_per_s: float | None = None,
    measured: Sequence[Path] = (),
    goal: Goal = "time",
    algorithms: Sequence[str] | None = None,
    wire_bytes: int = 4,
    start_s: float = START_S,
    data: StoredData | None = None,
    published: bool = True,
    catalog: Sequence[Path] = (),
    price: str = ON_DEMAND,
    count: Count | None = None,
    presets: Presets | None = None,
) -> list[Plan]:
    """Predict the training of a model on machines that you do not have; return all plans, the best first.

    A plan is a choice of layout and all-reduce algorithm with its predicted throughput, time, cost and
    memory. Nothing is allocated or computed: the model's operations are counted on the meta device, and a
    step is simulated. ``docs/plan-accuracy.md`` describes the model and its errors on published results.

    Args:
        model: name of a recipe's model or preset (``"bert-large"``, ``"bert-large-lans"``),
            ``"module:function"`` as ``shoal plan --model`` takes it, ``"hf:path/config.json"`` for a
            configuration of transformers, a module, best built under ``torch.device("meta")``, or a
            :class:`~shoal.decide.workload.Workload` of your own numbers.
        workers: hosts that train, such as ``"32xp4d.24xlarge"``.
        helpers: CPU hosts that run summation servers, such as ``"8xc5n.18xlarge"``; ``"auto"`` tries several
            numbers of the catalog's.
        inputs: for a module, one batch, name -> tensor ``[samples, ...]``.
        global_batch: samples per step; default: the preset's, or the largest known to converge.
        sequence_length: tokens per sample, for recipes with one phase.
        train_samples: samples in the whole training; default: until the recipe's target by its published
            convergence, else the preset's steps, else one million.
        samples_per_s: throughput that you measured on one host of ``workers``.
        measured: files written by ``shoal bench train --json`` and ``shoal bench comm --json``.
        goal: rank by ``"time"`` or by ``"cost"``.
        algorithms: all-reduce algorithms to consider; default: all in
            :data:`shoal.planner.network.ALGORITHMS`.
        wire_bytes: bytes of a gradient element on the network.
        start_s: seconds from starting the processes to the first step.
        data: what the hosts read from a store before it, whose time is added; default: nothing.
        published: take published throughputs of one host where there are some, not a share of the peak.
        catalog: TOML files that add instance types.
        price: the market whose prices the hosts that train have (:data:`shoal.planner.hardware.MARKETS`), or
            the dollars an hour of one of them; helpers have their price on demand.
        count: counts recipes, and lengths of sequences, that are not in the catalog; ``shoal.plan`` has it.
        presets: returns the settings of recipes; ``shoal.plan`` has it.

    Raises:
        UsageError: a name or size is unknown or invalid, the batch does not divide over the accelerators, or
            the model fits on no layout.
        ShoalError: the library that provides a recipe's model is not installed.

    Example:
        >>> import torch
        >>> from shoal import plan
        >>> with torch.device("meta"):
        ...     model, inputs = torch.nn.Linear(1024, 1024), {"input": torch.empty(32, 1024)}
        >>> best = plan(model, "8xp3dn.24xlarge", inputs=inputs, global_batch=4096)[0]
        >>> best.layouts[0].stages, best.samples_per_s > 0
        (1, True)
    """
    if global_batch is not None and global_batch < 1:
        raise UsageError(f"the global batch (--global-batch) is {global_batch}; it must be at least 1")
    preset = presets(model) if presets and isinstance(model, str) else None
    validation_hosts = preset.validation_hosts if preset else 0
    hosts = _priced(workers, catalog, price)
    require_accelerators(hosts)
    hosts = replace(hosts, count=num_training_hosts(hosts.count, validation_hosts))
    hosts, helping, trained = _with_measured(hosts, _helpers(helpers, hosts, Catalog(catalog)), measured)
    published = published and not (preset and preset.counted_as)  # throughputs of other samples
    speed = _Speed(samples_per_s=samples_per_s, trained=trained, published=published, count=count)
    if isinstance(model, str) and (preset or ":" not in model):
        own, name, known_as = None, model, preset.model if preset else model
        phases = _phases(model, preset, sequence_length, global_batch, train_samples, hosts.num_accelerators)
    else:
        own = _own_workload(model, inputs, sequence_length)
        name = known_as = own.name
        if global_batch is None:
            raise UsageError("a model of yours needs a global batch (--global-batch)")
        phases = [(Phase(batch=global_batch), _fixed_length(name, train_samples))]
    parts = tuple(
        _part(
            own or workload((preset and preset.counted_as) or known_as, phase.sequence_length, count),
            phase, table,
            name=known_as, instance=hosts.instance, preset=preset, speed=speed,
        )
        for phase, table in phases
    )  # fmt: skip
    training = Training(
        recipe=name,
        parts=parts,
        start_s=start_s,
        data=data,
        shard_optimizer=bool(preset and preset.shard_optimizer),
        has_stages=preset is None or preset.has_stages,
        has_shards=preset is None or preset.has_shards,
        has_tensor=preset is None or preset.has_tensor,
        checkpoint_every_steps=preset.checkpoint_every_steps if preset else CHECKPOINT_EVERY_STEPS,
        validation_hosts=validation_hosts,
        command=() if parts[0].convergence.target else _command(preset, sequence_length),
    )
    return search(training, hosts, helping, goal=goal, algorithms=algorithms, wire_bytes=wire_bytes)


def _helpers(helpers: str | None, hosts: Machines, known: Catalog) -> Sequence[Machines]:
    """Return the helper hosts to compare: those that the caller names, or several of the catalog's."""
    if helpers == AUTO:
        return helpers_to_try(hosts, known.instances.values())
    return [known.machines(helpers)] if helpers else []


def _command(preset: Preset | None, sequence_length: int | None) -> tuple[str, ...]:
    """Return the command that trains a preset; empty for a model without one."""
    if preset is None:
        return ()
    length = (f"--{preset.length.replace('_', '-')}", str(sequence_length)) if sequence_length else ()
    return ("shoal", *preset.command, *length)


@dataclass(frozen=True, kw_only=True)
class _Speed:
    """Sources of the speed of one host: a given throughput, measured steps, or published ones.

    Attributes:
        samples_per_s: the throughput that the user gives.
        trained: files with measured times of steps; they have precedence over published throughputs.
        published: whether to take published throughputs.
        count: as in :func:`plan`.

    Raises:
        UsageError: the throughput is not a positive number, or files give the speed too.
    """

    samples_per_s: float | None
    trained: Sequence[MeasuredTrain]
    published: bool
    count: Count | None

    def __post_init__(self) -> None:
        if self.samples_per_s is None:
            return
        if not (math.isfinite(self.samples_per_s) and self.samples_per_s > 0):
            raise UsageError(
                f"the throughput (--throughput) is {self.samples_per_s}; it must be a positive number of "
                "samples/s"
            )
        if self.trained:
            raise UsageError(
                f"--throughput and --measured {self.trained[0].path} both give the speed: leave one of them "
                "out"
            )

    def achieved(
        self, counted: Workload, name: str, instance: Instance, *, precision: str, global_batch: int
    ) -> tuple[float, str]:
        """Return the FLOP/s of an accelerator and the source of the figure.

        Of several measured files, the one with the workload's sequence length is taken, else the first.
        """
        if not self.trained:
            return achieved(
                counted,
                name,
                instance,
                precision=precision,
                samples_per_s=self.samples_per_s,
                global_batch=global_batch,
                published=self.published,
            )
        length = counted.tokens_per_sample
        chosen = next((file for file in self.trained if file.sequence_length == length), self.trained[0])
        if chosen.recipe in (name, "") and chosen.sequence_length != length:
            counted = workload(name, chosen.sequence_length, self.count)
        return chosen.achieved_flops(name, counted, instance), chosen.basis


def _part(
    counted: Workload,
    phase: Phase,
    convergence: Convergence,
    *,
    name: str,
    instance: Instance,
    preset: Preset | None,
    speed: _Speed,
) -> Part:
    """Return one phase of the training, with the speed of an accelerator of ``instance``."""
    precision = _precision(preset, instance, counted)
    flops, basis = speed.achieved(counted, name, instance, precision=precision, global_batch=phase.batch)
    return Part(
        workload=_with_lengths(counted, preset.data if preset else None),
        convergence=convergence,
        global_batch=phase.batch,
        achieved_flops=flops,
        basis=basis,
        precision=precision,
        micro_batch=phase.micro_batch,
        section=phase.section,
    )


def _with_lengths(counted: Workload, data: DataSet | None) -> Workload:
    """Return a workload whose samples have the mean work of texts that are shorter than its samples may be.

    Packed batches compute nothing for tokens that are not there. What is kept is that of full samples.
    """
    if data is None or not 0 < data.mean_tokens < counted.tokens_per_sample:
        return counted
    share = data.mean_tokens / counted.tokens_per_sample
    layers = tuple(replace(each, forward_flops=share * each.forward_flops) for each in counted.layers)
    return replace(
        counted,
        layers=layers,
        relay_bytes=share * counted.relay_bytes,
        work_spread=data.token_spread,
    )


def _with_measured(
    hosts: Machines, helping: Sequence[Machines], measured: Sequence[Path]
) -> tuple[Machines, Sequence[Machines], list[MeasuredTrain]]:
    """Return machines with the networks that files say, and the files with times of training."""
    files = [read_measured(path) for path in measured]
    for file in files:
        if isinstance(file, MeasuredComm):
            helping = [
                file.applied(each) if each.instance.network == hosts.instance.network else each
                for each in helping
            ]
            hosts = file.applied(hosts)
    return hosts, helping, [file for file in files if isinstance(file, MeasuredTrain)]


def _priced(workers: str, catalog: Sequence[Path], price: str) -> Machines:
    """Return hosts with the price of a market, or with one that is given in dollars.

    Raises:
        UsageError: the price is neither a market nor a number from 0 on.
    """
    try:
        dollars = float(price)
    except ValueError:
        return Catalog(catalog, price).machines(workers)
    if not (math.isfinite(dollars) and dollars >= 0):
        raise UsageError(f"the price (--price) is {dollars:g} dollars an hour; it must be at least 0")
    hosts = Catalog(catalog).machines(workers)
    instance = replace(hosts.instance, price_per_hour=dollars, price_source="given by --price")
    return replace(hosts, instance=instance)


def _own_workload(model: Model, inputs: Mapping[str, Tensor] | None, sequence_length: int | None) -> Workload:
    if isinstance(model, Workload):
        return model
    from shoal.planner.counting import workload_of_config, workload_of_function, workload_of_model

    if isinstance(model, str) and model.startswith("hf:"):
        return workload_of_config(Path(model.removeprefix("hf:")), sequence_length)
    if isinstance(model, str):
        return workload_of_function(model)
    if not inputs:
        raise UsageError(f"{type(model).__name__}: give one batch of its inputs, name -> tensor, as inputs")
    return workload_of_model(model, inputs)


def _precision(preset: Preset | None, hosts: Instance, counted: Workload) -> str:
    """Return the type in which ``shoal train`` computes on such hosts."""
    if preset and preset.precision != "auto":
        return preset.precision
    return hosts.precision(refuses_fp16=bool(counted.refuses_fp16))


def _phases(
    name: str,
    preset: Preset | None,
    sequence_length: int | None,
    global_batch: int | None,
    train_samples: float | None,
    num_accelerators: int,
) -> list[tuple[Phase, Convergence]]:
    """Return each phase of a training with its length: until a published target, or of the preset's steps."""
    if name in shipped("convergence.toml") or preset is None:
        is_known = name in shipped("convergence.toml")
        table = convergence_of(name) if is_known else _fixed_length(name, train_samples)
        if train_samples is not None:
            table = replace(table, points=at_any_batch(train_samples / table.samples_per_epoch), target="")
        # The largest batch known to converge that every accelerator shares equally, within bounds.
        most = min(max(table.largest_batch // num_accelerators, 1), _MOST_SAMPLES)
        batch = global_batch or num_accelerators * most
        micro = preset.phases[0].micro_batch if preset else None
        fits = micro is not None and batch % (num_accelerators * micro) == 0
        own = Phase(batch=batch, sequence_length=sequence_length, micro_batch=micro if fits else None)
        return [(own, table)]
    if len(preset.phases) > 1 and sequence_length is not None:
        lengths = " and ".join(str(phase.sequence_length) for phase in preset.phases)
        raise UsageError(f"{name} has phases of {lengths} tokens; leave --sequence-length out")
    phases = [
        replace(
            phase,
            batch=global_batch or phase.batch,
            sequence_length=sequence_length or phase.sequence_length,
        )
        for phase in preset.phases
    ]
    return [(phase, _length_of(preset, phase, train_samples)) for phase in phases]


def _length_of(preset: Preset, phase: Phase, train_samples: float | None) -> Convergence:
    """Return the length of a preset's phase, in samples that are known, else in those that are asked for.

    An epoch is one sample there. Evaluations are those of the preset.
    """
    data, known = preset.data, None
    if data is None and preset.model in shipped("convergence.toml"):
        known = convergence_of(preset.model)
    per_epoch = data.num_examples if data else known and known.samples_per_epoch
    if train_samples is None and phase.steps is not None:
        amount, source = float(phase.steps * phase.batch), f"{phase.steps:,} steps of {preset.name}"
    elif train_samples is None and phase.epochs is not None and per_epoch:
        if phase.covers:
            steps = covering_steps(phase.epochs, num_examples=per_epoch, global_batch_size=phase.batch)
        else:
            steps = Epochs(num_examples=per_epoch, global_batch_size=phase.batch).steps(phase.epochs)
        amount, source = float(steps * phase.batch), f"{phase.epochs:g} epochs of {preset.name}"
        if data:
            source = f"{source}: {per_epoch:,} examples of {data.name}"
    else:
        return _fixed_length(preset.name, train_samples)
    every = phase.evaluate_every_steps * phase.batch or phase.evaluate_every_epochs * (per_epoch or 0)
    num_evaluated = data.num_evaluated if data else known.evaluation_samples if known else 0
    return Convergence(
        name=preset.name,
        source=source,
        points=at_any_batch(amount),
        largest_batch=phase.batch,
        evaluate_every_epochs=amount if preset.evaluates_beside else min(every or amount, amount),
        evaluation_samples=preset.evaluation_samples or num_evaluated,
        evaluation_pause_s=known.evaluation_pause_s if known else 0.0,
    )


def _fixed_length(name: str, samples: float | None) -> Convergence:
    amount = _DEFAULT_SAMPLES if samples is None else samples
    source = "one million samples" if samples is None else f"{amount:,.0f} samples"
    return Convergence(name=name, source=source, points=at_any_batch(amount), largest_batch=1 << 40)
