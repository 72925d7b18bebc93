"""The simulated exchange against the formulas that its algorithms have in the limit."""

from __future__ import annotations

import math

import pytest

from plan_made import hosts
from shoal.decide.server_assignment import ring_seconds, two_hop_seconds
from shoal.errors import UsageError
from shoal.planner.hardware import Catalog, Machines
from shoal.planner.network import ALGORITHMS, HELPER_OUT, IN, OUT, capacities, collective
from shoal.planner.simulate import exchange

M = 1e9
MANY = 400


def seconds(algorithm: str, n: int, *, helpers: int = 0, per_host: int = 1, **made: float) -> float:
    workers = hosts(n, per_host=per_host, **made)
    side = hosts(helpers, per_host=0, accelerator=None, **made) if helpers else None
    how = collective(algorithm, workers, side)
    return exchange([(0.0, M)], how, capacities(workers, side), most_pieces=MANY).end_s


@pytest.mark.parametrize("n", [2, 3, 8, 64, 2048])
def test_ring_takes_its_formula(n: int) -> None:
    assert seconds("ring", n) == pytest.approx(2 * (n - 1) * M / (n * 1e10))
    assert seconds("ring", n) == pytest.approx(ring_seconds(M, [1e10] * n))


@pytest.mark.parametrize(("n", "hops"), [(2, 2), (12, 2 * 2 + 2 * 3), (64, 28), (7, 12)])
def test_a_torus_is_a_ring_with_the_hops_of_its_rows_and_columns(n: int, hops: int) -> None:
    latency_s = 1e-3
    assert seconds("torus", n, latency_s=latency_s) == pytest.approx(
        2 * (n - 1) * M / (n * 1e10) + hops * latency_s
    )


@pytest.mark.parametrize("n", [2, 4, 32])
def test_two_hops_with_equal_helpers_take_one_gradient(n: int) -> None:
    assert seconds("two-hop-helpers", n, helpers=n) == pytest.approx(M / 1e10, rel=2 / MANY)


@pytest.mark.parametrize(("n", "helpers"), [(2, 1), (4, 0), (8, 4), (8, 8), (16, 3), (5, 20)])
def test_two_hops_agree_with_the_decider(n: int, helpers: int) -> None:
    algorithm = "two-hop-helpers" if helpers else "two-hop"
    expected = two_hop_seconds(M, [1e10] * n, [1e10] * helpers)
    assert seconds(algorithm, n, helpers=helpers) == pytest.approx(expected, rel=2 / MANY)


@pytest.mark.parametrize(("per_host", "more"), [(1, 0.0), (4, 1 / 8)])
def test_copies_of_weights_add_no_bytes_where_a_worker_is_alone_on_its_host(
    per_host: int, more: float
) -> None:
    """It makes the weights of a sum itself; with more workers, another one may have the copy."""
    workers, side = hosts(8, per_host=per_host), hosts(8, per_host=0, accelerator=None)
    plain, copied = (
        sum(
            amount
            for phase in collective("two-hop-helpers", workers, side, copies=copies).phases
            for link, amount in phase.demands
            if link == HELPER_OUT
        )
        for copies in (False, True)
    )
    assert copied == pytest.approx(plain * (1 + more))


def test_two_hop_pieces_cost_what_the_decider_says() -> None:
    workers = hosts(8, per_host=1)
    side = hosts(8, per_host=0, accelerator=None)
    how = collective("two-hop-helpers", workers, side)
    found = exchange([(0.0, M)], how, capacities(workers, side), most_pieces=4).end_s
    assert found == pytest.approx(two_hop_seconds(M, [1e10] * 8, [1e10] * 8, num_chunks=4))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_infinite_bandwidth_takes_no_time(algorithm: str) -> None:
    helpers = 4 if algorithm == "two-hop-helpers" else 0
    assert seconds(algorithm, 8, helpers=helpers, per_host=8, nic=math.inf, local=math.inf) == 0.0


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical-ring", "tree", "two-hop"])
def test_one_host_uses_no_network(algorithm: str) -> None:
    how = collective(algorithm, hosts(1, per_host=8))
    assert not {OUT, IN} & {link for phase in how.phases for link, _ in phase.demands}
    assert seconds(algorithm, 1, per_host=1) == 0.0


def test_latency_grows_with_hops() -> None:
    free = {"nic": math.inf, "local": math.inf, "latency_s": 1e-3}
    assert seconds("ring", 16, **free) == pytest.approx(2 * 15 * 1e-3)
    assert seconds("tree", 16, **free) == pytest.approx(2 * 4 * 5.2e-3), (
        "a chunk of 256 KiB goes through hosts"
    )
    assert seconds("two-hop", 16, **free) == pytest.approx(2e-3)


