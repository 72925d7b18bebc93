"""One published row predicted from another: what ``plan_published`` asks the planner."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.plan_rows import PER_GPU_METRICS, THROUGHPUT, TIME, Row, recipe_of, sequence_length_of
from shoal.decide.layout import CONNECTIONS_PER_PEER, Layout
from shoal.decide.workload import Workload
from shoal.planner.convergence import Convergence, Phase, at_any_batch, convergence_of
from shoal.planner.hardware import Machines, require_accelerators
from shoal.planner.prediction import START_S, Part, RunTime, largest_micro_batch, run_time, seconds_by_cause
from shoal.planner.recipe_workloads import workload
from shoal.planner.step_time import StepTime, achieved_flops_for, step_time
from shoal.recipes.workloads import count_recipe, preset_of

MIB = 1 << 20

# Layouts of models that no device holds: tensor (with context) parallel, pipeline stages, chunks of layers a
# stage, samples of a micro-batch. Files are those of github.com/mlcommons/training_results_vX.
_SPLIT = {
    # v3.1, NVIDIA/benchmarks/gpt3/implementations/pytorch/config_DGXH100_*x4x8_mbs1.sh; chunks are recalled
    "gpt3-175b": (4, 8, 6, 1),
    "llama3.1-405b": (8, 8, 7, 1),  # recalled from configurations of NVIDIA's submissions, not looked up
    "llama3.1-70b": (8, 1, 1, 1),
}
_SPLIT_OF_SYSTEM = (
    # v4.0, NVIDIA/benchmarks/gpt3/implementations/nemo/config_DGXH100_{64x8x128x4x8_mbs2,
    # 1344x8x6x4x6_mbs1_cg,1452x8x6x4x6_mbs1_cg}.sh
    (r"MLPerf v4\.0 NVIDIA eos_n64_", "gpt3-175b", (4, 8, 4, 2)),
    (r"MLPerf v4\.0 NVIDIA eos-dfw_n1(344|452)_", "gpt3-175b", (4, 6, 8, 1)),
)
_LORA_DEVICES = {"H100-80GB": 4, "H200-141GB": 2, "B200-180GB": 1}
"""That hold a replica of Llama 2 70B: llama2_70b_lora/.../config_DGXH100_1x8x4xtp4pp1cp1.sh and
config_DGXH200_1x8x2xtp2pp1cp1.sh of v4.0 (NVIDIA), config_DGXB200_1x8x1xtp1pp1cp1.sh of v5.0
(GigaComputing)."""
_TWO_HOPS = r"post 000|posts/000|000\.txt|fastest training times for BERT"
"""The post of 2019 on BERT and Mask R-CNN describes its own all-reduce in two hops through C5n hosts."""
_SHARDED = ("gpt", "llama")


def layout_of(row: Row, recipe: str, model: Workload, workers: Machines) -> Layout:
    """Return how the row's batch was spread, by rules that see neither this row's value nor any other's."""
    assert row.global_batch
    tensor, stages, virtual, samples = _split_of(row, recipe)
    if recipe == "llama2-70b-lora":  # more devices than its samples need split the sequence
        least = _LORA_DEVICES.get(require_accelerators(workers).name, 4)
        tensor = max(least, row.gpus // row.global_batch)
    wire_bytes = 4 if re.search(r"\b(FP32|TF32)\b", f"{row.system} {row.hardware}") else 2
    trained = model.num_parameters * model.trainable / (tensor * stages) * wire_bytes
    share = row.global_batch * tensor * stages / row.gpus
    if recipe.startswith(_SHARDED):
        micro: float = samples
    else:
        micro = largest_micro_batch(
            model, require_accelerators(workers), share=share, precision="fp32" if wire_bytes == 4 else None
        )
    return Layout(
        global_batch=row.global_batch,
        micro_batch=micro,
        tensor=tensor,
        stages=stages,
        virtual=virtual,
        wire_bytes=wire_bytes,
        bucket_bytes=max(25 * MIB, int(trained / 32)),
        sharded_optimizer=recipe.startswith(_SHARDED),
        scatters=recipe.startswith(_SHARDED),
        algorithm="two-hop" if re.search(_TWO_HOPS, row.source) else "hierarchical-ring",
        # NCCL 2.4 of the TensorFlow 2.1 images opens one socket to the next host of its ring.
        # The same code clips each worker's gradients before it averages them.
        overlap="TF2.1+Horovod" not in row.system,
        connections=1 if "TF2.1+Horovod" in row.system else CONNECTIONS_PER_PEER,
    )


def _split_of(row: Row, recipe: str) -> tuple[int, int, int, int]:
    for pattern, of_recipe, split in _SPLIT_OF_SYSTEM:
        if recipe == of_recipe and re.search(pattern, row.system):
            return split
    return _SPLIT.get(recipe, (1, 1, 1, 1))


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
    recipe = recipe_of(row)
    assert recipe and row.global_batch
    name = re.sub(r"\(.*", "", row.model)
    if "phase1+2" in row.model:
        return _phases(row, recipe, workers, achieved_flops)
    model = workload(recipe, _length(row, recipe), count_recipe)
    layout = layout_of(row, recipe, model, workers)
    step = _step(model, workers, layout, achieved_flops)
    split = max(layout.tensor, row.gpus / row.global_batch / layout.stages)
    if row.kind == THROUGHPUT:
        one = _steps(1, step)
        return Predicted(
            value=_rate(row, step.total_s), seconds_by_cause=seconds_by_cause([step], [one]), split=split
        )
    part = Part(
        workload=model,
        convergence=_convergence(row, recipe, name),
        global_batch=row.global_batch,
        achieved_flops=achieved_flops,
        basis="the smallest scale",
    )
    run = run_time(
        part,
        workers,
        step_s=step.total_s,
        per_replica=layout.per_replica,
        # MLPerf's clock starts when everything is set up.
        start_s=START_S if row.kind == TIME and not row.is_mlperf else 0.0,
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
    if layout.algorithm == "hierarchical-ring" and workers.count > 2:
        algorithms.append("tree")
    steps = [
        step_time(model, workers, replace(layout, algorithm=algorithm), achieved_flops=achieved_flops)
        for algorithm in algorithms
    ]
    return min(steps, key=lambda step: step.total_s)


def achieved_of(row: Row, workers: Machines) -> float:
    """Return the FLOP/s at which the planner gives the row's own value."""
    precision = "fp32" if "FP32" in row.system else "fp16"
    peak = require_accelerators(workers).peak(precision)
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
    recipe = recipe_of(row)
    assert recipe
    return workload(recipe, _length(row, recipe), count_recipe)


def in_samples(row: Row, workers: Machines) -> Row:
    """Return the row with its value in samples a second (a device), where it is in tokens or utilisation."""
    factor = unit_factor(row, counted(row), workers)
    return replace(row, value=row.value / factor)


def _length(row: Row, recipe: str) -> int | None:
    if recipe in ("resnet50", "mask-rcnn", "faster-rcnn"):
        return None
    return sequence_length_of(row)


def _convergence(row: Row, recipe: str, name: str) -> Convergence:
    """Return the table; a run of fixed length where the row says so, or where there is none."""
    table = {"bert-large": "bert-large-mlperf"}.get(recipe, recipe)
    fixed = re.search(r"(\d+) epochs", row.system)
    known = (
        recipe in ("resnet50", "mask-rcnn", "gpt3-175b", "llama2-70b-lora", "llama3.1-405b") or row.is_mlperf
    )
    if known and not fixed:
        return convergence_of(table)
    if recipe.endswith("rcnn") and fixed:
        coco = convergence_of("mask-rcnn")
        epochs = float(fixed[1])
        return replace(coco, points=at_any_batch(epochs))
    length = sequence_length_of(row)
    phases = [phase for phase in _phases_of(recipe) if length in (None, phase.sequence_length or length)]
    samples = float(sum((phase.steps or 0) * phase.batch for phase in phases))
    return Convergence(name=name, source="fixed length", points=at_any_batch(samples))


def _phases_of(recipe: str) -> tuple[Phase, ...]:
    """Return the phases of the recipe's own settings."""
    preset = preset_of(recipe)
    assert preset
    return preset.phases


def _phases(row: Row, recipe: str, workers: Machines, achieved_flops: float) -> Predicted:
    """Return minutes of BERT's two phases, each with its own sequence length, batch and steps."""
    steps: list[StepTime] = []
    runs: list[RunTime] = []
    for phase in _phases_of(recipe):
        model = workload(recipe, phase.sequence_length, count_recipe)
        part = replace(row, global_batch=phase.batch)
        steps.append(_step(model, workers, layout_of(part, recipe, model, workers), achieved_flops))
        runs.append(_steps(phase.steps or 0, steps[-1], start_s=0.0 if runs else START_S))
    return Predicted(
        value=sum(run.total_s for run in runs) / 60, seconds_by_cause=seconds_by_cause(steps, runs)
    )
