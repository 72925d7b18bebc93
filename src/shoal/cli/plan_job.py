"""What ``shoal plan`` is to train, from a recipe's real model, published facts and measured files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.cli import workloads
from shoal.cli.plan_request import Request
from shoal.errors import UsageError
from shoal.planner.calibration import MeasuredComm, MeasuredTrain, read_measured
from shoal.planner.convergence import Convergence, at_any_batch, convergence_of
from shoal.planner.hardware import Catalog, Machines
from shoal.planner.prediction import Job, Part, achieved
from shoal.planner.workload import Workload

_UNKNOWN_SAMPLES = 1e6
"""How far to train a model without a convergence table is its user's matter: the answer is for so many."""
_MOST_SAMPLES = 256
"""A device and step, where the batch is ours to choose."""


def measured_files(request: Request) -> tuple[list[MeasuredTrain], list[MeasuredComm]]:
    """Return what the files of ``--measured`` say of steps and of the network.

    Raises:
        UsageError: a file is neither, or ``--throughput`` says the same.
    """
    files = [read_measured(path) for path in request.measured]
    trained = [file for file in files if isinstance(file, MeasuredTrain)]
    if trained and request.throughput is not None:
        raise UsageError(f"--throughput and --measured {trained[0].path} say the same: leave one of them out")
    return trained, [file for file in files if isinstance(file, MeasuredComm)]


def with_network(
    measured: MeasuredComm, workers: Machines, helpers: Machines | None
) -> tuple[Machines, Machines | None]:
    """Return the hosts with the measured network, helpers too where theirs is of the same kind."""
    if helpers is not None and helpers.instance.network == workers.instance.network:
        helpers = measured.applied(helpers)
    return measured.applied(workers), helpers


def make_job(
    recipe: str, request: Request, workers: Machines, catalog: Catalog, trained: Sequence[MeasuredTrain] = ()
) -> Job:
    """Return what is to be trained: the recipe's phases, or one part with a batch.

    Raises:
        UsageError: neither or both of recipe and model are given, or options do not fit them.
    """
    if bool(recipe) == bool(request.model):
        raise UsageError(
            "name a recipe (shoal plan bert-large ...) or a model of yours with --model, one of both"
        )
    batch, throughput = request.global_batch, request.throughput
    if batch is not None and batch < 1:
        raise UsageError(f"--global-batch is {batch}; it must be at least 1")
    if throughput is not None and not (math.isfinite(throughput) and throughput > 0):
        raise UsageError(f"--throughput is {throughput}; it must be a positive number of samples a second")
    given = _Given(
        name=recipe or str(request.model),
        request=request,
        workers=workers,
        catalog=catalog,
        trained=tuple(trained),
    )
    parts = given.parts_of_model() if request.model else given.parts_of_recipe()
    return Job(recipe=given.name, parts=tuple(parts), start_s=request.start_s)


@dataclass(frozen=True, kw_only=True)
class _Given:
    """What the parts of a job are made from."""

    name: str
    request: Request
    workers: Machines
    catalog: Catalog
    trained: tuple[MeasuredTrain, ...]

    def parts_of_model(self) -> list[Part]:
        if not self.request.global_batch:
            raise UsageError("--model needs --global-batch: the planner cannot know the batch of your recipe")
        workload = workloads.workload_of_function(self.name)
        return [self._part(workload, _fixed_length(self.name), self.request.global_batch)]

    def parts_of_recipe(self) -> list[Part]:
        length, batch = self.request.sequence_length, self.request.global_batch
        workloads.require_recipe(self.name)
        table = _convergence(self.name)
        if len(table.phases) > 1 and length is not None:
            lengths = " and ".join(str(phase.sequence_length) for phase in table.phases)
            raise UsageError(f"{self.name} has phases of {lengths} tokens; leave --sequence-length out")
        if not table.phases:
            workload = workloads.workload(self.name, length)
            return [self._part(workload, table, batch or self._largest_batch(table))]
        parts = []
        for phase in table.phases:
            workload = workloads.workload(self.name, length or phase.sequence_length)
            samples = float(phase.steps * phase.batch)
            fixed = replace(table, phases=(), points=at_any_batch(samples))
            parts.append(self._part(workload, fixed, batch or phase.batch))
        return parts

    def _part(self, workload: Workload, table: Convergence, batch: int) -> Part:
        flops, basis = self._calibrated(workload) if self.trained else self._published(workload, batch)
        return Part(
            workload=workload, convergence=table, global_batch=batch, achieved_flops=flops, basis=basis
        )

    def _published(self, workload: Workload, batch: int) -> tuple[float, str]:
        return achieved(
            workload,
            self.name,
            self.workers.instance,
            samples_per_s=self.request.throughput,
            global_batch=batch,
        )

    def _calibrated(self, workload: Workload) -> tuple[float, str]:
        """Return FLOP/s and basis from the file with the workload's sequence length, else from the first."""
        length = workload.tokens_per_sample
        chosen = next((file for file in self.trained if file.sequence_length == length), self.trained[0])
        if chosen.recipe == self.name and chosen.sequence_length != length:
            workload = workloads.workload(self.name, chosen.sequence_length)
        return chosen.achieved_flops(self.name, workload, self.workers.instance), chosen.basis

    def _largest_batch(self, table: Convergence) -> int:
        """Return the largest batch known to converge that gives each accelerator the same, within bounds."""
        count = self.workers.num_accelerators
        return count * min(max(table.largest_batch // count, 1), _MOST_SAMPLES)


def _convergence(recipe: str) -> Convergence:
    try:
        return convergence_of("mask-rcnn" if recipe == "faster-rcnn" else recipe)
    except UsageError:
        return _fixed_length(recipe)


def _fixed_length(name: str) -> Convergence:
    return Convergence(
        name=name,
        source="one million samples",
        points=at_any_batch(_UNKNOWN_SAMPLES),
        largest_batch=1 << 40,
    )
