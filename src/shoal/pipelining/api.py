"""``pipeline()``: from an unmodified model to this worker's stages of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.decide.autotune import PORTFOLIO, VIRTUAL_CHOICES, Conditions
from shoal.decide.cost import Link, ModelCost
from shoal.decide.partition import Memory, Optimize
from shoal.errors import UsageError, did_you_mean
from shoal.pipelining.device_placement import put_on, shard_state
from shoal.pipelining.init_meta import Initialise, materialise
from shoal.pipelining.loss import Count, default_count, micro_batches
from shoal.pipelining.pipeline_plan import decide
from shoal.pipelining.process_groups import Groups, make_groups, measure_link
from shoal.pipelining.runtime import Pipeline, Settings, Unsplit
from shoal.pipelining.stage_runner import StageRunner
from shoal.pipelining.stage_sources import Graph, Named, Source
from shoal.pipelining.tied_weights import owners, repeated
from shoal.pipelining.verify import run_unsplit

SCHEDULE_ALIASES = {"simple": "gpipe"}
"""SageMaker's names."""
AUTO = "auto"
SPLIT_BACKWARD = frozenset({"zbv"})
"""Schedules that split the backward pass: torch does it wrongly for some graphs, so they are verified."""


def make_mesh(
    device_type: str, *, pipeline: int, data: int = 1, placement_strategy: str = "cluster"
) -> DeviceMesh:
    """Return a mesh of all workers with the axes ``pp`` and ``dp``.

    Args:
        placement_strategy: ``cluster``: the ranks of a pipeline are neighbours, so that one host holds whole
            pipelines if it can. ``spread``: replicas are neighbours, and a pipeline spreads over hosts.

    Raises:
        UsageError: an unknown strategy.
    """
    if placement_strategy == "cluster":
        return init_device_mesh(device_type, (data, pipeline), mesh_dim_names=("dp", "pp"))
    if placement_strategy == "spread":
        return init_device_mesh(device_type, (pipeline, data), mesh_dim_names=("pp", "dp"))
    raise UsageError(
        f"placement_strategy is {placement_strategy!r}; it must be 'cluster' or 'spread'."
        f"{did_you_mean(placement_strategy, ('cluster', 'spread'))}"
    )


