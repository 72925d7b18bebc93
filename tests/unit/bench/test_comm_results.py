"""Limits, formulas and the table of `shoal bench comm`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.bench.comm_results import (
    HEADER,
    CollectiveRow,
    HostNetwork,
    explain,
    formula_seconds,
    limit_seconds,
    time_text,
    write_json,
)

EIGHT = HostNetwork(num_workers=8, num_hosts=8, helper_bandwidths=(1.0,) * 8, link_bytes_per_s=25e6)
ONE_HOST = HostNetwork(num_workers=4, num_hosts=1, link_bytes_per_s=25e6)


def make_row(**changes: object) -> CollectiveRow:
    values = {
        "collective": "all_reduce",
        "num_bytes": 25_000_000,
        "backend": "shoal",
        "samples_s": [1.25, 1.0, 2.0],
        "limit_s": 1.0,
        "formula_s": 1.0,
    }
    return CollectiveRow(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("collective", "seconds"),
    [("all_reduce", 1.0), ("broadcast", 1.0), ("reduce_scatter", 0.875), ("all_gather", 0.875)],
)
def test_limits_of_the_links(collective: str, seconds: float) -> None:
    assert limit_seconds(collective, 25_000_000, EIGHT) == pytest.approx(seconds)
    assert limit_seconds(collective, 25_000_000, ONE_HOST) is None
    assert limit_seconds(collective, 25_000_000, HostNetwork(num_workers=8, num_hosts=8)) is None


def test_a_barrier_has_no_limit() -> None:
    assert limit_seconds("barrier", 0, EIGHT) is None


@pytest.mark.parametrize(
    ("backend", "seconds"),
    [("gloo", 1.75), ("shoal-colocated", 1.75), ("shoal", 1.0), ("shoal-jax", 1.0), ("mpi", None)],
)
def test_formulas(backend: str, seconds: float | None) -> None:
    found = formula_seconds("all_reduce", backend, 25_000_000, EIGHT)
    assert found == (None if seconds is None else pytest.approx(seconds))
    assert formula_seconds("broadcast", backend, 25_000_000, EIGHT) is None
    assert formula_seconds("all_reduce", backend, 25_000_000, ONE_HOST) is None


def test_a_row_takes_the_median() -> None:
    row = make_row()
    assert row.time_s == 1.25
    assert row.algbw_bytes_per_s == 20e6
    assert make_row(num_bytes=0).algbw_bytes_per_s is None


def test_the_table_says_how_near_and_how_much_faster() -> None:
    line = make_row().line(make_row(backend="gloo", samples_s=[2.5]))
    words = "all_reduce 23.8 MiB shoal 1.25 s 1 s 2 s 20 MB/s 80.0 % 1 s 2.00×"
    assert " ".join(line.split()) == words
    assert len(line) == len(HEADER)
    bare = make_row(collective="barrier", num_bytes=0, limit_s=None, formula_s=None)
    assert " ".join(bare.line(None).split()) == "barrier shoal 1.25 s 1 s 2 s"


def test_the_network_in_words() -> None:
    assert EIGHT.describe() == "8 workers on 8 hosts, 8 helper hosts, links of 200 Mbit/s"
    assert HostNetwork(num_workers=1, num_hosts=1).describe() == "1 worker on 1 host"
    assert "--link 10gbit" in explain(HostNetwork(num_workers=8, num_hosts=8), "gloo")
    assert "--link" not in explain(ONE_HOST, "gloo")


def test_json_holds_every_sample(tmp_path: Path) -> None:
    path = tmp_path / "comm.json"
    write_json(path, [make_row()], EIGHT, {"dtype": "float32"})
    found = json.loads(path.read_text())
    assert found["settings"] == {"dtype": "float32"}
    assert found["network"]["num_hosts"] == 8
    (row,) = found["rows"]
    assert row["samples_s"] == [1.25, 1.0, 2.0]
    assert row["time_s"] == 1.25


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.5e-6, "1.5 µs"), (0.000999, "999 µs"), (0.0251, "25.1 ms"), (12.34, "12.3 s"), (1234.0, "1,234 s")],
)
def test_times_in_words(seconds: float, text: str) -> None:
    assert time_text(seconds) == text
