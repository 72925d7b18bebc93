"""Which assumption breaks first as hosts are added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.decide.server_assignment import SMALLEST_SHARD_BYTES
from shoal.planner.hardware import Machines
from shoal.planner.network import CONNECTIONS_PER_PEER, collective
from shoal.planner.prediction import Part
from shoal.planner.step_time import Layout, num_replicas, step_time

LATENCY_SHARE = 0.1
STRAGGLER_SHARE = 0.05
MOST_FLOWS = 4096
"""Into one server. Beyond some thousand senders a switch port's buffer cannot hold a packet of each (incast:
Chen et al. 2009, "Understanding TCP Incast"); SMDDP's one-hop collectives limit each peer's rate for that."""


@dataclass(frozen=True, kw_only=True)
class Strain:
    """An assumption of the prediction, and how far it is stretched: it breaks above 1."""

    assumption: str
    stretch: float
    detail: str


def strains(part: Part, workers: Machines, layout: Layout, helpers: Machines | None = None) -> list[Strain]:
    """Return every assumption that more hosts stretch, the most stretched first."""
    replicas = num_replicas(workers, layout)
    step = step_time(part.workload, workers, layout, achieved_flops=part.achieved_flops, helpers=helpers)
    late = step.straggler_s / step.total_s
    found = [
        Strain(
            assumption="the batch still reaches the target",
            stretch=part.global_batch / max(part.convergence.largest_batch, 1),
            detail=f"global batch {part.global_batch:,}; the largest known to converge is "
            f"{part.convergence.largest_batch:,}",
        ),
        Strain(
            assumption="every replica has a sample",
            stretch=replicas / part.global_batch,
            detail=f"{part.global_batch / replicas:.2g} samples a replica and step",
        ),
        Strain(
            assumption="nobody waits long for the slowest",
            stretch=late / STRAGGLER_SHARE,
            detail=f"the slowest of {workers.num_accelerators:,} costs {100 * late:.1f} % "
            f"of a step; the limit taken is {100 * STRAGGLER_SHARE:.0f} %",
        ),
    ]
    how = collective(layout.algorithm, workers, helpers)
    latency_s = sum(phase.latency_s for phase in how.phases)
    found.append(
        Strain(
            assumption="latency of hops does not matter",
            stretch=latency_s / step.total_s / LATENCY_SHARE,
            detail=f"{1e3 * latency_s:.3g} ms of hops a collective in a step of {1e3 * step.total_s:.3g} ms",
        )
    )
    if layout.algorithm.startswith("two-hop"):
        flows = CONNECTIONS_PER_PEER * (workers.count - 1)
        found.append(
            Strain(
                assumption="a server takes all its senders (incast)",
                stretch=flows / MOST_FLOWS,
                detail=f"{flows:,} flows into each server",
            )
        )
        servers = workers.count + (helpers.count if helpers else 0)
        trained = (
            part.workload.num_parameters * part.workload.trainable * layout.wire_bytes / layout.per_replica
        )
        piece = min(layout.bucket_bytes, trained) / servers
        found.append(
            Strain(
                assumption="a server's shard of a bucket is worth a message",
                stretch=SMALLEST_SHARD_BYTES / piece,
                detail=f"{piece / 1024:.0f} KiB; below {SMALLEST_SHARD_BYTES // 1024} KiB handling counts",
            )
        )
    return sorted(found, key=lambda strain: -strain.stretch)


def breaks_first(
    part: Part, workers: Machines, layout: Layout, helpers: Machines | None = None
) -> tuple[int, Strain] | None:
    """Return the number of hosts, doubling up to ``workers.count``, at which the first assumption breaks.

    The batch is the part's at every size. None: nothing breaks.
    """
    for count in _doublings(workers.count):
        fewer = replace(workers, count=count)
        if fewer.num_accelerators % layout.per_replica:
            continue
        side = (
            None
            if helpers is None
            else replace(helpers, count=max(1, helpers.count * count // workers.count))
        )
        worst = strains(part, fewer, layout, side)[0]
        if worst.stretch > 1:
            return count, worst
    return None


def _doublings(count: int) -> Sequence[int]:
    sizes = [1]
    while sizes[-1] * 2 < count:
        sizes.append(sizes[-1] * 2)
    return [*sizes, count] if count > 1 else sizes