@pytest.mark.parametrize(
    ("host", "bytes_per_s", "level_s"),
    [
        ("DGX-1", 50e9 * 0.82, 8.64e-6),
        ("DGX-A100", 105e9, 8.64e-6),
        ("DGX-H100", 400e9 * 0.82, 8.64e-6),
        ("p3dn.24xlarge", 12.5e9 * 0.45 * 0.9, 130e-6),
    ],
)
def test_trees_have_the_bandwidth_and_latency_of_nccl(host: str, bytes_per_s: float, level_s: float) -> None:
    """LL128 over RDMA: 0.9 · 0.915 of the network, at most 105 GB/s up to A100, a level of 0.9 hops."""
    workers = Machines(count=16, instance=Catalog().instances[host])
    assert capacities(workers, algorithm="tree")[OUT] == pytest.approx(bytes_per_s, rel=0.01)
    (network,) = (each for each in collective("tree", workers).phases if each.name == "network")
    assert network.latency_s == pytest.approx(2 * 4 * level_s)


def test_small_messages_lose_a_part_of_a_trees_bandwidth_and_none_of_a_rings() -> None:
    def carried(algorithm: str, mib: float) -> float:
        phases = collective(algorithm, hosts(16), bucket_bytes=mib * 2**20).phases
        return max(amount for phase in phases for link, amount in phase.demands if link == OUT)

    assert [2 / carried("tree", mib) for mib in (0.5, 2, 4, 8, 25, 128, 4096)] == pytest.approx(
        [0.6, 0.6, 0.7, 0.8, 0.7, 0.9, 0.9]
    )
    assert carried("ring", 0.5) == carried("ring", 4096)


def test_rings_of_replicas_that_span_hosts_have_fewer_hosts() -> None:
    workers = hosts(16, per_host=8, latency_s=1e-3)
    (whole,), (part,) = (collective("ring", workers, local_group=1, num_hosts=n).phases for n in (16, 4))
    assert whole.latency_s == pytest.approx(2 * 15 * 1e-3) and part.latency_s == pytest.approx(2 * 3 * 1e-3)


def test_local_and_network_phases_overlap() -> None:
    # 8 devices a host: 7/8 M locally, twice, at a tenth of the NIC's rate; the NIC's part hides behind them.
    local, nic = 2 * 7 / 8 * M / 1e9, 2 * 3 / 4 * M / 1e10
    found = seconds("hierarchical-ring", 4, per_host=8, local=1e9, nic=1e10)
    assert local <= found <= local + nic / MANY * 3


def test_a_nic_carries_no_more_than_its_flows() -> None:
    workers = hosts(3, nic=1e10, flow=1e9)
    assert capacities(workers)[OUT] == pytest.approx(4 * 2 * 1e9)
    assert capacities(hosts(30, nic=1e10, flow=1e9))[OUT] == pytest.approx(1e10)
    # A ring has one neighbour, however many hosts there are.
    many = hosts(30, nic=1e10, flow=1e9)
    assert capacities(many, algorithm="ring")[OUT] == pytest.approx(4e9)
    assert capacities(many, algorithm="ring", connections=1)[OUT] == pytest.approx(1e9)


def test_collectives_of_a_ring_wait_for_each_other_and_two_hops_do_not() -> None:
    workers = hosts(8, per_host=1, nic=math.inf, latency_s=1e-3)
    ready = [(0.0, 1e6)] * 10
    ring = exchange(ready, collective("ring", workers), capacities(workers)).end_s
    hops = exchange(ready, collective("two-hop", workers), capacities(workers)).end_s
    assert ring == pytest.approx(10 * 14e-3)
    assert hops == pytest.approx(2e-3)


def test_buckets_share_a_link_and_keep_it_busy() -> None:
    workers = hosts(4, per_host=1)
    how = collective("two-hop", workers)
    ready = [(0.001 * index, 1e7) for index in range(20)]
    found = exchange(ready, how, capacities(workers))
    least = 20 * 1e7 * 1.5 / 1e10
    assert found.busy_s[OUT] == pytest.approx(least)
    assert least <= found.end_s <= 0.001 + least * (1 + 1 / 8)


def test_unknown_algorithm_says_which_was_meant() -> None:
    with pytest.raises(UsageError, match=r"'rings' is not known. Did you mean 'ring'\?"):
        collective("rings", hosts(2))
    with pytest.raises(UsageError, match="'ring' does not use helper hosts"):
        collective("ring", hosts(2), hosts(1, per_host=0, accelerator=None))
    with pytest.raises(UsageError, match="'two-hop-helpers' needs helper hosts"):
        collective("two-hop-helpers", hosts(2))


@pytest.mark.parametrize(("at_once", "hidden"), [(1, 0), (2, 2)])
def test_collectives_at_once_hide_each_others_latency(at_once: int, hidden: int) -> None:
    workers = hosts(2, per_host=1, nic=1e9, latency_s=0.01)
    how = collective("hierarchical-ring", workers, at_once=at_once)
    ready = [(0.0, 1e8)] * 4
    # Each takes 0.1 s on the wire and two hops of 10 ms; two at once share the wire and wait together.
    expected = 4 * 0.1 + (4 - hidden) * 0.02
    assert exchange(ready, how, capacities(workers)).end_s == pytest.approx(expected, rel=0.01)
