"""``shoal bench scaling``: arithmetic of its rows, refusals, files, and the runs that a launcher starts.

A small program stands for the launcher and for ``shoal bench train``: it writes step times that are known.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.bench.scaling import KIND, ScalingBench, ScalingRow, hourly
from shoal.bench.scaling_runs import measure
from shoal.bench.step_timing import TrainResult
from shoal.cli.app import main
from shoal.errors import EXIT_OK, EXIT_USAGE, ShoalError, UsageError
from shoal.planner.calibration import SCALING_KIND, MeasuredTrain, read_measured

RESULT = TrainResult(
    recipe="albert-tiny",
    sequence_length=64,
    num_parameters=1000,
    device="CPU",
    num_devices=1,
    precision="fp32",
    global_batch=2,
    micro_batch=2,
    samples_s=(1.0,),
    parts_s={"forward": 1.0},
    peak_memory_bytes=1,
    flops_per_sample=1e9,
    matmul_flops_per_s=1e10,
)
# A step takes 1 s for each micro-batch, and on several hosts 1 s more on gloo and 0.5 s more on shoal.
LAUNCHER = """
import json, sys
hosts, command = int(sys.argv[1]), sys.argv[2:]
given = dict(zip(command, command[1:]))
accumulate, backend = int(given["--accumulate"]), given["--distributed.backend"]
result = json.load(open({result!r}))
network = 0 if hosts == 1 else 1.0 if backend == "gloo" else 0.5
result["samples_s"] = [accumulate + network] * int(given["--steps"])
result["num_devices"], result["global_batch"] = hosts, hosts * accumulate * result["micro_batch"]
if {fails}:
    sys.exit("no such partition")
json.dump(result, open(given["--json"], "w"))
"""


def launcher(folder: Path, *, fails: bool = False) -> str:
    result, script = folder / "result.json", folder / "launcher.py"
    RESULT.write(result)
    script.write_text(LAUNCHER.format(result=str(result), fails=fails))
    return f"'{sys.executable}' '{script}' {{hosts}}"


@pytest.fixture
def _no_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.bench.scaling_runs._check", lambda command: None)


# Stands for shoal bench train on emulated hosts: 1 s by itself, 2 s with others, 1.5 s if there are helpers.
TRAIN = """
import json, os, sys
given = dict(zip(sys.argv, sys.argv[1:]))
if "--dry-run" in sys.argv:
    sys.exit()
hosts, helped = int(os.environ["WORLD_SIZE"]), "SHOAL_HELPERS" in os.environ
if os.environ["RANK"] != "0":
    sys.exit(int(given.get("--fail-at", "-1") == os.environ.get("RANK")))
