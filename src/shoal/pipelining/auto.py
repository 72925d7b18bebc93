"""Chooses stages, replicas and micro-batches for the workers of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shoal.decide.autotune import Conditions
from shoal.decide.layout_search import MICRO_BATCH_SIZES, LayoutSearch
from shoal.decide.partition import Memory, Optimize
from shoal.pipelining.api import device_of, make_mesh
from shoal.pipelining.explain import explain_layouts
from shoal.pipelining.loss import num_rows
from shoal.pipelining.process_groups import make_process_groups, measure_link
from shoal.pipelining.stage_sources import Graph


@dataclass(frozen=True)
class AutoLayout:
    """The chosen layout, the same on all workers.

    Attributes:
        mesh: Replicas × stages, the axes ``dp`` and ``pp``.
        options: Keyword arguments for :func:`shoal.pipelining.pipeline`.
        text: Report with stages, memory, timeline and the reason for this layout.
    """

    mesh: DeviceMesh
    options: dict[str, Any]
    text: str

    def part(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this replica's rows of a global batch, the same on all stages of a replica."""
        replica, replicas = self.mesh["dp"].get_local_rank(), self.mesh["dp"].size()
        size = num_rows(batch) // replicas
        rows = slice(replica * size, (replica + 1) * size)
        return {name: tensor[rows] if tensor.ndim else tensor for name, tensor in batch.items()}


def auto_layout(
    model: nn.Module,
    global_batch: Mapping[str, Tensor],
    *,
    memory: Memory,
    shard: bool = False,
    optimize: Optimize = "speed",
    placement_strategy: str = "cluster",
    device: torch.device | str | None = None,
) -> AutoLayout:
    """Choose the layout of all workers that trains fastest within ``memory``. A collective call.

        layout = auto_layout(model, batch, memory=Memory(limit_bytes=40_000_000_000))
        stage = pipeline(model, layout.part(batch), **layout.options)
        loss = stage.step(**layout.part(batch))

    Args:
        model: measured if it is on the workers' device, else estimated.
        global_batch: an example batch, name -> tensor ``[rows, ...]``, with the rows of all replicas.
        memory: of a device, with the bytes of gradients and optimizer state per byte of parameters.
        shard: whether to shard the state over the replicas (FSDP2).
        placement_strategy: see :func:`shoal.pipelining.make_mesh`.

    Raises:
        UsageError: no layout fits; the message has the missing bytes and a layout that would fit.
    """
    own_device = device_of(device, None)
    groups = make_process_groups(None, None, own_device)
    link = measure_link(groups)

    def decide() -> dict[str, Any]:
        rows = num_rows(global_batch)
        sizes = [size for size in MICRO_BATCH_SIZES if rows % size == 0]
        base = sizes[len(sizes) // 2]
        home = next((parameter.device for parameter in model.parameters()), own_device)
        values = {
            name: (tensor[:base] if tensor.ndim else tensor).detach() for name, tensor in global_batch.items()
        }
        example = {name: tensor.to(home) for name, tensor in values.items()}
        search = LayoutSearch(
            cost=Graph(model, example, values).cost(own_device),
            memory=memory,
            global_batch_size=rows,
            micro_batch_size=base,
            sizes=sizes,
            conditions=Conditions(link=link, optimize=optimize),
            shard=shard,
        )
        layouts = search.choose(groups.num_ranks)
        best = layouts[0]
        return {
            "pipeline": best.layout.stages,
            "data": best.data,
            "options": {
                "microbatches": best.num_micro_batches,
                "schedule": best.choice.schedule.name,
                "virtual_stages": best.layout.virtual,
                "cuts": list(best.choice.cuts),
            },
            "text": explain_layouts(layouts, title=f"{type(model).__name__} on {groups.num_ranks} workers"),
        }

    decided = groups.decide_first(decide)
    mesh = make_mesh(
        own_device.type,
        pipeline=decided["pipeline"],
        data=decided["data"],
        placement_strategy=placement_strategy,
    )
    options = {
        "mesh": mesh["pp"],
        "data_parallel": mesh["dp"],
        "memory": Memory(**{**asdict(memory), "shards": decided["data"] if shard else 1}),
        "shard": shard,
        "optimize": optimize,
        "device": own_device,
        **decided["options"],
    }
    return AutoLayout(mesh, options, decided["text"])
