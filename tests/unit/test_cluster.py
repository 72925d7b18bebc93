"""Hosts, workers and servers."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from shoal.cluster import Cluster, Host, WorkerPlace

CLUSTER = Cluster(
    hosts=(
        Host(name="a", num_workers=3, num_servers=1),
        Host(name="helper", num_servers=2),
        Host(name="b", num_workers=3),
    )
)


def test_counts() -> None:
    assert (CLUSTER.num_workers, CLUSTER.num_servers) == (6, 3)
    assert (Cluster(hosts=()).num_workers, Cluster(hosts=()).num_servers) == (0, 0)


def test_a_helper_has_servers_and_no_workers() -> None:
    assert [host.is_helper for host in CLUSTER.hosts] == [False, True, False]
    assert not Host(name="idle").is_helper


def test_workers_fill_hosts_in_rank_order() -> None:
    assert [CLUSTER.host_of_worker(rank).name for rank in range(6)] == ["a", "a", "a", "b", "b", "b"]


@pytest.mark.parametrize("rank", [-1, 6])
def test_a_worker_that_does_not_exist(rank: int) -> None:
    with pytest.raises(IndexError, match=f"worker {rank} does not exist: the cluster has 6 workers"):
        CLUSTER.host_of_worker(rank)


def test_only_rank_0_is_main() -> None:
    places = [
        WorkerPlace(rank=rank, num_workers=4, local_rank=rank % 2, num_local_workers=2) for rank in range(4)
    ]
    assert [place.is_main for place in places] == [True, False, False, False]


def test_nouns_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        CLUSTER.hosts[0].num_workers = 9  # type: ignore[misc]
