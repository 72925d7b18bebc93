"""Computes the load that each all-reduce algorithm puts on each link.

A host's *local* links join its accelerators; its NIC sends (*out*) and receives (*in*) at the same time.
Helpers have NICs of their own. Hosts of a kind are equal and do the same at the same time in an all-reduce,
so one host stands for all of its kind; that is exact for every algorithm here. Compute time, which differs
between hosts, is drawn per worker (``simulate.slowest``), and only the slowest counts, because every sum
needs every host.

With M bytes of gradient on each accelerator, n hosts of g accelerators, W = n g workers:

    ring               2 (W - 1) / W · M over every link and NIC, 2 (W - 1) hops
    hierarchical-ring  (g - 1) / g · M locally, 2 (n - 1) / n · M over the NIC, (g - 1) / g · M locally
    torus              the same in 2 (x - 1) + 2 (y - 1) hops: hosts are a grid of x · y, and sums go along
                       rows, then columns (Mikami et al. 2018, arXiv 1811.05233); for comparison only
    tree               the same with up to 2 M over the NIC and 2 log2 n levels (double binary tree)
    two-hop            with the shares of ``decide.server_assignment.server_shares``: M (1 + (n - 2) s) over a
                       host's NIC and n h M over a helper's, each way; two hops

A library of rings runs few collectives at a time (NCCL one, gloo two); two hops take buckets as they come.

Rings of NCCL reach nearly the line rate with any long message, but their latency grows with the accelerators.
Trees have little latency and lose bandwidth with messages of a few MiB, and on hosts with fast networks. The
figures are those by which NCCL itself chooses (src/graph/tuning.cc of its source).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from shoal.decide.layout import CONNECTIONS_PER_PEER
from shoal.decide.server_assignment import server_shares
from shoal.errors import UsageError, did_you_mean
from shoal.planner.hardware import Instance, Machines

LOCAL, OUT, IN, HELPER_OUT, HELPER_IN = "local", "out", "in", "helper out", "helper in"
WITH_HELPERS = "two-hop-helpers"
ALGORITHMS = ("ring", "hierarchical-ring", "tree", "two-hop", WITH_HELPERS)
"""Algorithms that a training can use."""
RINGS = ("ring", "hierarchical-ring")
"""Algorithms that also gather, and scatter sums."""
TORUS = "torus"
COMPARED = (*ALGORITHMS, TORUS)
"""Algorithms that predictions compare; the torus is never planned."""


@dataclass(frozen=True, kw_only=True)
class Tree:
    """A protocol of NCCL's double binary trees; bandwidths are of a host's network."""

    level: float
    """Latency of a level over that of a hop of a ring: a chunk goes through a host, too."""
    efficiency: float
    """Bandwidth with endless messages over that of a ring."""
    shares: tuple[float, ...]
    """Bandwidth with messages of 2, 4, 8, ... 128 MiB and more, over that with endless ones."""
    most_bytes_per_s: float = math.inf
    """With GPUs before Hopper."""

    def share(self, message_bytes: float) -> float:
        doublings = math.log2(max(message_bytes, _SMALLEST) / _SMALLEST)
        return self.shares[int(min(doublings, len(self.shares) - 1))]


_SMALLEST = 2 << 20
SIMPLE = Tree(level=5.2, efficiency=0.9, shares=(0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9))
LL128 = Tree(
    level=0.9, efficiency=0.82 / 0.92, shares=(0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1.0), most_bytes_per_s=105e9
)
"""Between hosts over RDMA whose GPUs have NVLink."""


def tree_of(instance: Instance) -> Tree:
    """Return the protocol that NCCL takes on hosts of a kind."""
    has_nvlink = instance.local_network.name == "nvlink"
    return LL128 if has_nvlink and instance.network.name in ("infiniband", "roce") else SIMPLE


@dataclass(frozen=True, kw_only=True)
class CollectivePhase:
    """A part of a collective that every piece of a bucket passes through."""

    name: str
    demands: tuple[tuple[str, float], ...]
    """(link, bytes that it carries per byte of the bucket)."""
    latency_s: float
    """After the last byte."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """The phases in which a bucket is averaged."""

    phases: tuple[CollectivePhase, ...]
    at_once: int | None
    """Buckets in flight at a time; the next one waits until one of them is done. None: no limit."""


def collective(
    algorithm: str,
    workers: Machines,
    helpers: Machines | None = None,
    *,
    local_group: int | None = None,
    num_hosts: int | None = None,
    bucket_bytes: float = math.inf,
    at_once: int = 1,
    copies: bool = False,
) -> Collective:
    """Return the phases of averaging over all accelerators of ``workers``.

    Args:
        local_group: accelerators of a host that hold the same gradients; default: all. Fewer where a model is
            split over the others, so that their sums travel side by side.
        num_hosts: that hold the same gradients; default: all. Fewer where a replica spans several.
        bucket_bytes: of a message, on which the bandwidth of a tree depends.
        at_once: collectives that the library of a ring or a tree runs at a time; two hops have no such limit.
        copies: a helper sends each sum to one worker, too, and waits for its confirmation. With one worker on
            each host, that worker is sent no weights.

    Raises:
        UsageError: the algorithm is unknown, or helpers are missing or not used by it.
    """
    if algorithm not in COMPARED:
        raise UsageError(
            f"algorithm {algorithm!r} is not known.{did_you_mean(algorithm, ALGORITHMS)} "
            f"Choose one of {', '.join(ALGORITHMS)}"
        )
    if (algorithm == WITH_HELPERS) != (helpers is not None):
        need = "needs helper hosts" if helpers is None else "does not use helper hosts"
        raise UsageError(
            f"algorithm {algorithm!r} {need}; two-hop-helpers is the one that does, with --helpers"
        )
    n, instance = num_hosts or workers.count, workers.instance
    g = local_group or max(instance.num_accelerators, 1)
    side_by_side = max(instance.num_accelerators, 1) / g
    hop_s, local_s = instance.network.latency_s, instance.local_network.latency_s
    if algorithm == "ring":
        phases = _ring(n, g, side_by_side, hop_s, local_s)
        return Collective(phases=tuple(phases), at_once=at_once)
    phases = [_local("reduce-scatter", g, local_s)] if g > 1 else []
    if n > 1 and not algorithm.startswith("two-hop"):
        amount, hops = 2 * (n - 1) / n, float(_hops(algorithm, n))
        if algorithm == "tree":
            amount = (2.0 if n > 2 else amount) / tree_of(instance).share(bucket_bytes)
            hops *= tree_of(instance).level
        links = ((OUT, side_by_side * amount), (IN, side_by_side * amount))
        phases.append(CollectivePhase(name="network", demands=links, latency_s=hops * hop_s))
    elif n > 1:
        phases += _two_hops(n, workers, helpers, side_by_side, copies)
    if g > 1:
        phases.append(_local("all-gather", g, local_s))
    limit = None if algorithm.startswith("two-hop") else at_once
    return Collective(phases=tuple(phases), at_once=limit)


def _hops(algorithm: str, n: int) -> int:
    """Return the hops of a sum over ``n`` hosts, there and back."""
    if algorithm == "tree":
        return 2 * math.ceil(math.log2(n))
    if algorithm == TORUS:
        rows = next(count for count in range(math.isqrt(n), 0, -1) if n % count == 0)
        return 2 * (rows - 1) + 2 * (n // rows - 1)
    return 2 * (n - 1)


def _local(name: str, g: int, latency_s: float) -> CollectivePhase:
    return CollectivePhase(name=name, demands=((LOCAL, (g - 1) / g),), latency_s=(g - 1) * latency_s)


def _ring(n: int, g: int, side_by_side: float, hop_s: float, local_s: float) -> list[CollectivePhase]:
    """Return one ring through all accelerators; every NIC carries what every link carries."""
    world = n * g
    if world == 1:
        return []
    amount = 2 * (world - 1) / world
    demands = [(LOCAL, amount)] if g > 1 else []
    if n > 1:
        demands += [(OUT, amount * side_by_side), (IN, amount * side_by_side)]
    between_hosts = n if n > 1 else 0
    round_s = between_hosts * hop_s + (world - between_hosts) * local_s
    return [CollectivePhase(name="ring", demands=tuple(demands), latency_s=2 * (world - 1) / world * round_s)]


def _two_hops(
    n: int, workers: Machines, helpers: Machines | None, side_by_side: float, copies: bool
) -> list[CollectivePhase]:
    host_nic = workers.instance.effective_nic
    relative = helpers.instance.effective_nic / host_nic if helpers else 0.0
    count = helpers.count if helpers else 0
    host_share, helper_share = _shares(n, count, relative)
    there = [(OUT, side_by_side * (1 - host_share)), (IN, side_by_side * (n - 1) * host_share)]
    back = [(OUT, side_by_side * (n - 1) * host_share), (IN, side_by_side * (1 - host_share))]
    if count:
        there.append((HELPER_IN, side_by_side * n * helper_share))
        back.append((HELPER_OUT, side_by_side * n * helper_share))
    hop_s = workers.instance.network.latency_s
    phases = [CollectivePhase(name="push", demands=_carried(there), latency_s=hop_s)]
    if copies and count:
        sums = [(HELPER_OUT, side_by_side * helper_share), (IN, side_by_side * count * helper_share / n)]
        phases.append(CollectivePhase(name="copy", demands=_carried(sums), latency_s=2 * hop_s))
        if workers.instance.num_accelerators <= 1:  # who has the sum makes the weights of it
            back = [(link, amount - dict(sums).get(link, 0.0)) for link, amount in back]
    return [*phases, CollectivePhase(name="pull", demands=_carried(back), latency_s=hop_s)]


def _carried(demands: list[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    return tuple((link, amount) for link, amount in demands if amount > 0)


@lru_cache(maxsize=256)
def _shares(num_hosts: int, num_helpers: int, relative: float) -> tuple[float, float]:
    """Return the share of the bytes that one host's server and one helper sums (all of a kind are equal)."""
    if math.isnan(relative):  # infinitely fast links on both sides
        relative = 1.0
    shares = server_shares([1.0] * num_hosts, [relative] * num_helpers)
    return float(shares[0]), float(shares[-1]) if num_helpers else 0.0


