"""Tests that the groups of a process share its connections, counted by the kernel."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shoal_workers import run_group, shoal_group

from shoal.comm.engine import CommError

SIZE = 3
HOSTS = ("a", "b", "c")
NUM_CONNECTIONS = 2 * (SIZE - 1)
"""To each other process one for control and one for data."""
ESTABLISHED = "01"
DEADLINE_S = 30.0


def own_sockets(port: int) -> int:
    """Return the established TCP connections of this process from or to a port."""
    owned = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            owned.add(str(path.readlink()))
    found = 0
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        ports = {int(fields[column].split(":")[1], 16) for column in (1, 2)}
        found += fields[3] == ESTABLISHED and f"socket:[{fields[9]}]" in owned and port in ports
    return found


def check_sum(rank: int, group: Any, members: tuple[int, ...] = (0, 1, 2)) -> None:
    values = [torch.randn(200_000, generator=torch.Generator().manual_seed(member)) for member in members]
    tensor = values[members.index(rank)].clone()
    dist.all_reduce(tensor, group=group)
    total = values[0]
    for value in values[1:]:
        total = total + value
    assert torch.equal(tensor, total)


def all_ports(own: int) -> list[int]:
    ports: list[Any] = [None] * SIZE
    dist.all_gather_object(ports, own)
    return ports


def share(rank: int) -> None:
    world = dist.group.WORLD
    engine = shoal_group().engine
    ports = all_ports(engine.port)

    def count() -> int:
        """Return the connections to other engines, which the kernel and the core count alike."""
        until = time.monotonic() + DEADLINE_S
        while True:  # an attempt whether a slow peer's host answers is a socket for a moment
            by_core = int(engine.counters()["connections"])
            mine = sum(own_sockets(port) for port in ports)
            if mine == by_core or time.monotonic() > until:
                break
            time.sleep(0.05)
        assert mine == by_core, (mine, by_core)
        return by_core

    check_sum(rank, world)
    assert count() == NUM_CONNECTIONS
    whole = dist.new_group(backend="shoal")
    pair = dist.new_group([0, 2], backend="shoal")
    check_sum(rank, whole)
    if rank != 1:
        check_sum(rank, pair, (0, 2))
        assert shoal_group(pair).engine.port == engine.port
    assert count() == NUM_CONNECTIONS
    dist.destroy_process_group(whole)
    check_sum(rank, world)
    if rank != 1:
        check_sum(rank, pair, (0, 2))
        dist.destroy_process_group(pair)
    dist.barrier()
    assert count() == NUM_CONNECTIONS
    dist.barrier()  # nobody leaves before all have counted


def test_groups_of_three_processes_share_one_set_of_connections(tmp_path: Path) -> None:
    run_group(share, SIZE, tmp_path, hosts=HOSTS)


def fail_one(rank: int) -> None:
    world, other = dist.group.WORLD, dist.new_group(backend="shoal")
    check_sum(rank, other)
    dist.barrier()  # an abort ends a sum that is complete here and not yet on the others
    if rank == 1:
        shoal_group(other).engine.abort("the test ends it")
    with pytest.raises(CommError, match="the test ends it"):
        for _ in range(3):
            dist.all_reduce(torch.ones(100_000), group=other)
    for _ in range(5):
        check_sum(rank, world)
    fresh = dist.new_group(backend="shoal")
    check_sum(rank, fresh)
    assert shoal_group(fresh).engine.port == shoal_group().engine.port


def test_a_group_that_fails_leaves_the_others_of_its_processes_alone(tmp_path: Path) -> None:
    run_group(fail_one, SIZE, tmp_path, hosts=HOSTS)


def begin_again(rank: int, folder: Path) -> None:
    check_sum(rank, None)
    for attempt in range(2):
        dist.destroy_process_group()
        dist.init_process_group("shoal", init_method=f"file://{folder}/{attempt}", rank=rank, world_size=SIZE)
        check_sum(rank, None)
        assert shoal_group().engine.counters()["connections"] == NUM_CONNECTIONS
        dist.barrier()  # nobody leaves before all have counted


def test_a_group_after_all_others_were_destroyed(tmp_path: Path) -> None:
    run_group(begin_again, SIZE, tmp_path, tmp_path, hosts=HOSTS)
