"""Tests hosts with two interfaces: both carry chunks, and one that dies leaves its traffic to the other."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from comm_group import BOUND_S, Group, Member, expected, stream

from shoal.launch.emulated import Cluster

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("tc"), reason="emulated hosts need root and iproute2"
)

HOSTS = 3
COUNT = 400_000


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(hosts=HOSTS, helpers=1, nic="1gbit", interfaces=2) as cluster:
        cluster.start_helpers()
        yield cluster


def sent_bytes() -> dict[str, int]:
    """Return what each interface of this process's host has sent."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]
    fields = {name.strip(): rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    return {name: int(values[8]) for name, values in fields.items() if name.startswith("eth")}


def watched_stream(member: Member, steps: int, count: int, pause_s: float = 0.0) -> None:
    before = sent_bytes()
    stream(member, steps, count, pause_s)
    member.report("sent", {name: now - before[name] for name, now in sent_bytes().items()})


def test_both_interfaces_carry_the_chunks(cluster: Cluster) -> None:
    steps = 6
    with Group(watched_stream, range(HOSTS), steps, COUNT, cluster=cluster, pattern=range(HOSTS)) as group:
        for rank in range(HOSTS):
            counters = group.expect(rank, "done").value
            assert group.values(rank, "sum") == expected(group.hosts, steps, COUNT)
            assert counters["paths_lost"] == 0
            sent = group.values(rank, "sent")[0]
            assert set(sent) == {"eth0", "eth1"}
            assert min(sent.values()) > 0.3 * sum(sent.values())


@pytest.mark.parametrize("interface", [0, 1])
def test_an_interface_that_dies_leaves_its_traffic_to_the_other_one(cluster: Cluster, interface: int) -> None:
    steps, cut = 120, 1
    try:
        with Group(
            stream,
            [0, 0, 1, 2],
            steps,
            COUNT,
            0.03,
            cluster=cluster,
            pattern=range(1, 5) if interface else range(4),
        ) as group:
            group.expect(0, "sum", count=5)
            cluster.link(cut, up=False, interface=interface)
            for rank in range(group.size):
                counters = group.expect(rank, "done").value
                assert group.values(rank, "sum") == expected(group.hosts, steps, COUNT)
                assert counters["paths_lost"] > 0
    finally:
        cluster.link(cut, up=True, interface=interface)


def test_a_host_whose_interfaces_all_die_is_lost_and_named(cluster: Cluster) -> None:
    cut = 2
    try:
        with Group(stream, range(HOSTS), 100_000, COUNT, cluster=cluster, pattern=range(HOSTS)) as group:
            group.expect(0, "sum", count=5)
            since = time.monotonic()
            for interface in range(2):
                cluster.link(cut, up=False, interface=interface)
            for error in group.errors([0, 1], since, BOUND_S):
                assert f"{group.name(cut)} was lost: its host has not answered for" in error
    finally:
        for interface in range(2):
            cluster.link(cut, up=True, interface=interface)