def capacities(
    workers: Machines,
    helpers: Machines | None = None,
    *,
    algorithm: str = "two-hop",
    connections: int = CONNECTIONS_PER_PEER,
) -> Mapping[str, float]:
    """Return bytes/s of each link; a NIC is limited to the sum of its flows to all peers.

    A host of a ring sends to one other, of a double tree to three, of two hops to every server. Where flows
    are capped, as on EC2, that decides.
    """
    instance = workers.instance
    num_peers = workers.count - 1 + (helpers.count if helpers else 0)
    if not helpers:
        num_peers = min(num_peers, {"ring": 1, "hierarchical-ring": 1, "tree": 3}.get(algorithm, num_peers))
    flows = connections * max(num_peers, 1)
    nic = min(instance.effective_nic, flows * instance.flow_bytes_per_s)
    if algorithm == "tree":
        tree = tree_of(instance)
        nic *= tree.efficiency
        if instance.accelerator and "fp8" not in instance.accelerator.flops:
            nic = min(nic, tree.most_bytes_per_s)
    rates = {LOCAL: instance.effective_local, OUT: nic, IN: nic}
    if helpers:
        flows = connections * workers.count
        rate = min(helpers.instance.effective_nic, flows * helpers.instance.flow_bytes_per_s)
        rates[HELPER_OUT] = rates[HELPER_IN] = rate
    return rates
