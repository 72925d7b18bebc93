"""Finds the assumption of a prediction that breaks first as hosts are added."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.decide.layout import CONNECTIONS_PER_PEER, Layout
from shoal.decide.server_assignment import SMALLEST_SHARD_BYTES
from shoal.planner.hardware import Machines
from shoal.planner.network import collective
from shoal.planner.prediction import Part
from shoal.planner.step_time import num_replicas, step_time

LATENCY_SHARE = 0.1
STRAGGLER_SHARE = 0.05
MOST_FLOWS = 4096
"""Flows into one server. Beyond some thousand senders a switch port's buffer cannot hold a packet of each
(incast: Chen et al. 2009, "Understanding TCP Incast"); SMDDP's one-hop collectives limit each peer's rate
for that reason."""


@dataclass(frozen=True)
class Strain:
    """An assumption of the prediction and its load relative to the limit: it breaks above 1."""

    assumption: str
    stretch: float
    detail: str


def strains(part: Part, workers: Machines, layout: Layout, helpers: Machines | None = None) -> list[Strain]:
    """Return the assumptions that more hosts stretch, the most stretched first."""
    replicas = num_replicas(workers, layout)
    step = step_time(part.workload, workers, layout, achieved_flops=part.achieved_flops, helpers=helpers)
    late = step.straggler_s / step.total_s
    largest = part.convergence.largest_batch
    all_reduce = collective(layout.algorithm, workers, helpers)
    latency_s = sum(phase.latency_s for phase in all_reduce.phases)
    rows = [
        (
            "the batch still reaches the target",
            part.global_batch / max(largest, 1),
            f"global batch {part.global_batch:,}; the largest known to converge is {largest:,}",
        ),
        (
            "every replica has a sample",
            replicas / part.global_batch,
            f"{part.global_batch / replicas:.2g} samples per replica and step",
        ),
        (
            "waiting for the slowest is short",
            late / STRAGGLER_SHARE,
            f"the slowest of {workers.num_accelerators:,} costs {100 * late:.1f} % of a step; "
            f"the limit is {100 * STRAGGLER_SHARE:.0f} %",
        ),
        (
            "latency of hops does not matter",
            latency_s / step.total_s / LATENCY_SHARE,
            f"{1e3 * latency_s:.3g} ms of hops per collective in a step of {1e3 * step.total_s:.3g} ms",
        ),
    ]
    if layout.algorithm.startswith("two-hop"):
        flows = CONNECTIONS_PER_PEER * (workers.count - 1)
        servers = workers.count + (helpers.count if helpers else 0)
        trained = part.workload.num_parameters * part.workload.trainable / layout.per_replica
        piece = min(layout.bucket_bytes, trained * layout.wire_bytes) / servers
        rows += [
            (
                "a server takes all its senders (incast)",
                flows / MOST_FLOWS,
                f"{flows:,} flows into each server",
            ),
            (
                "a server's shard of a bucket is worth a message",
                SMALLEST_SHARD_BYTES / piece,
                f"{piece / 1024:.0f} KiB; below {SMALLEST_SHARD_BYTES // 1024} KiB handling counts",
            ),
        ]
    return sorted((Strain(*each) for each in rows), key=lambda strain: -strain.stretch)


def breaks_first(
    part: Part, workers: Machines, layout: Layout, helpers: Machines | None = None
) -> tuple[int, Strain] | None:
    """Return the number of hosts, doubling up to ``workers.count``, at which the first assumption breaks.

    The batch is the part's at every size. None: nothing breaks.
    """
    doublings = (1 << k for k in range(workers.count.bit_length()) if 1 << k < workers.count)
    for count in (*doublings, workers.count):
        fewer = replace(workers, count=count)
        if fewer.num_accelerators % layout.per_replica:
            continue
        helping = helpers and replace(helpers, count=max(1, helpers.count * count // workers.count))
        worst = strains(part, fewer, layout, helping)[0]
        if worst.stretch > 1:
            return count, worst
    return None
