"""One published row predicted from another: what ``plan_published`` asks the planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.plan_rows import PER_GPU_METRICS, THROUGHPUT, TIME, Row
from shoal.decide.layout import CONNECTIONS_PER_PEER, Layout
from shoal.decide.workload import Workload
from shoal.planner.convergence import Convergence, Phase, at_any_batch, convergence_of
from shoal.planner.hardware import Machines, require_accelerators
from shoal.planner.prediction import START_S, Part, RunTime, largest_micro_batch, run_time, seconds_by_cause
from shoal.planner.recipe_workloads import workload
from shoal.planner.search import bucket_bytes_of
from shoal.planner.step_time import StepTime, achieved_flops_for, step_time
from shoal.recipes.workloads import count_recipe, preset_of


def layout_of(row: Row, model: Workload, workers: Machines) -> Layout:
    """Return how the row's batch was spread, by its columns and by rules that see no row's value."""
    assert row.global_batch
    wire_bytes = 4 if row.precision in ("fp32", "tf32") else 2
    micro: float | None = row.micro_batch
    if micro is None:
        micro = largest_micro_batch(
            model,
            require_accelerators(workers),
            share=row.global_batch * row.per_replica / workers.num_accelerators,
            precision="fp32" if wire_bytes == 4 else None,
        )
    return Layout(
        global_batch=row.global_batch,
        micro_batch=micro,
        tensor=row.tensor,
        context=row.context,
        stages=row.pipeline,
        virtual=row.virtual,
        wire_bytes=wire_bytes,
        bucket_bytes=bucket_bytes_of(model, workers, per_replica=row.per_replica),
        sharded_optimizer=row.shard,
        scatters=row.shard,
        algorithm=_algorithm(row),
        updates_by_host=row.updates_by_host,
        overlap=row.overlap is not False,
        cuda_graphs=row.cuda_graphs,
        connections=row.connections or CONNECTIONS_PER_PEER,
    )


def _algorithm(row: Row) -> str:
    if row.two_hops:
        return "two-hop"
    return "hierarchical-ring" if row.updates_by_host else "ring"


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A row's metric and where the time of its run, or of one step, goes."""

    value: float
    seconds_by_cause: Mapping[str, float]
    split: float = 1.0
    """Devices that share a sample."""
    to_target: bool = False
    """The run ends at a score."""


def predict_row(row: Row, workers: Machines, achieved_flops: float) -> Predicted:
    """Return the row's metric for accelerators that achieve ``achieved_flops``."""
    assert row.global_batch
    if row.length == "preset" and len(_phases_of(row)) > 1:
        return _phases(row, workers, achieved_flops)
    model = counted(row)
    layout = layout_of(row, model, workers)
    step = _step(model, workers, layout, achieved_flops)
    split = max(layout.tensor * layout.context, workers.num_accelerators / row.global_batch / layout.stages)
    if row.kind == THROUGHPUT:
        one = _steps(1, step)
        return Predicted(
            value=_rate(row, step.total_s), seconds_by_cause=seconds_by_cause([step], [one]), split=split
        )
    convergence = _convergence(row)
    if row.evaluation_gpus:  # only the last evaluation is waited for
        convergence = replace(convergence, evaluate_every_epochs=convergence.epochs(row.global_batch))
    part = Part(
        workload=model,
        convergence=convergence,
        global_batch=row.global_batch,
        achieved_flops=achieved_flops,
        basis="the smallest scale",
    )
    run = run_time(
        part,
        workers,
        step_s=step.total_s,
        per_replica=layout.per_replica,
        micro_batch=layout.micro_batch,
        start_s=START_S if row.clock == "from the start" else 0.0,
    )
    return Predicted(
        value=run.total_s / 60 if row.kind == TIME else run.num_samples / run.total_s,
        seconds_by_cause=seconds_by_cause([step], [run]),
        split=split,
        to_target=row.kind == TIME and part.convergence.depends_on_batch,
    )


