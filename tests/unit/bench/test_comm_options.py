"""Refusals of `shoal bench comm` before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.bench.comm_options import CommBench, parse_sizes
from shoal.errors import UsageError
from shoal.launch.emulated_job import Hosts


def bench(**changes: object) -> CommBench:
    return CommBench(**changes)  # type: ignore[arg-type]


def test_sizes() -> None:
    assert parse_sizes("64, 4k,1m , 2.5MiB,1g,10b") == [64, 4096, 1 << 20, 5 << 19, 1 << 30, 10]


@pytest.mark.parametrize("text", ["", "0", "k", "-4k", "4x", "4kk", "0.1"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="must be a number of bytes above 0, such as 4k"):
        parse_sizes(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"collectives": "allreduce"}, "'allreduce' is none of .* Did you mean 'all_reduce'"),
        ({"dtype": "float23"}, "'float23' is none of .* Did you mean 'float32'"),
        (
            {"backends": "gloo,shoal-jax", "collectives": "all_reduce,reduce"},
            "--collectives reduce: shoal-jax has none, .* leave out reduce or shoal-jax",
        ),
        ({"repeats": 0}, "--repeats 0 must be at least 1"),
        ({"workers": 0}, "--workers 0 must be at least 1"),
        ({"timeout": float("nan")}, "--timeout nan must be a positive number"),
        ({"emulated": Hosts(nic="1gbit")}, "--nic set up emulated hosts: add --hosts N"),
        ({"emulated": Hosts(helpers=2)}, "--helpers set up emulated hosts: add --hosts N"),
        ({"link": "fast"}, "--link 'fast' must be a number above 0"),
        ({"emulated": Hosts(hosts=2, nic="200")}, "--nic '200' must be a number above 0"),
        ({"json": Path("/no/such/folder/x.json")}, "the folder /no/such/folder is not there"),
    ],
)
def test_options_that_cannot_be_right(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bench(**changes).check()


def test_the_rate_of_the_link() -> None:
    assert bench().link_bytes_per_s is None
    assert bench(emulated=Hosts(hosts=2, nic="200mbit")).link_bytes_per_s == 25e6
    assert bench(link="10gbit").link_bytes_per_s == 1.25e9
