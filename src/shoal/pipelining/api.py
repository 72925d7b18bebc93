"""Splits an unmodified model into a pipeline: the public functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.decide.autotune import PORTFOLIO, VIRTUAL_CHOICES, Conditions
from shoal.decide.cost import Link, ModelCost
from shoal.decide.partition import Memory, Optimize
from shoal.errors import UsageError, did_you_mean
from shoal.pipelining.device_placement import move_stages, shard_stages
from shoal.pipelining.init_meta import Initialise, init_meta
from shoal.pipelining.loss import Batch, Count, default_count, micro_batches
from shoal.pipelining.pipeline_plan import PipelinePlan, decide
from shoal.pipelining.process_groups import make_process_groups, measure_link
from shoal.pipelining.runtime import Pipeline, PipelineOptions
from shoal.pipelining.stage_runner import StageRunner
from shoal.pipelining.stage_sources import Graph, Named, Source, Whole
from shoal.pipelining.tied_weights import repeated, users

SCHEDULE_ALIASES = {"simple": "gpipe"}
"""SageMaker's names."""
AUTO = "auto"
SPLIT_BACKWARD = frozenset({"zbv"})
"""Schedules that split the backward pass: torch does it wrongly for some graphs, so they are verified."""


Lower = Callable[[], AbstractContextManager[object]]
"""Makes the context of a forward pass, in which matrix products may have a lower precision."""


