"""Emulated clusters on paper: rates, addresses, variables, and what a user can get wrong."""

from __future__ import annotations

import os
import shutil
import sys

import pytest

from shoal.env.launcher import worker_env
from shoal.errors import UsageError
from shoal.launch.emulated import Cluster
from shoal.launch.emulated_job import Hosts
from shoal.launch.emulated_network import (
    bridge_links,
    describe,
    format_rate,
    helpers_setting,
    host_links,
    parse_rate,
    plan_cluster,
    shaping,
)
from shoal.launch.supervision import worker_variables


@pytest.mark.parametrize(
    ("text", "rate"),
    [("200mbit", 200e6), ("1gbit", 1e9), ("1.5 Gbit", 1.5e9), ("800kbit", 800e3), ("9600bit", 9600)],
)
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text, option="--nic") == rate
    assert parse_rate(format_rate(int(rate)), option="--nic") == rate


@pytest.mark.parametrize(
    "text", ["", "fast", "200", "0mbit", "-1mbit", "200mbps", "1e3mbit", "200mbit/s", "0.1bit"]
)
def test_a_rate_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match=r"--helper-nic .* such as 200mbit"):
        parse_rate(text, option="--helper-nic")


def test_a_rate_in_bytes_is_named_as_such() -> None:
    with pytest.raises(UsageError, match="megabytes"):
        parse_rate("200mbps", option="--nic")


def test_hosts_have_addresses_and_names_of_their_own() -> None:
    plan = plan_cluster(hosts=250, helpers=250, nic="1gbit", prefix="p")
    for values in (
        {host.address for host in plan},
        {host.name for host in plan},
        {host.port for host in plan},
    ):
        assert len(values) == 500
    assert max(len(host.port) for host in plan) <= 15  # the kernel's limit
    assert [host.is_helper for host in plan] == [False] * 250 + [True] * 250
    assert (plan[0].address, plan[250].address) == ("10.77.0.1", "10.77.1.1")


def test_helpers_are_announced_with_their_ratio() -> None:
    plan = plan_cluster(hosts=2, helpers=2, nic="200mbit", helper_nic="300mbit", prefix="p")
    assert helpers_setting(plan, announce_rates=True) == "10.77.1.1:7070*1.5,10.77.1.2:7070*1.5"
    assert helpers_setting(plan, announce_rates=False) == "10.77.1.1:7070,10.77.1.2:7070"
    plain = plan_cluster(hosts=2, helpers=1, nic="200mbit", prefix="p")
    assert helpers_setting(plain, announce_rates=True) == "10.77.1.1:7070"


def test_workers_find_their_ranks() -> None:
    for rank in range(6):
        variables = worker_variables(rank, num_hosts=2, workers_per_host=3, master=("10.77.0.1", 29_501))
        worker = worker_env(variables)
        assert worker is not None
        assert (worker.ranks.rank, worker.ranks.num_workers) == (rank, 6)
        assert (worker.ranks.local_rank, worker.ranks.num_local_workers) == (rank % 3, 3)
        assert (worker.master_addr, worker.master_port) == ("10.77.0.1", 29_501)
        assert variables["GROUP_RANK"] == variables["NODE_RANK"] == str(rank // 3)


def test_commands_for_the_kernel() -> None:
    plan = plan_cluster(hosts=1, nic="200mbit", prefix="p")
    lines = bridge_links([plan[0]], ["/proc/7/fd/5"]).splitlines()
    assert "link add host0 type veth peer name eth0 address 02:00:0a:4d:00:01 netns /proc/7/fd/5" in lines
    assert shaping("host0", plan[0]) == (
        "qdisc add dev host0 root tbf rate 200000000bit burst 262144 latency 50ms\n"
    )
    assert shaping("host0", plan_cluster(hosts=1, prefix="p")[0]) == ""


def test_each_interface_has_a_network_of_its_own() -> None:
    plan = plan_cluster(hosts=2, helpers=1, interfaces=2, prefix="p")
    assert plan[1].links() == [
        ("br0", "host1", "eth0", "10.77.0.2"),
        ("br1", "host1-1", "eth1", "10.78.0.2"),
    ]
    assert plan[2].links() == [("br0", "helper0", "eth0", "10.77.1.1")]
    lines = bridge_links(plan, ["/a", "/b", "/c"]).splitlines()
    assert lines[:4:2] == [f"link add br{number} type bridge mcast_snooping 0" for number in range(2)]
    assert lines.count("link set host1-1 master br1") == 1
    assert [line for line in host_links(plan[1], plan).splitlines() if line.startswith("neighbor")] == [
        "neighbor add 10.77.0.1 lladdr 02:00:0a:4d:00:01 nud permanent dev eth0",
        "neighbor add 10.77.1.1 lladdr 02:00:0a:4d:01:01 nud permanent dev eth0",
        "neighbor add 10.78.0.1 lladdr 02:00:0a:4e:00:01 nud permanent dev eth1",
    ]
    with pytest.raises(UsageError, match="interfaces 9 must be from 1 to 8"):
        plan_cluster(hosts=1, interfaces=9, prefix="p")


def test_description() -> None:
    plan = plan_cluster(hosts=2, helpers=1, nic="200mbit", helper_nic="1gbit", prefix="p")
    assert [line.split() for line in describe(plan, workers_per_host=2).splitlines()] == [
        ["host0", "10.77.0.1", "200mbit", "rank", "0-1"],
        ["host1", "10.77.0.2", "200mbit", "rank", "2-3"],
        ["helper0", "10.77.1.1", "1gbit", "server,", "port", "7070"],
    ]


@pytest.mark.parametrize(
    ("hosts", "workers_per_host", "message"),
    [
        (Hosts(hosts=0), 1, "--hosts 0 must be from 1 to 250"),
        (Hosts(hosts=251), 1, "--hosts 251"),
        (Hosts(hosts=1, helpers=-1), 1, "--helpers -1"),
        (Hosts(hosts=1, helper_nic="1gbit"), 1, "--helper-nic 1gbit needs --helpers"),
        (Hosts(hosts=1), 0, "0 workers per host must be at least 1"),
        (Hosts(hosts=1, nic="1"), 1, "--nic '1'"),
    ],
)
def test_what_cannot_be(hosts: Hosts, workers_per_host: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        hosts.check(workers_per_host)


def test_not_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: f"/sbin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="need root"):
        Cluster(hosts=1)


def test_no_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None if name in ("ip", "tc") else name)
    with pytest.raises(UsageError, match=r"need the programs ip, tc, .* apt-get install iproute2"):
        Cluster(hosts=1)


def test_not_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UsageError, match="this is darwin"):
        Cluster(hosts=1)
