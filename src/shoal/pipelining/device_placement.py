"""Puts a stage's parameters and buffers on its device, under the model's names, sharded over the replicas."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from shoal.decide.ownership import shard_dimension
from shoal.errors import UsageError
from shoal.pipelining.stage import StageModule, replace_tensors
from shoal.pipelining.stage_runner import StageRunner


def move_stages(device: torch.device, stages: Sequence[StageModule]) -> None:
    """Move the stages to ``device``; a tensor that several of them share is moved once and stays shared.

    The model that was split keeps its own tensors, so that nothing of other stages moves and it can be freed.
    """
    replace_tensors(
        nn.ModuleList(stages), lambda tensor: None if tensor.device == device else tensor.detach().to(device)
    )
    for stage in stages:
        stage.move_graphs(device)


def state_of(runners: Iterable[StageRunner]) -> tuple[dict[str, nn.Parameter], dict[str, Tensor], set[str]]:
    """Return all stages' parameters and buffers by canonical name, and the buffers that are not saved."""
    parameters: dict[str, nn.Parameter] = {}
    buffers: dict[str, Tensor] = {}
    saved: set[str] = set()
    for runner in runners:
        stage = runner.stage
        for own, parameter in stage.named_parameters(remove_duplicate=False):
            parameters.setdefault(stage.parameter_names.get(own, own), parameter)
        for own, buffer in stage.named_buffers(remove_duplicate=False):
            if own in stage.buffer_names:  # others are constants of the graph
                buffers.setdefault(stage.buffer_names[own], buffer)
        saved |= {stage.buffer_names[own] for own in stage.state_dict() if own in stage.buffer_names}
    return parameters, buffers, set(buffers) - saved


class Bf16ReduceScatter:
    """Sends FSDP2's float32 gradients in bf16, others unchanged (FSDP2's ``ReduceScatter``).

    On backend shoal, servers add in float32 and round once. FSDP2's own ``reduce_dtype`` also adds up
    micro-batches in bf16; here they are added in float32.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce the gradients of all parts, ``[N]``, into this rank's part, ``[N / n]``.

        The result is valid on the current stream, whatever ``async_op`` is.
        """
        if input_tensor.dtype != torch.float32:
            dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group)
            return
        part = torch.empty_like(output_tensor, dtype=torch.bfloat16)
        dist.reduce_scatter_tensor(part, input_tensor.to(torch.bfloat16), op, group)
        output_tensor.copy_(part)


def shard_stages(
    runners: Iterable[StageRunner],
    mesh: DeviceMesh,
    whole: Collection[str],
    wire: torch.dtype | type | None = None,
    blocks: Sequence[nn.Module] = (),
) -> None:
    """Wrap each stage by FSDP2, with gradients summed over the replicas.

    Without blocks a stage is gathered for a whole step, and its gradients are summed once in it. Blocks are
    gathered one at a time in each pass of a micro-batch, and their gradients are summed in each.

    Args:
        whole: names of parameters that are not sharded.
        wire: dtype in which float32 gradients are sent; default: as they are.
        blocks: modules of the only stage that are gathered alone.

    Raises:
        UsageError: the wire is not bf16, or weights that others divide do not divide evenly.
    """
    if wire not in (None, torch.bfloat16):
        raise UsageError(
            f"wire {wire} with shard: FSDP2's gradients are sent in torch.bfloat16, or as they are"
        )
    for runner in runners:
        names = runner.stage.parameter_names
        own = dict(runner.stage.named_parameters(remove_duplicate=False))
        ignored = {parameter for name, parameter in own.items() if names.get(name, name) in whole}
        if ignored == set(own.values()):
            continue
        # a runner that FSDP2 wraps is gathered by torch's pipeline runtime, with all blocks and for the step
        for unit in (*blocks, runner.stage) if blocks else (runner,):
            sharded: FSDPModule = fully_shard(
                unit, mesh=mesh, ignored_params=ignored, shard_placement_fn=partial(_placement, mesh.size())
            )
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            if wire is not None:
                sharded.set_custom_reduce_scatter(Bf16ReduceScatter())  # type: ignore[arg-type]  # private class


def _placement(num_shards: int, parameter: nn.Parameter) -> Shard | None:
    """Return the dimension of a parameter that is sharded; ``None``: the first.

    Raises:
        UsageError: other workers divide the first dimension, and none divides evenly over both.
    """
    if not isinstance(parameter, DTensor) or not any(place.is_shard(0) for place in parameter.placements):
        return None
    num_parts, sizes = parameter.device_mesh.size(), tuple(parameter.shape)
    dimension = shard_dimension(sizes, num_parts, num_shards)
    if dimension is not None:
        return Shard(dimension)
    raise UsageError(
        f"shard: a weight of {' × '.join(map(str, sizes))}, of which {num_parts} workers have a part each, "
        f"does not divide evenly into {num_shards} shards; take another number of replicas, or do not shard"
    )
