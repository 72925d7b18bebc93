"""Holds the process groups of a pipeline, and the exchange of small facts before the first step.

Facts travel as JSON in a tensor: torch's own object collectives pickle, and a peer's bytes are never
unpickled here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.decide.cost import Link
from shoal.errors import ShoalError, UsageError
from shoal.json_text import parse_json

T = TypeVar("T")

_PROBE_BYTES = 4 << 20
_NUM_PINGS = 5


@dataclass(frozen=True, kw_only=True)
class ProcessGroups:
    """This worker's pipeline, the replicas that hold the same stages, and those with other parts of them."""

    mesh: DeviceMesh
    data_mesh: DeviceMesh | None
    device: torch.device
    tensor_mesh: DeviceMesh | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    @property
    def rank(self) -> int:
        """The rank in the pipeline."""
        return self.mesh.get_local_rank()

    @property
    def num_ranks(self) -> int:
        return self.mesh.size()

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The replicas' group; ``None`` where there is one replica."""
        return None if self.data_mesh is None or self.data_mesh.size() == 1 else self.data_mesh.get_group()

    @property
    def replica(self) -> int:
        return 0 if self.data_mesh is None else self.data_mesh.get_local_rank()

    @property
    def num_replicas(self) -> int:
        return 1 if self.data_mesh is None else self.data_mesh.size()

    @property
    def tensor_group(self) -> dist.ProcessGroup | None:
        """The workers that have parts of the same layers; ``None`` where layers are whole."""
        return None if self.tensor_mesh is None else self.tensor_mesh.get_group()

    def decide_first(self, action: Callable[[], Any]) -> Any:
        """Run ``action`` on the first rank of the first replica and return its JSON value on all ranks.

        Where layers are divided, all workers that have parts of that rank's run it together; the first of
        them decides.

        Raises:
            ShoalError: raised by ``action``; the same error on all ranks.
        """
        decided: dict[str, Any] = {}
        if self.rank == 0 and self.replica == 0:
            try:
                decided = {"value": action()}
            except ShoalError as error:
                decided = {"error": str(error), "usage": isinstance(error, UsageError)}
        if self.data_group is not None and self.rank == 0:
            decided = broadcast_json(decided, self.data_group, self.device)
        if self.num_ranks > 1:
            decided = broadcast_json(decided, self.group, self.device)
        decided = self.of_first_part(decided)
        if "error" in decided:
            raise _error_of(decided)
        return decided["value"]

    def of_first_part(self, value: Any) -> Any:
        """Return the JSON value of the first worker that has a part of this one's layers."""
        return value if self.tensor_group is None else broadcast_json(value, self.tensor_group, self.device)

    def together(self, action: Callable[[], T]) -> T:
        """Run ``action`` on every rank; if one raises, all ranks raise the same error.

        Raises:
            ShoalError: of the first rank that raised one, with its class, on all ranks of the pipeline.
        """
        failure: ShoalError | None = None
        try:
            result = action()
        except ShoalError as error:
            failure = error
        failed = torch.tensor([failure is not None], dtype=torch.int32, device=self.device)
        ranks = [torch.empty_like(failed) for _ in range(self.num_ranks)]
        dist.all_gather(ranks, failed, group=self.group)
        for rank, flag in enumerate(ranks):
            if int(flag):
                failed_with = {"error": str(failure), "usage": isinstance(failure, UsageError)}
                failed_with = broadcast_json(failed_with, self.group, self.device, root=rank)
                raise _error_of(failed_with) from failure
        return result

    def sum(self, tensor: torch.Tensor, *, of_all: bool = True) -> torch.Tensor:
        """Sum ``tensor`` over the ranks of this replica and, if ``of_all``, of all replicas, in place."""
        if self.num_ranks > 1:
            dist.all_reduce(tensor, group=self.group)
        if of_all and self.data_group is not None:
            dist.all_reduce(tensor, group=self.data_group)
        return tensor


def make_process_groups(
    mesh: DeviceMesh | None,
    data_mesh: DeviceMesh | None,
    device: torch.device,
    tensor_mesh: DeviceMesh | None = None,
) -> ProcessGroups:
    """Check the meshes of the user. Without one, all workers are one pipeline.

    As ``init_device_mesh`` does, this makes the default process group where a single process has none.

    Raises:
        UsageError: a mesh has more than one dimension.
    """
    if not dist.is_initialized() and mesh is None:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    if mesh is None:
        others = 1 if data_mesh is None else data_mesh.size()
        if others > 1:
            raise UsageError(
                f"data_parallel has {others} replicas but mesh is not given: make both of one mesh, "
                "shoal.pipelining.make_mesh(device, pipeline=..., data=...), and pass mesh['pp'] and "
                "mesh['dp']"
            )
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("pp",))
    for name, chosen in (("mesh", mesh), ("data_parallel", data_mesh), ("tensor_parallel", tensor_mesh)):
        if chosen is not None and chosen.ndim != 1:
            raise UsageError(
                f"{name} has {chosen.ndim} dimensions {chosen.mesh_dim_names}; "
                "it must have one: pass mesh['pp'], mesh['dp'] or mesh['tp']"
            )
    return ProcessGroups(mesh=mesh, data_mesh=data_mesh, device=device, tensor_mesh=tensor_mesh)


def broadcast_json(value: Any, group: dist.ProcessGroup, device: torch.device, root: int = 0) -> Any:
    """Return the ``value`` of rank ``root`` on every rank of ``group``."""
    data = json.dumps(value).encode() if dist.get_rank(group) == root else b""
    root = dist.get_global_rank(group, root)
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, src=root, group=group)
    buffer = torch.empty(int(size), dtype=torch.uint8, device=device)
    if data:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(buffer, src=root, group=group)
    return parse_json(buffer.cpu().numpy().tobytes(), f"what rank {root} sent")


def _error_of(decided: dict[str, Any]) -> ShoalError:
    return (UsageError if decided["usage"] else ShoalError)(decided["error"])


Message = tuple[Callable[..., dist.Work | None], torch.Tensor, int]
"""``dist.isend`` or ``dist.irecv``, the tensor, and the peer's rank in the group."""


def exchange(group: dist.ProcessGroup, *messages: Message) -> None:
    """Send and receive point to point, all messages at once, and wait for them."""
    operations = [dist.P2POp(way, tensor, group=group, group_peer=peer) for way, tensor, peer in messages]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def measure_link(groups: ProcessGroups) -> Link | None:
    """Measure the link between the first two ranks of the pipeline, on both; ``None`` elsewhere."""
    if groups.num_ranks == 1 or groups.rank > 1:
        return None
    small, large = (torch.zeros(size, dtype=torch.uint8, device=groups.device) for size in (8, _PROBE_BYTES))
    _ping(small, groups)  # opens the connection
    latency_s = min(_ping(small, groups) for _ in range(_NUM_PINGS)) / 2
    there_s = min(_ping(large, groups) for _ in range(_NUM_PINGS)) / 2
    return Link(bytes_per_s=_PROBE_BYTES / max(there_s - latency_s, 1e-9), latency_s=latency_s)


def _ping(tensor: torch.Tensor, groups: ProcessGroups) -> float:
    """Send a tensor there and back; return the seconds."""
    begin = time.perf_counter()
    ways = (dist.isend, dist.irecv)
    for way in ways if groups.rank == 0 else reversed(ways):
        exchange(groups.group, (way, tensor, 1 - groups.rank))
    if groups.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin
