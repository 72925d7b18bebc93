"""Assigns chunks to summation servers so that the slowest link finishes soonest.

The model. Each of n hosts holds M bytes to be summed; its link moves B bytes/s in each direction, both at
once. Server j sums the share s_j of the bytes. In each direction a host's link carries, as a worker, the
chunks of all other servers (and their sums), M (1 - s), and as a server its own share from (and to) the n - 1
other hosts, M (n - 1) s; a helper's link carries its share once per host:

    host    T = M (1 + (n - 2) s) / B          helper    T = M n s / H

Equal hosts and helpers of H = βB, κ = kβ ≤ n of them together, finish at the same moment with

    host    s = (n - κ) / (n² + κn - 2κ)       helper    s = 2β (n - 1) / (n² + κn - 2κ)

in T = 2n (n - 1) M / ((n² + κn - 2κ) B), which is 1 + κ/n - 2κ/n² times as fast as a ring. BytePS (Jiang et
al., OSDI 2020) uses this mix for β = 1. Below it is solved for any bandwidths.

Bandwidths may have any unit, the same for all. All results are exact fractions or integers, so that every
rank computes the same ones.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

from shoal.errors import UsageError

KIB = 1 << 10
MIB = 1 << 20

SMALLEST_SHARD_BYTES = 256 * KIB
FEWEST_BUCKETS = 8
DDP_BUCKET_BYTES = 25 * MIB  # DistributedDataParallel's default

# A longer pattern would not repeat within a few buckets.
LONGEST_PATTERN = 1024
# Bandwidths are measured to a few per cent: finer differences would only make the pattern longer.
BANDWIDTH_STEPS = 1000


def server_shares(
    host_bandwidths: Sequence[float], helper_bandwidths: Sequence[float] = ()
) -> list[Fraction]:
    """Return each server's share of the bytes, the hosts' colocated servers first, then the helpers.

    The shares add up to 1 and let the slowest link finish as early as any shares can. Among those that do,
    all servers with work finish at the same time: fast links carry more, and a colocated server gets nothing
    where the helpers finish sooner.

    Raises:
        UsageError: there is no host, or a bandwidth is not a positive number.
    """
    hosts, helpers = _bandwidths(host_bandwidths, helper_bandwidths)
    num_hosts = len(hosts)
    if num_hosts == 1:
        return [Fraction(1)] + [Fraction(0)] * len(helpers)
    level = _finish(hosts, helpers)
    from_helpers = [level * bandwidth / num_hosts for bandwidth in helpers]
    if num_hosts == 2:
        # A host's link carries M at any share, so the rest may be split in proportion to the bandwidths.
        rest = 1 - sum(from_helpers)
        return [rest * bandwidth / sum(hosts) for bandwidth in hosts] + from_helpers
    from_hosts = [max(Fraction(0), level * bandwidth - 1) / (num_hosts - 2) for bandwidth in hosts]
    return from_hosts + from_helpers


def _bandwidths(
    host_bandwidths: Sequence[float], helper_bandwidths: Sequence[float]
) -> tuple[list[Fraction], list[Fraction]]:
    """Return both as fractions of the fastest link of a host."""
    if not host_bandwidths:
        raise UsageError("the number of hosts is 0; at least one host has a worker")
    for kind, values in (("host", host_bandwidths), ("helper", helper_bandwidths)):
        for index, value in enumerate(values):
            if not (math.isfinite(value) and value > 0):
                raise UsageError(f"the bandwidth of {kind} {index} is {value}; it must be a positive number")
    unit, least = Fraction(max(host_bandwidths)), Fraction(1, BANDWIDTH_STEPS)

    def rounded(values: Sequence[float]) -> list[Fraction]:
        return [max(least, (Fraction(v) / unit).limit_denominator(BANDWIDTH_STEPS)) for v in values]

    return rounded(host_bandwidths), rounded(helper_bandwidths)


def _finish(hosts: Sequence[Fraction], helpers: Sequence[Fraction]) -> Fraction:
    """Return the time at which all servers that have work finish (M = 1), for at least two hosts.

    By the time t helper j can have summed t H_j / n and host i (t B_i - 1) / (n - 2), where that is above
    zero; the sum of all must be 1. Hosts enter from the fastest on.
    """
    n = len(hosts)
    speed, needed = sum(helpers, Fraction(0)) / n, Fraction(1)
    if n == 2:  # a host sums any share in the time 1 / B
        return min(1 / max(hosts), needed / speed) if helpers else 1 / max(hosts)
    for bandwidth in sorted(hosts, reverse=True):
        if speed / bandwidth >= needed:  # the others are done before this link has carried its own bytes
            break
        speed += bandwidth / (n - 2)
        needed += Fraction(1, n - 2)
    return needed / speed


def finish_time(
    amounts: Sequence[float | Fraction],
    host_bandwidths: Sequence[float],
    helper_bandwidths: Sequence[float] = (),
) -> Fraction:
    """Return the time at which the slowest link finishes, by the model above.

    Args:
        amounts: what each server sums, hosts first, then helpers, in any unit: bytes, chunks, shares.

    Returns:
        In that unit over the bandwidth of the fastest host.
    """
    hosts, helpers = _bandwidths(host_bandwidths, helper_bandwidths)
    num_hosts = len(hosts)
    exact = [Fraction(amount) for amount in amounts]
    total = sum(exact, Fraction(0))
    times = [(total + (num_hosts - 2) * a) / b for a, b in zip(exact[:num_hosts], hosts, strict=True)]
    times += [num_hosts * a / b for a, b in zip(exact[num_hosts:], helpers, strict=True)]
    return max(times)


def chunk_counts(
    num_chunks: int, host_bandwidths: Sequence[float], helper_bandwidths: Sequence[float] = ()
) -> list[int]:
    """Return the number of equal chunks for each server, hosts first; no other counts finish earlier.

    Each chunk is given to the server that would finish it soonest. That is exact: a server's time depends on
    its own count alone and grows with it. Ties follow the shares.
    """
    shares, num_hosts = server_shares(host_bandwidths, helper_bandwidths), len(host_bandwidths)
    if num_hosts == 1:
        return [num_chunks] + [0] * len(helper_bandwidths)
    hosts, helpers = _bandwidths(host_bandwidths, helper_bandwidths)
    counts = [0] * len(shares)

    def next_chunk(server: int) -> tuple[Fraction, Fraction | float, int]:
        count = counts[server] + 1
        if server < num_hosts:
            time = (num_chunks + (num_hosts - 2) * count) / hosts[server]
        else:
            time = num_hosts * count / helpers[server - num_hosts]
        return time, count / shares[server] if shares[server] else math.inf, server

    queue = [next_chunk(server) for server in range(len(shares))]
    heapq.heapify(queue)
    for _ in range(num_chunks):
        server = queue[0][2]
        counts[server] += 1
        heapq.heapreplace(queue, next_chunk(server))
    return counts


def assign_chunks(num_chunks: int, shares: Sequence[float | Fraction]) -> list[int]:
    """Return the server of each chunk, so that every prefix is balanced.

    After any number of chunks each server has had its share of them, to less than one chunk. Chunk k of a
    server therefore has a first and a last place, and the one with the earliest last place is next: a
    schedule of proportionate progress (Baruah et al. 1996, Algorithmica 15). Giving each chunk to the server
    that is furthest behind would not keep that bound.

    Raises:
        UsageError: a share is below zero, or none is above it.
    """
    exact = [Fraction(share) for share in shares]
    if min(exact, default=Fraction(0)) < 0 or not any(exact):
        raise UsageError(f"the shares {list(map(float, exact))} must be at least 0 and not all 0")
    unit = math.lcm(*(share.denominator for share in exact))
    weights = [int(share * unit) for share in exact]
    total = sum(weights)
    counts = [0] * len(weights)

    def last_place(server: int) -> int:
        return -(-(counts[server] + 1) * total // weights[server])

    # (last place, server) of those that may have the next chunk, (first place, server) of the others.
    due = [(last_place(server), server) for server, weight in enumerate(weights) if weight]
    heapq.heapify(due)
    early: list[tuple[int, int]] = []
    pattern = []
    for index in range(num_chunks):
        while early and early[0][0] <= index:
            server = heapq.heappop(early)[1]
            heapq.heappush(due, (last_place(server), server))
        server = heapq.heappop(due)[1]
        pattern.append(server)
        counts[server] += 1
        heapq.heappush(early, (counts[server] * total // weights[server], server))
    return pattern


def chunk_pattern(
    hosts: Sequence[str], helper_bandwidths: Sequence[float] = (), host_bandwidths: Sequence[float] = ()
) -> list[int]:
    """Return the repeating pattern of a group's chunks: entry k is the server of chunk k.

    Servers 0 ... size - 1 are the colocated servers of the ranks, those from size on the helpers. A host's
    chunks go to its ranks in turn, and the whole repeats without a seam: after any number of chunks each
    server has had its part to less than one chunk.

    Args:
        hosts: the host of each rank of the group, in rank order.
        helper_bandwidths: relative to a host's.
        host_bandwidths: by the hosts' lowest ranks; empty where all are equal.
    """
    names = list(dict.fromkeys(hosts))
    links = list(host_bandwidths) or [1.0] * len(names)
    shares = server_shares(links, helper_bandwidths)
    length = math.lcm(*(share.denominator for share in shares))
    if length <= LONGEST_PATTERN:
        counts = [int(share * length) for share in shares]
    else:
        length = LONGEST_PATTERN
        counts = chunk_counts(length, links, helper_bandwidths)
    ranks = [[rank for rank, host in enumerate(hosts) if host == name] for name in names]
    ranks += [[len(hosts) + helper] for helper in range(len(helper_bandwidths))]
    # Repeat until the turns of every host's ranks close as well.
    rounds = math.lcm(*(len(r) // math.gcd(len(r), c) for r, c in zip(ranks, counts, strict=True)))
    turns = [0] * len(ranks)
    pattern = []
    for server in assign_chunks(length, counts) * rounds:
        pattern.append(ranks[server][turns[server] % len(ranks[server])])
        turns[server] += 1
    return pattern


def two_hop_seconds(
    num_bytes: float,
    host_bandwidths: Sequence[float],
    helper_bandwidths: Sequence[float] = (),
    *,
    latency_s: float = 0.0,
    num_chunks: int | None = None,
) -> float:
    """Return the time of an all-reduce of ``num_bytes`` per host in two hops.

    Args:
        host_bandwidths: bytes/s of each host in each direction.
        helper_bandwidths: the same of each helper.
        latency_s: per hop.
        num_chunks: pieces that a host's bytes travel in. The first sum only returns when the first piece has
            arrived, which adds a piece's time; None assumes infinitely small pieces.
    """
    n = len(host_bandwidths)
    if n == 1:
        return 0.0
    shares = server_shares(host_bandwidths, helper_bandwidths)
    time = finish_time(shares, host_bandwidths, helper_bandwidths)
    seconds = float(time) * num_bytes / max(host_bandwidths)
    return 2 * latency_s + seconds * (1 + 1 / num_chunks if num_chunks else 1)


def ring_seconds(num_bytes: float, host_bandwidths: Sequence[float], *, latency_s: float = 0.0) -> float:
    """Return the time of a ring all-reduce: 2 (n - 1) steps of 1/n of the bytes over the slowest link."""
    n = len(host_bandwidths)
    return 2 * (n - 1) * (latency_s + num_bytes / (n * min(host_bandwidths)))


def gain_over_ring(num_hosts: int, helper_bandwidths: Sequence[float] = ()) -> float:
    """Return the speedup of the two hops over a ring for long messages; 1 for a single host.

    Args:
        helper_bandwidths: relative to a host's.
    """
    links = [1.0] * num_hosts
    return ring_seconds(1, links) / two_hop_seconds(1, links, helper_bandwidths) if num_hosts > 1 else 1.0


def recommended_bucket_bytes(
    num_hosts: int, *, ranks_per_host: int = 1, gradient_bytes: int | None = None
) -> int:
    """Return a size of DDP's buckets at which every rank sums at least 256 KiB of each.

    A rank owns 1 / (hosts × ranks per host) of a bucket. Small pieces cost more in handling than in bytes:
    Fairring fell behind a ring at 100 KiB (25 MiB over 256 GPUs). The result is never below DDP's default.
    With known gradients there are at least eight buckets: the last one is sent when no computation is left to
    hide it.

    Args:
        gradient_bytes: of the whole model, if known.

    Returns:
        Bytes, a multiple of 1 MiB.
    """
    needed = -(-num_hosts * ranks_per_host * SMALLEST_SHARD_BYTES // MIB) * MIB
    if gradient_bytes is not None:
        needed = min(needed, gradient_bytes // FEWEST_BUCKETS // MIB * MIB)
    return max(DDP_BUCKET_BYTES, needed)
