"""The mix of servers against brute force, and the patterns against their promise."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.decide import server_assignment
from shoal.errors import UsageError

BANDWIDTHS = st.sampled_from([0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0])
SHARES = st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[float], list[float]]:
    """Bandwidths of hosts and helpers."""
    hosts = draw(st.lists(BANDWIDTHS, min_size=2, max_size=4))
    if draw(st.booleans()):
        hosts = [1.0] * len(hosts)
    return hosts, draw(st.lists(BANDWIDTHS, max_size=3))


def transfer_seconds(counts: tuple[int, ...], hosts: list[float], helpers: list[float]) -> Fraction:
    """Count what each link carries, message by message; independent of the module's formulas."""
    n = len(hosts)
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    for server, count in enumerate(counts):
        for worker in range(n):
            if worker != server:
                sent[worker] += count  # the push
                received[server] += count
                sent[server] += count  # the sum
                received[worker] += count
    bandwidths = [Fraction(b) for b in hosts + helpers]
    return max(max(sent[i], received[i]) / b for i, b in enumerate(bandwidths))


def brute_force(num_chunks: int, hosts: list[float], helpers: list[float]) -> Fraction:
    """Return the least time over every way to give the chunks to servers."""
    num_servers, least = len(hosts) + len(helpers), None
    # Bars between the chunks say where one server's end and the next one's begin.
    places = num_chunks + num_servers - 1
    for bars in itertools.combinations(range(places), num_servers - 1):
        ends = (-1, *bars, places)
        counts = tuple(after - before - 1 for before, after in itertools.pairwise(ends))
        time = transfer_seconds(counts, hosts, helpers)
        least = time if least is None else min(least, time)
    assert least is not None
    return least


# ---- shares ---------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=80)
@given(clusters(), st.integers(1, 6))
def test_counts_finish_as_early_as_the_best_of_all_assignments(
    cluster: tuple[list[float], list[float]], num_chunks: int
) -> None:
    hosts, helpers = cluster
    counts = server_assignment.chunk_counts(num_chunks, hosts, helpers)
    assert sum(counts) == num_chunks
    best = brute_force(num_chunks, hosts, helpers)
    assert transfer_seconds(tuple(counts), hosts, helpers) == best
    assert server_assignment.finish_time(counts, hosts, helpers) == best * Fraction(max(hosts))


@settings(deadline=None, max_examples=80)
@given(clusters(), st.integers(1, 6))
def test_no_assignment_beats_the_shares(cluster: tuple[list[float], list[float]], num_chunks: int) -> None:
    hosts, helpers = cluster
    shares = server_assignment.server_shares(hosts, helpers)
    assert sum(shares) == 1
    assert min(shares) >= 0
    time = server_assignment.finish_time(shares, hosts, helpers) / Fraction(max(hosts))
    assert time * num_chunks <= brute_force(num_chunks, hosts, helpers)


@settings(deadline=None, max_examples=40)
@given(clusters())
def test_the_shares_are_reached_when_they_divide(cluster: tuple[list[float], list[float]]) -> None:
    hosts, helpers = cluster
    shares = server_assignment.server_shares(hosts, helpers)
    num_chunks = math.lcm(*(share.denominator for share in shares))
    counts = tuple(int(share * num_chunks) for share in shares)
    time = server_assignment.finish_time(shares, hosts, helpers)
    assert transfer_seconds(counts, hosts, helpers) * Fraction(max(hosts)) == time * num_chunks


@given(st.integers(3, 64), st.integers(0, 64), st.sampled_from([0.5, 1.0, 2.0]))
def test_equal_links_follow_the_closed_formula(n: int, k: int, beta: float) -> None:
    kappa = Fraction(k) * Fraction(beta)
    shares = server_assignment.server_shares([1.0] * n, [beta] * k)
    if kappa <= n:
        whole = n * n + kappa * n - 2 * kappa
        assert shares[:n] == [(n - kappa) / whole] * n
        assert shares[n:] == [2 * Fraction(beta) * (n - 1) / whole] * k
        assert server_assignment.gain_over_ring(n, [beta] * k) == pytest.approx(
            1 + kappa / n - 2 * kappa / n**2
        )
    else:  # the workers' own bytes are the limit, M / B
        assert shares == [Fraction(0)] * n + [Fraction(1, k)] * k
        assert server_assignment.gain_over_ring(n, [beta] * k) == pytest.approx(2 * (n - 1) / n)


