"""Tests emulated hosts whose links go down during a stream of sums, and come up again."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
from comm_group import BOUND_S, DEFAULTS, Group, expected, stream

from shoal.launch.emulated import Cluster
from shoal.launch.emulated_network import INTERFACE, hardware_address

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("tc"), reason="emulated hosts need root and iproute2"
)

COUNT = 200_000
HOSTS, HELPERS = 3, 2
GRACE_S = 2.0
PLACES = [0, 1, 1, 2]  # a worker alone on its host, two that share one, another one alone


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(hosts=HOSTS, helpers=HELPERS, nic="1gbit") as cluster:
        cluster.start_helpers()
        yield cluster


def assert_sums(group: Group, steps: int, ranks: Sequence[int]) -> None:
    want = expected(group.hosts, steps, COUNT)
    for rank in ranks:
        sums = group.values(rank, "sum")
        assert sums and sums == want[: len(sums)]


@contextmanager
def mended(cluster: Cluster, host: int) -> Iterator[None]:
    """Put a host's cable back in at the end, whatever has become of the test."""
    try:
        yield
    finally:
        cluster.link(host, up=True)


def longest_gap_s(group: Group, rank: int) -> float:
    times = [each.at for each in group.reports[rank] if each.what == "sum"]
    return max(later - earlier for earlier, later in pairwise(times))


def test_a_helper_host_that_is_cut_off_is_lost_and_the_steps_complete(cluster: Cluster) -> None:
    steps = 60
    with mended(cluster, HOSTS + 1), Group(stream, PLACES, steps, COUNT, cluster=cluster) as group:
        group.expect(1, "sum", count=10)
        cluster.link(HOSTS + 1, up=False)
        for rank in range(group.size):
            group.expect(rank, "done")
            assert group.values(rank, "sum") == expected(PLACES, steps, COUNT)
            assert "helper h1 was lost" in "\n".join(group.values(rank, "events")[0])
            assert GRACE_S / 2 < longest_gap_s(group, rank) < BOUND_S


def test_a_worker_host_that_is_cut_off_ends_the_job_and_is_named(cluster: Cluster) -> None:
    cut = 2
    with mended(cluster, cut), Group(stream, PLACES, 100_000, COUNT, cluster=cluster) as group:
        group.expect(0, "sum", count=5)
        since = time.monotonic()
        cluster.link(cut, up=False)
        for text in group.errors([0, 1, 2], since):
            assert f"{group.name(3)} was lost: its host has not answered" in text
            assert "operation #" in text and f"all_reduce of float32[{COUNT}] (sum)" in text
        (text,) = group.errors([3], since)  # and the lone one knows that it is cut off
        assert "was lost" in text and any(group.name(rank) in text for rank in (0, 1, 2))
        assert_sums(group, max(len(group.values(rank, "sum")) for rank in range(4)), range(4))


@pytest.mark.parametrize("host", [0, HOSTS], ids=["worker", "helper"])
def test_a_cut_that_is_mended_within_the_grace_heals(cluster: Cluster, host: int) -> None:
    steps = 60
    # The kernel may take a second to see that a cable is back: with it the cut stays below this grace.
    patient = replace(DEFAULTS, peer_grace_s=2 * GRACE_S)
    with (
        mended(cluster, host),
        Group(stream, PLACES, steps, COUNT, cluster=cluster, options=patient) as group,
    ):
        for moment in (10, 25):
            group.expect(0, "sum", count=moment)
            cluster.link(host, up=False)
            time.sleep(GRACE_S / 2)
            cluster.link(host, up=True)
        for rank in range(group.size):
            group.expect(rank, "done")
            assert group.values(rank, "sum") == expected(PLACES, steps, COUNT)
            assert "was lost" not in "\n".join(group.values(rank, "events")[0])
        assert longest_gap_s(group, 0) > GRACE_S / 4  # the cut was felt


def test_a_cut_that_is_mended_after_the_grace_was_a_death(cluster: Cluster) -> None:
    cut = 0
    with mended(cluster, cut), Group(stream, PLACES, 100_000, COUNT, cluster=cluster) as group:
        group.expect(1, "sum", count=5)
        since = time.monotonic()
        cluster.link(cut, up=False)
        time.sleep(2.5 * GRACE_S)
        cluster.link(cut, up=True)
        for text in group.errors([1, 2, 3], since):
            assert f"{group.name(0)} was lost" in text
        group.errors([0], since, bound_s=BOUND_S)


NOBODY = hardware_address("10.255.255.254")


@contextmanager
def deaf(cluster: Cluster, receiver: int, sender: int) -> Iterator[None]:
    """Lose what one host sends to another one; what that one sends still arrives."""

    def point_to(hardware: str) -> None:
        neighbor = [cluster.address(receiver), "lladdr", hardware, "nud", "permanent", "dev", INTERFACE]
        subprocess.run([*cluster.enter(sender), "ip", "neighbor", "replace", *neighbor], check=True)

    point_to(NOBODY)
    try:
        yield
    finally:
        point_to(hardware_address(cluster.address(receiver)))


@pytest.mark.parametrize("deaf_one", ["helper", "worker"])
def test_a_helper_and_a_worker_that_reach_each_other_one_way_part(cluster: Cluster, deaf_one: str) -> None:
    steps, pair = 60, (HOSTS + 1, 2)
    receiver, sender = pair if deaf_one == "helper" else reversed(pair)
    with Group(stream, PLACES, steps, COUNT, cluster=cluster) as group:
        group.expect(1, "sum", count=10)
        with deaf(cluster, receiver, sender):
            for rank in range(group.size):
                group.expect(rank, "done")
                assert group.values(rank, "sum") == expected(PLACES, steps, COUNT)
                assert "helper h1 was lost" in "\n".join(group.values(rank, "events")[0])


def test_two_workers_that_reach_each_other_one_way_end_the_job_and_are_named(cluster: Cluster) -> None:
    with Group(stream, PLACES, 100_000, COUNT, cluster=cluster) as group:
        group.expect(0, "sum", count=5)
        since = time.monotonic()
        with deaf(cluster, 0, 2):
            for text in group.errors(range(4), since):
                assert "was lost" in text
                assert group.name(0) in text or group.name(3) in text
        assert_sums(group, max(len(group.values(rank, "sum")) for rank in range(4)), range(4))


@pytest.mark.skipif(not shutil.which("iptables"), reason="packets are dropped by iptables")
def test_links_that_lose_one_packet_of_a_hundred_change_no_bit(cluster: Cluster) -> None:
    steps = 40
    loses = ["INPUT", "-m", "statistic", "--mode", "random", "--probability", "0.01", "-j", "DROP"]

    def on_all(action: str) -> None:
        for host in range(HOSTS + HELPERS):
            subprocess.run([*cluster.enter(host), "iptables", action, *loses], check=True)

    on_all("-A")
    try:
        with Group(stream, PLACES, steps, COUNT, cluster=cluster) as group:
            for rank in range(group.size):
                group.expect(rank, "done")
                assert group.values(rank, "sum") == expected(PLACES, steps, COUNT)
                assert "was lost" not in "\n".join(group.values(rank, "events")[0])
    finally:
        on_all("-D")
