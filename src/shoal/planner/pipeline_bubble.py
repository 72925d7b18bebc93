"""Computes the bubble of a pipeline with the schedules and the simulator that a run uses.

Layers are the units of :mod:`shoal.decide`: they are cut into stages as evenly as their FLOPs allow, and
scheduled as interleaved 1F1B, or as 1F1B where a device has one stage or micro-batches are too few. The
bubble is the time of the simulated step beyond an even share of the work: filling and draining, stages of
unequal size, and exposed relays.
"""

from __future__ import annotations

from functools import lru_cache

from shoal.decide.cost import Link, StageCost
from shoal.decide.layout import shares_of_stages
from shoal.decide.pipeline_schedules import make_schedule
from shoal.decide.pipeline_simulator import Simulator
from shoal.decide.workload import Workload
from shoal.planner.hardware import Machines

_MOST_ROUNDS = 8
"""Simulated rounds of as many micro-batches as devices. Each further micro-batch, and one that fills no
round, takes as long as the fullest device needs."""


def bubble_s(
    workload: Workload,
    workers: Machines,
    *,
    stages: int,
    virtual: int,
    tensor: int,
    micro_batches: int,
    micro_batch: float,
    compute_s: float,
    flow_bytes_per_s: float,
) -> float:
    """Return the seconds per step in which a device of a pipeline waits, beyond its even share of the work.

    Args:
        micro_batch: samples per micro-batch.
        compute_s: forward and backward pass of one micro-batch on one device, were all stages equal.
        flow_bytes_per_s: limit of two hosts' connections together.
    """
    link = _link(workload, workers, stages=stages, tensor=tensor, flow_bytes_per_s=flow_bytes_per_s)
    simulator = _simulator(stages, min(virtual, len(workload.layers) // stages), micro_batches)
    schedule = simulator.schedule
    shares = shares_of_stages(workload, schedule.num_stages)
    costs = [
        StageCost(
            forward_s=share * stages * compute_s * (1 - workload.backward_share),
            backward_s=share * stages * compute_s * workload.backward_share,
            relay_bytes=round(workload.relay_bytes * micro_batch),
        )
        for share in shares
    ]
    fullest = max(
        sum(share for share, rank in zip(shares, schedule.placement, strict=True) if rank == own)
        for own in range(stages)
    )
    more = micro_batches - schedule.num_micro_batches
    makespan = simulator.makespan_s(costs, link) + more * fullest * stages * compute_s
    return max(makespan - micro_batches * compute_s, 0.0)


def _link(
    workload: Workload, workers: Machines, *, stages: int, tensor: int, flow_bytes_per_s: float
) -> Link | None:
    """Return the link between neighbouring stages: inside a host where a replica fits on one, else its NIC.

    The devices of a layer (``tensor``) relay a part each, over links of their own or over their host's NIC.
    A replica over several hosts uses the NIC at every cut, which is too slow where some stages share a host.
    """
    instance = workers.domains.instance
    if not workload.relay_bytes:
        return None
    if stages * tensor <= instance.num_accelerators:
        rate = instance.effective_local * tensor
        return Link(bytes_per_s=rate, latency_s=instance.local_network.latency_s)
    rate = min(instance.effective_nic, flow_bytes_per_s)
    return Link(bytes_per_s=rate, latency_s=instance.network.latency_s)


@lru_cache(maxsize=256)
def _simulator(stages: int, virtual: int, micro_batches: int) -> Simulator:
    """Return a simulator of the micro-batches that are simulated."""
    name, count = "interleaved", min(micro_batches, _MOST_ROUNDS * stages)
    if virtual == 1 or micro_batches < stages:
        name, virtual = "1f1b", 1
    else:
        count -= count % stages
    return Simulator(make_schedule(name, num_ranks=stages, num_virtual=virtual, num_micro_batches=count))
