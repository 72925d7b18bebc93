"""Describes the division of a model and a batch over devices, and counts the memory of one of them.

Dry runs, ``--layout auto``, ``shoal bench train`` and ``shoal plan`` use this layout and this memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from shoal.decide.cost import ModelCost, Unit, stage_costs
from shoal.decide.footprint import Footprint, Numerics
from shoal.decide.partition import partition
from shoal.decide.pipeline_simulator import loop_placement
from shoal.decide.server_assignment import DDP_BUCKET_BYTES
from shoal.decide.workload import Workload

CONNECTIONS_PER_PEER = 4
"""Flows between two hosts: as many as the two-hop backend opens and NCCL's sockets are set to on EC2."""
RESERVED = 0.1
"""Share of a device's memory for the framework, workspaces and fragmentation."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Distribution of a global batch over the accelerators.

    ``tensor × context × stages`` accelerators hold one replica of the model; the rest is data parallel.
    """

    global_batch: int
    micro_batch: float | None = None
    """Samples per replica and pass; None: its whole share (no accumulation) where ``stages`` is 1."""
    tensor: int = 1
    """Accelerators over which each layer is split."""
    context: int = 1
    """Accelerators that share the tokens of a sequence; each has whole layers."""
    stages: int = 1
    """Pipeline stages."""
    virtual: int = 1
    """Chunks of layers on each stage's accelerators."""
    algorithm: str = "hierarchical-ring"
    bucket_bytes: int = DDP_BUCKET_BYTES
    """Size of a bucket on the network."""
    wire_bytes: int = 2
    """Bytes of a gradient element on the network."""
    connections: int = CONNECTIONS_PER_PEER
    """Flows between two hosts that exchange; matters where one flow does not fill the NIC."""
    collectives_at_once: int = 1
    """For a ring or a tree: NCCL runs the collectives of a group in order, gloo's two threads two at a
    time."""
    overlap: bool = True
    """Averaging begins during the backward pass; it cannot where each worker clips its gradients before."""
    cuda_graphs: bool = False
    """The kernels of a step are launched at once, as CUDA graphs, not one by one."""
    shard: bool = False
    """Parameters, gradients and the optimizer's state are divided over the replicas (FSDP2)."""
    sharded_optimizer: bool = False
    """Each replica updates its part of the parameters only, and sends it to the others (ZeRO-1)."""
    updates_by_host: bool = False
    """Each accelerator of a host updates its part of the parameters, before the last phase of a hierarchical
    all-reduce gathers them on the host, as NVIDIA's distributed LAMB does."""
    scatters: bool = False
    """With a sharded optimizer: only owners get averaged gradients, and the new weights are gathered in the
    next forward pass, as Megatron's optimizer does."""

    @property
    def per_replica(self) -> int:
        """Accelerators that hold one copy of the model."""
        return self.tensor * self.context * self.stages


def footprint_of(
    workload: Workload,
    layout: Layout,
    *,
    micro_batch: float,
    num_micro_batches: int,
    replicas: int,
    numerics: Numerics,
) -> Footprint:
    """Return the memory of the fullest device of a layout.

    Where tensors are divided, the workload has the :attr:`~shoal.decide.workload.Workload.parts`. In a
    pipeline that is the device whose stages have the most parameters. The first of p stages keeps the
    activations of up to p micro-batches of its 1 / p of the layers, and computes one layer again at a time.

    Args:
        micro_batch: samples per micro-batch.
        num_micro_batches: per replica and step.
        replicas: among which the optimizer's state, or all of the state, is divided.
        numerics: of the device, whose activations are kept for the backward pass.
    """
    own = workload if layout.tensor == 1 else workload.parts[layout.tensor]
    held = own.num_parameters * fullest_share(workload, stages=layout.stages, virtual=layout.virtual)
    trained = held * workload.trainable
    # Sharded parameters and gradients are whole at times, beside their shard.
    beside = 1 / replicas if layout.shard else 0.0
    whole = workload.gathered if layout.shard and layout.stages == 1 else 1.0
    owned = beside or (workload.owned(replicas) if layout.sharded_optimizer else 1.0)
    is_explicit = layout.stages > 1 and workload.explicit_stages
    kept = own.activations[numerics.without_kernels if is_explicit else numerics]
    return Footprint(
        weights_bytes=round(4 * held * (whole + beside)),
        gradients_bytes=round(4 * trained * (whole + beside)),
        optimizer_bytes=round(owned * workload.state_bytes * trained),
        activations_bytes=kept.of(
            micro_batch / layout.context, 1 / layout.stages, min(layout.stages, num_micro_batches)
        ),
    )


def fullest_share(workload: Workload, *, stages: int, virtual: int) -> float:
    """Return the largest share of the parameters that one device holds."""
    if stages == 1:
        return 1.0
    num_stages = stages * min(virtual, len(workload.layers) // stages)
    bounds = (0, *_cuts_of(workload, num_stages), len(workload.layers))
    held = [0] * stages
    for stage, (begin, end) in zip(
        loop_placement(stages, num_stages // stages), pairwise(bounds), strict=True
    ):
        held[stage] += sum(layer.num_parameters for layer in workload.layers[begin:end])
    return max(held) / max(workload.num_parameters, 1)


@lru_cache(maxsize=256)
def _cuts_of(workload: Workload, num_stages: int) -> tuple[int, ...]:
    """Return the layers at which the second, third, ... stage begins, with FLOPs as even as possible."""
    return tuple(partition(_model_cost(workload), num_stages))


@lru_cache(maxsize=256)
def shares_of_stages(workload: Workload, num_stages: int) -> tuple[float, ...]:
    """Return each stage's share of the FLOPs."""
    cost = _model_cost(workload)
    return tuple(stage.forward_s for stage in stage_costs(cost, _cuts_of(workload, num_stages)))


def _model_cost(workload: Workload) -> ModelCost:
    total = workload.forward_flops or 1.0
    units = tuple(
        Unit(name=layer.name, forward_s=layer.forward_flops / total, backward_s=0.0)
        for layer in workload.layers
    )
    return ModelCost(units=units, relay_bytes=(0,) * (len(units) - 1), source="roofline")