def make_mesh(
    device_type: str, *, pipeline: int, data: int = 1, tensor: int = 1, placement_strategy: str = "cluster"
) -> DeviceMesh:
    """Return a mesh of all workers with the axes ``pp`` (stages) and ``dp`` (replicas).

    Args:
        device_type: ``"cuda"`` or ``"cpu"``.
        pipeline: ranks of a pipeline.
        data: replicas; ``pipeline * data * tensor`` is the number of workers.
        tensor: neighbouring ranks over which layers are divided; more than one are a last axis ``tp``.
        placement_strategy: ``"cluster"``: the ranks of a pipeline are neighbours, so that one host holds
            whole pipelines if it can. ``"spread"``: replicas are neighbours, and a pipeline spans hosts.

    Raises:
        UsageError: the strategy is unknown.

    Example (one process):

        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> make_mesh("cpu", pipeline=1).mesh_dim_names
        ('dp', 'pp')
        >>> dist.destroy_process_group()
    """
    if placement_strategy not in ("cluster", "spread"):
        raise UsageError(
            f"placement_strategy is {placement_strategy!r}; it must be 'cluster' or 'spread'."
            f"{did_you_mean(placement_strategy, ('cluster', 'spread'))}"
        )
    axes = {"dp": data, "pp": pipeline} if placement_strategy == "cluster" else {"pp": pipeline, "dp": data}
    if tensor > 1:
        axes["tp"] = tensor
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


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
    tensor_parallel: DeviceMesh | None = None,
    shard: bool = False,
    modules: Sequence[Sequence[str]] | None = None,
    whole: bool = False,
    blocks: Sequence[nn.Module] = (),
    cuts: Sequence[int] | None = None,
    cost: ModelCost | None = None,
    plan: PipelinePlan | None = None,
    count: Count | None = None,
    seed: int = 0,
    verify: bool = False,
    device: torch.device | str | None = None,
    initialise: Initialise | None = None,
    autocast: torch.dtype | None = None,
    wire: torch.dtype | type | None = None,
) -> Pipeline:
    """Split ``model`` over the ranks of ``mesh`` and return this rank's part. A collective call.

    The model is exported, cut into stages of about equal time that fit the memory, and scheduled; it is not
    changed and needs no changes, but must return its own loss. It may be on the meta device: then only this
    rank's part is ever allocated. ``docs/pipeline.md`` has the limits and measurements.

    Args:
        model: returns a scalar loss: itself, as ``.loss``, as key ``loss`` or first in a tuple. Layers for
            which transformers' activation checkpointing is on keep it in their stages.
        example_inputs: one replica's batch, name -> tensor ``[rows, ...]``. All later batches must have these
            names, shapes and dtypes.
        mesh: ranks of the pipeline, one dimension. Default: all workers.
        microbatches: number of equal parts of a batch; must divide ``rows``.
        schedule: ``"auto"`` simulates all and takes the fastest that fits; or ``"gpipe"`` (SageMaker's
            ``"simple"``), ``"1f1b"``, ``"interleaved"``, ``"bfs"``, ``"vee"``, ``"backward_first"``;
            ``"zbv"`` on request only, with its first step verified.
        optimize: ``"speed"``, or ``"memory"`` for the layout whose fullest rank needs least.
        virtual_stages: stages per rank. Default: 1, 2 or 4, whichever is fastest.
        active_microbatches: limit of micro-batches in flight for the greedy schedules (vee, backward_first,
            zbv). Default: the best of three.
        memory_weight: weight of memory against time in the choice of cuts, 0 to 1. Default: 0, or 0.8 with
            ``optimize="memory"``.
        memory: limit of a device in bytes, with the bytes of gradients and optimizer state per byte of
            parameters. Default: no limit.
        link: bandwidth and latency between ranks. Default: measured.
        data_parallel: ranks of other replicas that hold the same stages, one dimension. Default: none.
        tensor_parallel: ranks that have other parts of the same layers, one dimension, where the model's
            parameters are DTensors of it and its modules compute with their parts. Default: none.
        shard: shard parameters, gradients and optimizer state over the replicas (FSDP2).
        modules: names of the modules of each stage, for a model that cannot be exported.
        whole: where one rank has one stage, run the model itself instead of its graph, with the same numbers:
            nothing is exported, and the model's own ``compile`` serves it. Weights and mode of the stage are
            then those of ``model``, in which only dropout may be random.
        blocks: modules of such a whole model, in their order, that ``shard`` gathers one at a time in each
            micro-batch. Default: none; a stage is gathered for a step.
        cuts: units at which the second, third, ... stage begins, instead of choosing them.
        cost: cost of one micro-batch. Default: measured on the device, for a model on meta with arbitrary
            weights.
        plan: that of an earlier pipeline of this model with the same ranks and micro-batches. Default: a new
            one, which depends on measured times; the last bits of gradients depend on it.
        count: returns the number of targets of a (micro-)batch. Default: the labels that are not -100, or the
            rows without labels.
        seed: of random operations (dropout), whose numbers do not depend on the layout.
        verify: compare the first step's loss and gradients with the unsplit model, which must fit a device.
        device: default: the current GPU for a mesh of GPUs, else the CPU.
        initialise: fills the weights of a module on the meta device. Default: the model's own way
            (transformers' ``_init_weights``, ``reset_parameters``).
        autocast: dtype of matrix products in the forward pass, such as ``torch.bfloat16``, or
            ``torch.float16`` with a loss scale (:class:`Pipeline`). Do not run ``step`` inside
            ``torch.autocast``, since it runs the backward pass too. Default: that of the parameters.
        wire: dtype in which replicas send fp32 gradients: ``torch.bfloat16`` for half the bytes,
            the class :class:`shoal.EightBitWire` for a quarter, with error feedback, but not with ``shard``.
            Default: as they are.

    Raises:
        UsageError: the model cannot be exported or split as requested, or fits no device; the message is the
            same on all ranks.
        ShoalError: another rank failed.

    Sources: GPipe (Huang et al. 2019, arXiv 1811.06965), PipeDream (Narayanan et al. 2019), interleaved 1F1B
    (Narayanan et al. 2021, arXiv 2104.04473, section 2.2); see :mod:`shoal.decide.pipeline_schedules`.

    Example (one process; on several, each rank gets its own stages):
        >>> import torch
        >>> from torch import nn
        >>> class Regression(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        ...     def forward(self, x, y):
        ...         return (self.layers(x) - y).square().mean()
        >>> batch = {"x": torch.randn(4, 8), "y": torch.randn(4, 1)}
        >>> model = Regression()
        >>> stage = pipeline(model, batch, microbatches=2, schedule="1f1b")
        >>> loss = stage.step(**batch)
        >>> torch.allclose(loss, model(**batch))
        True
        >>> sorted(name for name, p in stage.module.named_parameters() if p.grad is not None)[:2]
        ['layers.0.bias', 'layers.0.weight']
        >>> stage.close()
    """
    own_device = device_of(device, mesh)
    groups = make_process_groups(mesh, data_parallel, own_device, tensor_parallel)
    example = {name: tensor.detach() for name, tensor in example_inputs.items()}
    is_whole = whole and groups.num_ranks == 1 and virtual_stages in (None, 1)
    is_whole = is_whole and modules is None and cuts is None
    virtual = (1,) if is_whole else VIRTUAL_CHOICES if virtual_stages is None else (virtual_stages,)
    source = groups.together(lambda: _source(model, example, microbatches, modules, is_whole))
    decided = decide(
        groups,
        lambda: cost or source.cost(own_device),
        num_micro_batches=microbatches,
        conditions=Conditions(
            link=link or measure_link(groups),
            memory=memory,
            names=PORTFOLIO if schedule == AUTO else (SCHEDULE_ALIASES.get(schedule, schedule),),
            virtual=virtual,
            active_micro_batches=active_microbatches,
            optimize=optimize,
            memory_weight=memory_weight,
        ),
        cuts=cuts if modules is None else range(1, len(modules)),
        given=plan,
    )
    stages = source.stages(decided.cuts)
    placement = decided.schedule.placement
    used_by = users([stage.parameter_names.values() for stage in stages], placement)
    mine = [stage for stage, rank in zip(stages, placement, strict=True) if rank == groups.rank]
    lower = _autocast(own_device, autocast)
    runners = {stage.index: StageRunner(stage, lower) for stage in mine}
    is_on_meta = next(model.parameters()).is_meta
    if not is_on_meta:
        move_stages(own_device, mine)
    if shard and data_parallel is not None and data_parallel.size() > 1:
        shard_stages(runners.values(), data_parallel, repeated(used_by), wire, blocks if is_whole else ())
    if is_on_meta:  # of sharded weights each worker allocates its own shards
        groups.together(lambda: init_meta(mine, model, own_device, initialise=initialise, seed=seed))
    is_verified = verify or decided.schedule.name in SPLIT_BACKWARD
    return Pipeline(
        decided,
        runners,
        used_by,
        groups,
        PipelineOptions(
            example={name: tensor.to("meta") for name, tensor in example.items()},
            count=count or default_count,
            seed=seed,
            title=type(model).__name__,
            wire=wire,
        ),
        aliases=source.aliases,
        unsplit=_unsplit(model, source, lower) if is_verified else None,
    )