def test_known_mixes() -> None:
    assert server_assignment.server_shares([1.0] * 4) == [Fraction(1, 4)] * 4
    assert server_assignment.server_shares([1.0] * 8, [1.0] * 8) == [Fraction(0)] * 8 + [Fraction(1, 8)] * 8
    assert (
        server_assignment.server_shares([1.0] * 8, [1.0] * 4) == [Fraction(1, 22)] * 8 + [Fraction(7, 44)] * 4
    )
    assert server_assignment.gain_over_ring(8, [1.0] * 4) == 1.375
    # A helper of twice the bandwidth carries twice as much.
    *_, slow, fast = server_assignment.server_shares([1.0] * 8, [1.0, 2.0])
    assert fast == 2 * slow


def test_a_single_host_needs_no_link() -> None:
    assert server_assignment.server_shares([1.0] * 1, [1.0, 5.0]) == [1, 0, 0]
    assert server_assignment.chunk_counts(7, [1.0], [1.0]) == [7, 0]
    assert server_assignment.two_hop_seconds(1e9, [1e9], [1e9], latency_s=1.0) == 0
    assert server_assignment.ring_seconds(1e9, [1e9], latency_s=1.0) == 0
    assert server_assignment.gain_over_ring(1, [1.0]) == 1


def test_a_slow_host_sums_nothing_and_sets_the_time() -> None:
    assert server_assignment.server_shares([1, 1, 1, 0.25])[3] == 0
    assert server_assignment.two_hop_seconds(1e6, [1e6, 1e6, 1e6, 0.25e6]) == pytest.approx(4)
    assert server_assignment.ring_seconds(1e6, [1e6, 1e6, 1e6, 0.25e6]) == pytest.approx(6)


@settings(deadline=None)
@given(clusters(), st.floats(1e-3, 1e12))
def test_the_unit_of_bandwidth_does_not_matter(cluster: tuple[list[float], list[float]], unit: float) -> None:
    hosts, helpers = cluster
    scaled = server_assignment.server_shares([b * unit for b in hosts], [b * unit for b in helpers])
    assert scaled == server_assignment.server_shares(hosts, helpers)


# ---- seconds --------------------------------------------------------------------------------------------


def test_seconds_of_the_emulated_cluster() -> None:
    """Eight hosts of 200 Mbit/s, 16 MiB: the design's wire limit of 0.67 to 0.7 s with eight helpers."""
    size, link = 16 << 20, 200e6 / 8
    assert server_assignment.two_hop_seconds(size, [link] * 8, [link] * 8) == pytest.approx(size / link)
    assert server_assignment.two_hop_seconds(size, [link] * 8) == pytest.approx(
        server_assignment.ring_seconds(size, [link] * 8)
    )
    assert server_assignment.two_hop_seconds(size, [link] * 8, num_chunks=16) == pytest.approx(
        1.75 * 17 / 16 * size / link
    )


def test_latency_counts_twice_or_once_a_step_of_the_ring() -> None:
    assert server_assignment.two_hop_seconds(0, [1.0] * 8, latency_s=0.1) == pytest.approx(0.2)
    assert server_assignment.ring_seconds(0, [1.0] * 8, latency_s=0.1) == pytest.approx(1.4)


def test_sizes() -> None:
    assert server_assignment.recommended_bucket_bytes(8) == 25 << 20
    assert server_assignment.recommended_bucket_bytes(32, ranks_per_host=8) == 64 << 20
    assert server_assignment.recommended_bucket_bytes(1000) == 250 << 20
    # BERT-large over 256 × 8 ranks: an eighth of its gradients, not 512 MiB, which would make two buckets.
    assert (
        server_assignment.recommended_bucket_bytes(256, ranks_per_host=8, gradient_bytes=1344 << 20)
        == 168 << 20
    )
    assert (
        server_assignment.recommended_bucket_bytes(256, ranks_per_host=8, gradient_bytes=100 << 20)
        == 25 << 20
    )