result = json.load(open({result!r}))
result["samples_s"] = [1.0 if hosts == 1 else 1.5 if helped else 2.0]
result["num_devices"], result["global_batch"] = hosts, 2 * hosts
json.dump(result, open(given["--json"], "w"))
"""


def test_efficiency_and_cost_of_a_row() -> None:
    row = ScalingRow(
        backend="shoal",
        accumulate=4,
        hosts=8,
        helpers=2,
        global_batch=64,
        step_s=(9.0, 4.0, 2.0),
        reference_hosts=2,
        reference_batch=16,
        reference_s=(1.0, 3.0, 8.0),
        dollars_per_hour=36.0,
    )
    assert (row.steps_per_s, row.samples_per_s) == (0.25, 16)
    assert row.efficiency == pytest.approx((16 / 8) / (16 / 3 / 2))
    assert row.dollars_per_million == pytest.approx(0.01 * 1e6 / 16)
    assert replace(row, dollars_per_hour=None).dollars_per_million is None
    assert row.curve == "shoal with 2 helpers, accumulation 4"


@pytest.mark.usefixtures("_no_dry_run")
def test_what_a_launcher_starts_becomes_rows_of_every_curve(tmp_path: Path) -> None:
    options = ScalingBench(hosts="4,1", accumulate="1,4", launcher=launcher(tmp_path), price="3.6", steps=3)
    options.check(())
    lines: list[str] = []
    scaling = measure(
        options,
        "albert",
        ["--preset", "tiny"],
        tmp_path,
        hourly=lambda hosts, helpers: hourly(options, float, hosts=hosts, helpers=helpers),
        report=lines.append,
    )
    seen = [(row.backend, row.accumulate, row.hosts, row.efficiency) for row in scaling.rows]
    assert seen == [
        ("gloo", 1, 1, 1.0),
        ("shoal", 1, 1, 1.0),
        ("gloo", 1, 4, pytest.approx(1 / 2)),
        ("shoal", 1, 4, pytest.approx(1 / 1.5)),
        ("gloo", 4, 1, 1.0),
        ("shoal", 4, 1, 1.0),
        ("gloo", 4, 4, pytest.approx(4 / 5)),
        ("shoal", 4, 4, pytest.approx(4 / 4.5)),
    ]
    assert all(len(row.step_s) == 3 for row in scaling.rows)
    # 4 hosts of 3.6 dollars an hour, and 4 sequences a second on gloo
    assert scaling.rows[2].dollars_per_million == pytest.approx(4 * 3.6 / 3600 * 1e6 / 4)
    assert "albert-tiny, fp32, 2 sequences of 64 tokens per micro-batch, 1 worker per host" in lines[0]
    assert "50.0 %" in lines[3] and "$ / million" in lines[0] and len(lines) == 1 + len(seen)


def test_the_command_writes_what_the_planner_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, chart = tmp_path / "scaling.json", tmp_path / "scaling.svg"
    arguments = [
        "--hosts",
        "1,2",
        "--launcher",
        launcher(tmp_path),
        "--json",
        str(file),
        "--plot",
        str(chart),
    ]
    code = run(["bench", "scaling", "albert", *arguments, "--", "--preset", "tiny"])
    assert code == EXIT_OK, capsys.readouterr().err
    whole = json.loads(file.read_text())
    assert whole["kind"] == KIND == SCALING_KIND
    assert [row["efficiency"] for row in whole["rows"]] == pytest.approx([1, 1, 1 / 2, 1 / 1.5])
    read = read_measured(file)
    assert isinstance(read, MeasuredTrain)
    assert (read.recipe, read.samples_per_s, read.global_batch) == ("albert-tiny", 2.0, 2)
    svg = chart.read_text()
    assert all(f"<!-- {curve}, accumulation 1 -->" in svg for curve in ("gloo", "shoal", "ideal"))
    file.write_text(json.dumps(whole | {"one_host": None}))
    with pytest.raises(UsageError, match="has no host alone: measure with --hosts 1"):
        read_measured(file)


@pytest.mark.usefixtures("_no_dry_run")
def test_a_launcher_that_fails_is_quoted(tmp_path: Path) -> None:
    options = ScalingBench(hosts="2", launcher=launcher(tmp_path, fails=True))
    with pytest.raises(ShoalError, match=r"ended with exit code 1; its last output:\n  no such partition"):
        measure(options, "albert", [], tmp_path, hourly=lambda hosts, helpers: None)
    absent = replace(options, launcher="no-such-launcher {hosts}")
    with pytest.raises(UsageError, match="the command 'no-such-launcher' is not found"):
        measure(absent, "albert", [], tmp_path, hourly=lambda hosts, helpers: None)


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("tc"), reason="emulated hosts need root and iproute2"
)
def test_emulated_hosts_are_compared_with_as_many_by_themselves(tmp_path: Path) -> None:
    result, script = tmp_path / "result.json", tmp_path / "train.py"
    RESULT.write(result)
    script.write_text(TRAIN.format(result=str(result)))
    options = ScalingBench(
        hosts="1,2", backends="gloo,shoal,shoal-colocated", on="emulated", nic="1gbit", helpers=1
    )
    program = (sys.executable, str(script))
    scaling = measure(
        options,
        "albert",
        [],
        tmp_path,
        hourly=lambda hosts, helpers: None,
        report=lambda text: None,
        program=program,
    )
    seen = [(row.backend, row.hosts, row.helpers, row.efficiency) for row in scaling.rows]
    assert seen == [
        ("gloo", 1, 0, 1.0),
        ("shoal", 1, 0, 1.0),
        ("shoal-colocated", 1, 0, 1.0),
        ("gloo", 2, 0, 0.5),
        ("shoal", 2, 1, pytest.approx(1 / 1.5)),
        ("shoal-colocated", 2, 0, 0.5),
    ]
    assert [len(row.reference_s) for row in scaling.rows] == [1, 1, 1, 2, 2, 2]  # the steps of each host
    only_two = replace(options, hosts="2", backends="gloo", helpers=0)
    with pytest.raises(ShoalError, match="a worker ended with exit code 1; its last output: none"):
        measure(
            only_two,
            "albert",
            ["--fail-at", "1"],
            tmp_path,
            hourly=lambda hosts, helpers: None,
            report=lambda text: None,
            program=program,
        )


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({"hosts": "1,zwei"}, (), "--hosts '1,zwei' must be positive numbers"),
        ({"accumulate": "0"}, (), "--accumulate '0' must be positive"),
        ({"launcher": "srun"}, (), "with {hosts} for their number"),
        ({"nic": "1gbit"}, (), "--nic set up emulated hosts: add --on emulated"),
        ({"on": "emulated", "launcher": "srun -N {hosts}"}, (), "--launcher is for real hosts"),
        ({"on": "emulated", "backends": "shoal-colocated"}, (), "shoal without helpers: give --helpers"),
        ({"on": "emulated", "json": Path("absent/file.json")}, (), "the folder absent is not there"),
        ({"on": "emulated", "steps": 0}, (), "--steps 0 must be at least 1"),
        ({"on": "emulated"}, ("--accumulate=2",), "--accumulate is an option of shoal bench scaling itself"),
    ],
)
def test_refusals(options: dict[str, str], arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ScalingBench(**options).check(arguments)  # type: ignore[arg-type]


def test_options_of_the_recipe_are_checked_before_any_host_is_made(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = run(["bench", "scaling", "albert", "--on", "emulated", "--", "--presett", "tiny"])
    assert code == EXIT_USAGE and "Did you mean --preset?" in capsys.readouterr().err
    code = run(["bench", "scaling", "albert", "--on", "emulated", "--price", "p3dn.24xlarg"])
    assert code == EXIT_USAGE and "p3dn.24xlarge" in capsys.readouterr().err


def run(arguments: list[str]) -> int:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", ["shoal", *arguments])
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code
