"""Tests `shoal bench comm` as a user runs it: real workers, every collective, every file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from forked import shoal

COLLECTIVES = ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return shoal("bench", "comm", *arguments, deadline_s=240)


@pytest.mark.slow
def test_every_collective_on_local_workers(tmp_path: Path) -> None:
    files = {name: tmp_path / f"comm.{name}" for name in ("json", "png", "trace")}
    result = run(
        *("--backends", "gloo", "--workers", "3", "--repeats", "2", "--sizes", "4k,100k"),
        *("--collectives", ",".join([*COLLECTIVES, "barrier"])),
        *("--json", str(files["json"]), "--plot", str(files["png"]), "--trace", str(files["trace"])),
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("3 workers on 1 host; float32, median of 2\n")
    rows = json.loads(files["json"].read_text())["rows"]
    assert [row["collective"] for row in rows] == [c for c in COLLECTIVES for _ in range(2)] + ["barrier"]
    for row in rows:
        assert len(row["samples_s"]) == 2
        assert all(sample > 0 for sample in row["samples_s"])
        assert row["limit_s"] is None  # no network between workers of one host
    # 4 KiB is no multiple of 3 elements: what is cut into one part a rank is rounded up.
    assert rows[0]["num_bytes"] == 4096
    assert rows[2]["num_bytes"] == 4104
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    events = json.loads(files["trace"].read_text())["traceEvents"]
    calls = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in calls} == {0, 1, 2}
    assert len(calls) == 3 * len(rows)
    assert all(event["ts"] >= 0 for event in calls)


def test_a_backend_that_torch_does_not_know() -> None:
    result = run("--backends", "glo", "--sizes", "4k")
    assert result.returncode == 2
    assert "torch has no backend 'glo'; it knows" in result.stderr
    assert "Traceback" not in result.stderr


def test_shoal_beside_gloo_with_what_its_engine_does(tmp_path: Path) -> None:
    trace = tmp_path / "comm.trace"
    result = run("--sizes", "64k", "--repeats", "2", "--trace", str(trace), "--json")
    assert result.returncode == 0, result.stderr
    assert [row["backend"] for row in json.loads(result.stdout)["rows"]] == ["gloo", "shoal"]
    assert "2 workers on 1 host" in result.stderr
    assert "×" in next(line for line in result.stderr.splitlines() if " shoal " in line)
    calls = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    (call,) = (event for event in calls if event["name"].endswith("on shoal") and event["pid"] == 0)
    inside = [event for event in calls if event["cat"] != "call" and event["pid"] == 0]
    assert "copy out" in {event["cat"] for event in inside}
    for event in inside:
        assert call["ts"] - 1 <= event["ts"] <= call["ts"] + call["dur"]


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("tc"), reason="emulated hosts need root and iproute2"
)
def test_helpers_of_emulated_hosts_are_measured_and_the_formula_takes_that(tmp_path: Path) -> None:
    rows = tmp_path / "comm.json"
    result = run(
        *("--hosts", "3", "--helpers", "3", "--nic", "200mbit", "--sizes", "256k", "--repeats", "1"),
        *("--json", str(rows)),
    )
    assert result.returncode == 0, result.stderr
    formulas = {row["backend"]: row["formula_s"] for row in json.loads(rows.read_text())["rows"]}
    wire_s = (256 << 10) / (200e6 / 8)
    ring_s = 2 * 2 / 3 * wire_s
    assert formulas["gloo"] == pytest.approx(ring_s) and formulas["shoal-colocated"] == pytest.approx(ring_s)
    assert wire_s <= formulas["shoal"] < 0.95 * ring_s