def pipeline(
    model: nn.Module,
    example_inputs: Mapping[str, Tensor],
    *,
    mesh: DeviceMesh | None = None,
    microbatches: int = 8,
    schedule: str = AUTO,
    optimize: Optimize = "speed",
    virtual_stages: int | None = None,
    active_microbatches: int | None = None,
    memory_weight: float | None = None,
    memory: Memory | None = None,
    link: Link | None = None,
    data_parallel: DeviceMesh | None = None,
    shard: bool = False,
    modules: Sequence[Sequence[str]] | None = None,
    cuts: Sequence[int] | None = None,
    cost: ModelCost | None = None,
    count: Count | None = None,
    seed: int = 0,
    verify: bool = False,
    device: torch.device | str | None = None,
    initialise: Initialise | None = None,
) -> Pipeline:
    """Split ``model`` over the ranks of ``mesh`` and return this rank's part. All ranks call it alike.

    The model is not changed and needs no changes; it must return its own loss. It may lie on the meta device:
    then only this rank's part is ever allocated.

    Args:
        example_inputs: one replica's batch, name -> tensor [rows, ...]; the shapes of all batches to come.
        mesh: the ranks of the pipeline, one dimension. Default: all workers.
        microbatches: into how many parts a batch is divided.
        schedule: ``auto`` takes the fastest, by simulation; or gpipe (SageMaker's "simple"), 1f1b,
            interleaved, bfs, vee, backward_first; zbv on request only, with its first step verified.
        optimize: ``speed``, or ``memory``: the layout that needs least.
        virtual_stages: stages a rank. Default: whatever is fastest.
        active_microbatches: how many micro-batches the greedy schedules have under way at most.
        memory_weight: see :func:`shoal.decide.partition.partition`.
        memory: of a device, and what a byte of parameters brings with it. Default: no limit.
        link: between ranks. Default: measured.
        data_parallel: the replicas, one dimension. Default: one replica.
        shard: divide parameters, gradients and optimizer state over the replicas (FSDP2).
        modules: names of the modules of each stage, for a model that cannot be exported.
        cuts: the units at which the second, third, ... stage begins, instead of deciding it.
        cost: of one micro-batch. Default: measured on the device, estimated for a model on the meta device.
        count: number of targets of a batch. Default: labels that are not -100, without labels rows.
        seed: of random operations (dropout), whose numbers do not depend on the layout.
        verify: compare the first step's loss and gradients with the unsplit model, which must fit a device.
        device: default: the current GPU for a mesh of GPUs, else the processor.
        initialise: for a model on the meta device, fills the weights of a module; default: as the model
            does (``_init_weights`` of transformers, ``reset_parameters``).

    Raises:
        UsageError: what was asked for cannot be; the message is the same on all ranks.
    """
    place = device_of(device, mesh)
    groups = make_groups(mesh, data_parallel, place)
    example = {name: tensor.detach() for name, tensor in example_inputs.items()}
    source = groups.together(lambda: _source(model, example, microbatches, modules, place))
    plan = decide(
        groups,
        lambda: cost or source.cost(place),
        num_micro_batches=microbatches,
        conditions=Conditions(
            link=link or measure_link(groups),
            memory=memory,
            names=PORTFOLIO if schedule == AUTO else (SCHEDULE_ALIASES.get(schedule, schedule),),
            virtual=VIRTUAL_CHOICES if virtual_stages is None else (virtual_stages,),
            active_micro_batches=active_microbatches,
            optimize=optimize,
            memory_weight=memory_weight,
        ),
        cuts=cuts if modules is None else range(1, len(modules)),
    )
    stages = source.stages(plan.cuts)
    placement = plan.schedule.placement
    names = [stage.parameter_names.values() for stage in stages]
    mine = [stage for stage, rank in zip(stages, placement, strict=True) if rank == groups.rank]
    runners = {stage.index: StageRunner(stage) for stage in mine}
    if next(model.parameters()).is_meta:
        groups.together(lambda: materialise(mine, model, place, initialise=initialise, seed=seed))
    else:
        put_on(place, mine)
    if shard and data_parallel is not None and data_parallel.size() > 1:
        shard_state(runners.values(), data_parallel, repeated(names, placement))
    checked = verify or plan.schedule.name in SPLIT_BACKWARD
    return Pipeline(
        plan,
        runners,
        owners(names, placement),
        groups,
        Settings(
            example={name: tensor.to("meta") for name, tensor in example.items()},
            count=count or default_count,
            seed=seed,
            title=type(model).__name__,
        ),
        aliases=source.aliases,
        reference=_reference(model, source, groups) if checked else None,
    )


def _source(
    model: nn.Module,
    example: Mapping[str, Tensor],
    microbatches: int,
    modules: Sequence[Sequence[str]] | None,
    place: torch.device,
) -> Source:
    """Trace the model, or follow its named modules, with the first micro-batch."""
    if microbatches < 1:
        raise UsageError(f"microbatches is {microbatches}; a batch has at least one")
    home = next((parameter.device for parameter in model.parameters()), None)
    if home is None:
        raise UsageError(f"{type(model).__name__} has no parameters: there is nothing to train")
    part = {name: tensor.to(home) for name, tensor in micro_batches(example, microbatches)[0].items()}
    return Graph(model, part) if modules is None else Named(model, part, modules)


def device_of(device: torch.device | str | None, mesh: DeviceMesh | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    if mesh is not None and mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu" if mesh is None else mesh.device_type)


def _reference(model: nn.Module, source: Source, groups: Groups) -> Unsplit:
    """Return what runs batches unsplit."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UsageError("verify needs a model that is not on the meta device: it is run unsplit")
    return lambda parts, weights, streams: run_unsplit(model, source.unsplit, parts, weights, streams, groups)