def _source(
    model: nn.Module,
    example: Mapping[str, Tensor],
    microbatches: int,
    modules: Sequence[Sequence[str]] | None,
    is_whole: bool,
) -> Source:
    """Export the model with the first micro-batch, chain its named modules, or run it unchanged."""
    if microbatches < 1:
        raise UsageError(f"microbatches is {microbatches}; a batch has at least one")
    home = next((parameter.device for parameter in model.parameters()), None)
    if home is None:
        raise UsageError(f"{type(model).__name__} has no parameters: there is nothing to train")
    values = micro_batches(example, microbatches)[0]
    if is_whole:
        return Whole(model, values)
    part = {name: tensor.to(home) for name, tensor in values.items()}
    return Graph(model, part, values) if modules is None else Named(model, part, modules)


def _autocast(device: torch.device, dtype: torch.dtype | None) -> Lower:
    """Return the context of the forward pass.

    It has no cache of casted weights, which would keep them for all micro-batches.
    """
    if dtype is None:
        return nullcontext
    return partial(torch.autocast, device.type, dtype, cache_enabled=False)


def _unsplit(model: nn.Module, source: Source, lower: Lower) -> tuple[nn.Module, Callable[[Batch], object]]:
    """Return the model and its forward pass without stages, with which the first step is compared.

    Raises:
        UsageError: the model has no weights yet.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UsageError("verify needs a model that is not on the meta device: it is run unsplit")

    def run(part: Batch) -> object:
        with lower():
            return source.unsplit(part)

    return model, run


def device_of(device: torch.device | str | None, mesh: DeviceMesh | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    if mesh is not None and mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu" if mesh is None else mesh.device_type)