def _steps(count: int, step: StepTime, start_s: float = 0.0) -> RunTime:
    """Return a run of nothing but steps."""
    return RunTime(
        start_s=start_s,
        steps_s=count * step.total_s,
        evaluations_s=0.0,
        checkpoints_s=0.0,
        num_steps=count,
        num_samples=0.0,
    )


def _step(model: Workload, workers: Machines, layout: Layout, achieved_flops: float) -> StepTime:
    """Return the step with what NCCL takes on so many hosts: the faster of ring and tree."""
    algorithms = [layout.algorithm]
    if not layout.algorithm.startswith("two-hop") and workers.count > 1 and not layout.scatters:
        algorithms.append("tree")
    steps = [
        step_time(model, workers, replace(layout, algorithm=algorithm), achieved_flops=achieved_flops)
        for algorithm in algorithms
    ]
    return min(steps, key=lambda step: step.total_s)


def achieved_of(row: Row, workers: Machines) -> float:
    """Return the FLOP/s at which the planner gives the row's own value."""
    peak = require_accelerators(workers).peak("fp32" if row.precision == "fp32" else "fp16")
    return achieved_flops_for(
        row.value, lambda flops: predict_row(row, workers, flops).value, peak=peak, tolerance=1e-4
    )


def _rate(row: Row, step_s: float) -> float:
    """Return the metric in samples, up to the factor of :func:`unit_factor`."""
    if row.metric == "iterations_per_s":
        return 1 / step_s
    assert row.global_batch
    rate = row.global_batch / step_s
    return rate / row.gpus if row.metric in PER_GPU_METRICS else rate


def unit_factor(row: Row, model: Workload, workers: Machines) -> float:
    """Return what :func:`_rate` must be multiplied by: tokens a sample, or FLOPs a sample over the peak."""
    if row.metric.startswith("tokens"):
        return model.tokens_per_sample
    if row.metric == "mfu":
        return model.training_flops / require_accelerators(workers).peak("bf16")
    return 1.0


def counted(row: Row) -> Workload:
    """Return the row's model."""
    return workload(row.recipe, row.sequence_length, count_recipe)


def in_samples(row: Row, workers: Machines) -> Row:
    """Return the row with its value in samples a second (a device), where it is in tokens or utilisation."""
    factor = unit_factor(row, counted(row), workers)
    return replace(row, value=row.value / factor)


def _convergence(row: Row) -> Convergence:
    """Return the table, or the fixed length that the row's column names."""
    if row.length in ("", "target"):
        return convergence_of({"bert-large": "bert-large-mlperf"}.get(row.recipe, row.recipe))
    if row.length.endswith(" epochs"):
        epochs = float(row.length.removesuffix(" epochs"))
        return replace(convergence_of("mask-rcnn"), points=at_any_batch(epochs))
    samples = float(sum((phase.steps or 0) * phase.batch for phase in _phases_of(row)))
    return Convergence(name=row.model, source="fixed length", points=at_any_batch(samples))


def _phases_of(row: Row) -> list[Phase]:
    """Return the phases of the recipe's own settings; where the row names a length, those of that length."""
    preset = preset_of(row.recipe)
    assert preset
    length = row.sequence_length
    return [phase for phase in preset.phases if length in (None, phase.sequence_length or length)]


def _phases(row: Row, workers: Machines, achieved_flops: float) -> Predicted:
    """Return minutes of BERT's two phases, each with its own sequence length, batch and steps."""
    steps: list[StepTime] = []
    runs: list[RunTime] = []
    for phase in _phases_of(row):
        part = replace(row, global_batch=phase.batch, sequence_length=phase.sequence_length)
        model = counted(part)
        steps.append(_step(model, workers, layout_of(part, model, workers), achieved_flops))
        runs.append(_steps(phase.steps or 0, steps[-1], start_s=0.0 if runs else START_S))
    return Predicted(
        value=sum(run.total_s for run in runs) / 60, seconds_by_cause=seconds_by_cause(steps, runs)
    )
