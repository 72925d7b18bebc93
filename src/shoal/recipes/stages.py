"""Opens the stages of a model for the recipes that divide it over workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from shoal.comm.hooks import EightBitWire
from shoal.decide.batch import BatchPlan, StagesConfig
from shoal.pipelining.api import make_mesh, pipeline
from shoal.pipelining.runtime import Pipeline
from shoal.pipelining.stage import replace_tensors
from shoal.train.config import DistributedConfig, ServersConfig
from shoal.train.optimizer_shards import OptimizerShards
from shoal.train.pipeline_update import PipelineUpdate
from shoal.train.run import Run

_WIRES = {"fp32": None, "bf16": torch.bfloat16, "int8": EightBitWire}


def open_stages(
    model: nn.Module,
    example: Mapping[str, Tensor],
    run: Run,
    parallel: StagesConfig,
    batch: BatchPlan,
    *,
    fill: Callable[[nn.Module], object] | None = None,
    distributed: DistributedConfig,
    servers: ServersConfig,
) -> Pipeline:
    """Return this worker's stages with their weights; the run's update is theirs. A collective call.

    Args:
        model: its weights, if it has some, are those of the stages; afterwards it is on the meta device,
            unless it is the only stage.
        example: one replica's batch, on the CPU.
        batch: its ``num_workers`` are the replicas.
        fill: loads the weights of a part of a model that is on the meta device; default: weights drawn from
            the run's seed, the same in every layout.
        distributed: the wire format of the replicas' gradients.
        servers: whether servers update the weights, with the gradients of each worker.

    Raises:
        UsageError: the model cannot be split so, or the weights are of another one.
        ShoalError: the weights cannot be read; another worker failed.
    """
    mesh = make_mesh(run.world.device.type, pipeline=parallel.pipeline, data=batch.num_workers)
    stage = pipeline(
        model,
        example,
        mesh=mesh["pp"],
        data_parallel=mesh["dp"],
        microbatches=batch.accumulation_steps,
        schedule=parallel.schedule,
        virtual_stages=parallel.virtual_stages,
        optimize=parallel.optimize,
        shard=parallel.shard,
        seed=run.seed,
        device=run.world.device,
        whole=True,
        initialise=None if fill is None else lambda module: None,
        autocast=run.precision.dtype,
        wire=_WIRES[distributed.wire],
    )
    is_whole = any(part.weights is model for part in stage.stages)
    compiles_blocks = is_whole and type(model).compile is not nn.Module.compile
    for part in [model] if is_whole else stage.stages:  # batches of a pipeline have one shape
        run.compile(part, dynamic=False, by_default=compiles_blocks)
    if fill is not None:
        fill(stage.module)
    if not is_whole:  # it would keep the weights of its stages, which FSDP2 has replaced by shards
        replace_tensors(model, lambda tensor: torch.empty_like(tensor, device="meta"))
    shards = OptimizerShards(mesh["dp"].get_group()) if run.shards_optimizer else None
    run.use(PipelineUpdate(stage, mesh["pp"], shards=shards))
    if not servers.is_synchronous:  # of a worker's own gradients; DDP names the group and the weights
        stage.is_alone = True
        run.data_parallel(stage.module)
    return stage
