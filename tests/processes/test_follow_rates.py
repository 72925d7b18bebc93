"""Tests that the shares of servers follow the rates of their links, on emulated hosts."""

from __future__ import annotations

import hashlib
import os
import shutil

import numpy as np
import pytest
from comm_group import Group, Member

from shoal.comm.server_shares import ServerShares
from shoal.launch.emulated import Cluster

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("tc"), reason="emulated hosts need root and iproute2"
)

HOSTS, HELPERS, COUNT, CALLS = 3, 2, 150_000, 8


def sum_and_follow(member: Member, hosts: list[str]) -> None:
    names = [f"helper{number}" for number in range(HELPERS)]
    shares = ServerShares(member.engine, hosts, names, [1.0] * HELPERS)
    given = np.random.default_rng(member.rank).standard_normal(COUNT, dtype=np.float32)
    digest = hashlib.sha256()
    for _ in range(CALLS):
        for _ in range(2):
            data = given.copy()
            member.end(member.begin("all_reduce", data))
            digest.update(data)
        shares.follow(60.0)
    member.report("bandwidths", shares.bandwidths)
    member.report("sums", digest.hexdigest())


def test_a_slow_helper_serves_less_and_the_sums_stay_the_same() -> None:
    ranks = [np.random.default_rng(rank).standard_normal(COUNT, dtype=np.float32) for rank in range(HOSTS)]
    total = ranks[0] + ranks[1] + ranks[2]  # in the order of the hosts
    want = hashlib.sha256()
    for _ in range(2 * CALLS):
        want.update(total)
    with Cluster(hosts=HOSTS, helpers=HELPERS, nic="100mbit") as cluster:
        cluster.start_helpers()
        cluster.limit(HOSTS + 1, "10mbit")
        hosts = list(range(HOSTS))
        with Group(sum_and_follow, hosts, [str(host) for host in hosts], cluster=cluster) as group:
            found = [group.expect(rank, "bandwidths").value for rank in hosts]
            sums = [group.expect(rank, "sums").value for rank in hosts]
    assert found[0] == found[1] == found[2]
    assert sums == [want.hexdigest()] * HOSTS
    *others, slow = found[0]
    assert slow <= 0.8**4 and min(others) >= 0.8
