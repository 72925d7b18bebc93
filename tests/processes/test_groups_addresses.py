"""Tests ranks that publish a loopback address: an error at once if another host would have to reach it."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comm_group import _enter

from forked import fork_process, wait_for
from shoal.comm.store import Records
from shoal.errors import UsageError
from shoal.launch.emulated import Cluster

BOUND_S = 3 * 1.0
PORT = 29_411


def begin(rank: int, network: str, method: str, folder: Path, late: bool) -> None:
    """Begin a group on an emulated host and keep how that ended, and how long it took."""
    _enter(network)
    if late and rank == 1:
        get = Records.get

        def get_late(records: Records, key: str, rank: int, rule: Any) -> dict[str, Any]:
            time.sleep(0.4 if key.startswith("peer") else 0)
            return get(records, key, rank, rule)

        Records.get = get_late  # type: ignore[method-assign]
    os.environ.pop("SHOAL_HOST_ID", None)
    if method == "interface":
        os.environ["SHOAL_INTERFACE"] = "eth0"
        method = f"file://{folder}/store"
    if method.startswith("torchrun "):
        method = method.removeprefix("torchrun ")
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    begun = time.monotonic()
    try:
        dist.init_process_group("shoal", init_method=method, rank=rank, world_size=2)
        tensor = torch.ones(1000) * (1 + rank)
        dist.all_reduce(tensor)
        text = f"sum {tensor[0]:g}"
        dist.destroy_process_group()
    except UsageError as error:
        text = str(error)
    (folder / str(rank)).write_text(f"{time.monotonic() - begun} {text}")


def outcomes(cluster: Cluster, folder: Path, methods: tuple[str, str], late: bool = False) -> list[str]:
    """Return how each rank has ended; all in time."""
    networks = [
        next(word for word in cluster.enter(host) if word.startswith("--net=")).removeprefix("--net=")
        for host in range(2)
    ]
    processes = [
        fork_process(begin, rank, networks[rank], methods[rank], folder, late) for rank in range(2)
    ]  # fmt: skip
    assert wait_for(processes, 60) == [0, 0]
    found = []
    for rank in range(2):
        took_s, _, text = (folder / str(rank)).read_text().partition(" ")
        assert float(took_s) < BOUND_S, f"rank {rank} took {took_s} s: {text}"
        found.append(text)
    return found


@pytest.fixture(scope="module")
def cluster() -> Cluster:  # type: ignore[misc]
    with Cluster(hosts=2) as made:
        yield made


REFUSED = (
    r"rank 0 on host \S+ listens at 127\.0\.\d\.1, which rank 1 on host \S+ cannot reach.*SHOAL_INTERFACE"
)


def test_loopback_between_hosts_is_refused_on_every_rank(cluster: Cluster, tmp_path: Path) -> None:
    """Without a TCP store both publish the address of their own name, which is a loopback one here."""
    method = f"file://{tmp_path}/store"
    for text in outcomes(cluster, tmp_path, (method, method)):
        assert re.search(REFUSED, text)


def test_a_master_whose_own_name_is_a_loopback_address_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    methods = (f"tcp://localhost:{PORT}", f"tcp://{cluster.address(0)}:{PORT}")
    for text in outcomes(cluster, tmp_path, methods):
        assert re.search(REFUSED, text)


def test_a_rank_that_reads_late_is_told_as_well(cluster: Cluster, tmp_path: Path) -> None:
    """Rank 0 holds the store: it stays until the others have read why the group cannot be."""
    methods = (f"tcp://localhost:{PORT + 1}", f"tcp://{cluster.address(0)}:{PORT + 1}")
    for text in outcomes(cluster, tmp_path, methods, late=True):
        assert re.search(REFUSED, text)


def test_where_the_launcher_tells_of_other_hosts_the_address_is_not_a_loopback_one(
    cluster: Cluster, tmp_path: Path
) -> None:
    by_name = (f"torchrun tcp://localhost:{PORT + 2}", f"torchrun tcp://{cluster.address(0)}:{PORT + 2}")
    assert outcomes(cluster, tmp_path, by_name) == ["sum 3", "sum 3"]
    by_file = f"torchrun file://{tmp_path}/store"
    assert outcomes(cluster, tmp_path, (by_file, by_file)) == ["sum 3", "sum 3"]


def test_the_remedy_helps(cluster: Cluster, tmp_path: Path) -> None:
    assert outcomes(cluster, tmp_path, ("interface", "interface")) == ["sum 3", "sum 3"]