# ---- patterns -------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=300)
@given(SHARES, st.integers(0, 300))
# Here each chunk to the server that is furthest behind would leave one 1.2 chunks behind.
@example([2] * 7 + [38, 38], 90)
def test_every_prefix_is_within_one_of_its_share(weights: list[int], num_chunks: int) -> None:
    counts = [0] * len(weights)
    pattern = server_assignment.assign_chunks(num_chunks, [Fraction(w, sum(weights)) for w in weights])
    assert len(pattern) == num_chunks
    for place, server in enumerate(pattern, start=1):
        counts[server] += 1
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - Fraction(weight * place, sum(weights))) < 1


def test_shares_may_be_floats_that_do_not_quite_add_up() -> None:
    pattern = server_assignment.assign_chunks(3000, [0.1, 0.2, 0.7, 0.0])
    assert Counter(pattern) == {0: 300, 1: 600, 2: 2100}


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.lists(st.sampled_from([0.3, 1.0, 2.0, 1.27]), max_size=3),
    st.randoms(use_true_random=False),
)
def test_the_pattern_goes_round_without_a_seam(
    ranks_per_host: list[int], helpers: list[float], shuffle: random.Random
) -> None:
    hosts = [f"host{i}" for i, ranks in enumerate(ranks_per_host) for _ in range(ranks)]
    shuffle.shuffle(hosts)
    pattern = server_assignment.chunk_pattern(hosts, helpers)
    parts = Counter(pattern)
    assert set(parts) <= set(range(len(hosts) + len(helpers)))
    by_host = Counter(hosts)
    shares = server_assignment.server_shares([1.0] * len(by_host), helpers)
    for host, share in zip(dict.fromkeys(hosts), shares, strict=False):
        ranks = [rank for rank, name in enumerate(hosts) if name == host]
        assert len({parts[rank] for rank in ranks}) == 1  # evenly over the local ranks
        total = sum(parts[rank] for rank in ranks)
        assert abs(total - share * len(pattern)) <= Fraction(len(pattern), 1024) * len(shares)
    seen: Counter[int] = Counter()
    for place, server in enumerate(pattern * 2, start=1):
        seen[server] += 1
        for other, part in parts.items():
            assert abs(seen[other] * len(pattern) - part * place) < len(pattern)


def test_patterns_of_the_usual_clusters() -> None:
    assert server_assignment.chunk_pattern(["a", "b", "c", "d"]) == [0, 1, 2, 3]
    assert server_assignment.chunk_pattern(["a", "a", "a", "a"], [1.0]) == [0, 1, 2, 3]
    assert server_assignment.chunk_pattern(["a", "a", "b", "b"]) == [
        0,
        2,
        1,
        3,
    ]  # hosts take turns, not ranks
    assert server_assignment.chunk_pattern(["a", "b", "c"], [1.0] * 3) == [3, 4, 5]


def test_an_unhandy_bandwidth_costs_next_to_nothing() -> None:
    helpers = [1.013, 0.987, 1.131, 2.017]
    pattern = server_assignment.chunk_pattern([f"host{i}" for i in range(8)], helpers)
    assert len(pattern) == server_assignment.LONGEST_PATTERN
    parts = Counter(pattern)
    counts = [parts[server] for server in range(12)]
    best = server_assignment.finish_time(
        server_assignment.server_shares([1.0] * 8, helpers), [1.0] * 8, helpers
    )
    assert server_assignment.finish_time(counts, [1.0] * 8, helpers) / len(pattern) < best * Fraction(
        1005, 1000
    )


# ---- errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, float("nan"), float("inf")])
def test_bandwidths_must_be_positive_numbers(bandwidth: float) -> None:
    with pytest.raises(UsageError, match=rf"helper 1 is {bandwidth}; it must be a positive number"):
        server_assignment.server_shares([1.0] * 4, [1.0, bandwidth])


def test_other_wrong_arguments() -> None:
    with pytest.raises(UsageError, match="number of hosts is 0"):
        server_assignment.server_shares([])
    for shares in ([], [0.0], [1.0, -0.5]):
        with pytest.raises(UsageError, match="at least 0 and not all 0"):
            server_assignment.assign_chunks(4, shares)
