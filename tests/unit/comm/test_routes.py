"""Tests the routes of device tensors: rank layouts, and the chunks of tables."""

from __future__ import annotations

import pytest
import torch

from shoal.comm.collectives import collective
from shoal.comm.routes import RankLayout, Route, flat_route


def place(hosts: str, devices: str, rank: int = 0) -> RankLayout:
    return RankLayout.of(list(zip(hosts, devices, strict=True)), rank)


def test_ranks_of_a_host_have_parts_if_each_has_a_device() -> None:
    assert place("aabb", "0101").is_hierarchical
    assert place("aa", "01").is_hierarchical, "one host"
    assert not place("aabb", "0100").is_hierarchical, "two ranks of a host share a device"
    assert not place("aab", "010").is_hierarchical, "not as many ranks on each host"
    assert not place("abc", "000").is_hierarchical, "one rank a host: nothing to add up inside"


def test_hosts_come_in_the_order_of_their_lowest_ranks() -> None:
    found = place("baab", "0011", rank=2)
    assert found.hosts == ((0, 3), (1, 2))
    assert (found.host, found.local) == (1, 1)
    assert found.rail_order() == [0, 1, 3, 2]
    assert [found.host_of(rank) for rank in range(4)] == [0, 1, 1, 0]


def route(kind: str, rank: int = 0, root: int = 0, count: int = 1000, size: int = 3) -> Route:
    wide = torch.zeros(count * size)
    source = wide if kind == "reduce_scatter" else wide[:count]
    target = wide if kind == "all_gather" else wide[:count]
    asked = collective(kind, source, target, root=root)
    engine: object = "an engine"
    return flat_route(asked, engine, rank, size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "rows", "source", "target"),
    [
        ("all_reduce", 1, (1, 1000), (1, 1000)),
        ("all_gather", 3, (1, 1000), (3, 1000)),
        ("reduce_scatter", 4, (3, 1000), (1, 1000)),
    ],
)
def test_chunks_fit_a_buffer(kind: str, rows: int, source: tuple[int, int], target: tuple[int, int]) -> None:
    found = route(kind)
    assert (found.rows, found.source.shape, found.target.shape) == (rows, source, target)
    for buffer_bytes, columns in ((16, 4 // rows), (100, 25 // rows), (4096, 1024 // rows // 128 * 128)):
        assert found.columns(buffer_bytes) == columns
    assert found.columns(1 << 20) >= 1000, "a small tensor is one chunk"
    first_rows = {"all_reduce": (0, 0), "all_gather": (0, 0), "reduce_scatter": (0, 3)}
    assert found.buffered_rows == first_rows[kind]
    assert route("all_gather", rank=2).buffered_rows == (2, 0)


def test_a_chunk_is_a_quarter_of_a_tensor_between_its_limits() -> None:
    mib, limit = 1 << 20, 4 << 20
    for tensor, chunk in ((1, 1), (2, 1), (4, 1), (10, 2.5), (16, 4), (32, 4)):
        assert route("all_reduce", count=tensor * mib // 4).columns(limit) * 4 == chunk * mib
    assert route("all_reduce", count=64 * mib // 4).columns(16 << 20) * 4 == 16 * mib


def test_who_sends_and_who_receives() -> None:
    roles = {
        (kind, rank): (found.sends, found.receives)
        for kind in ("all_reduce", "reduce", "broadcast")
        for rank in (0, 1)
        for found in [route(kind, rank, root=1)]
    }
    assert roles["all_reduce", 0] == roles["all_reduce", 1] == (True, True)
    assert roles["reduce", 0] == (True, False)
    assert roles["reduce", 1] == (True, True)
    assert roles["broadcast", 0] == (False, True)
    assert roles["broadcast", 1] == (True, False)
