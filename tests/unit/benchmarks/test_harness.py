"""The harness decides whether a target holds, so its own arithmetic is checked on known samples."""

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks import harness
from benchmarks.harness import Benchmark, peer_module
from benchmarks.machine import ForeignCores, _busy_and_own_s


def _burn(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_ratio_is_that_of_the_medians_of_the_raw_samples() -> None:
    bench = Benchmark("x", [])
    row = bench.add("a", ours=[1.0, 2.0, 90.0], peer=[5.0, 6.0, 7.0], peer_name="p", unit="ms", target=3.0)
    assert (row.ours, row.peer, row.ratio, row.holds) == (2.0, 6.0, 3.0, True)
    row = bench.add("b", ours=[10.0], peer=[4.0], peer_name="p", unit="1/s", better="higher", target=2.6)
    assert row.ratio == 2.5
    assert not row.holds
    assert bench.finish() == 1


def test_a_limit_is_a_row_and_says_what_it_is() -> None:
    bench = Benchmark("x", [])
    assert bench.limit("overhead", 1.5, 2.0, unit="%", formula="2 % of a step").holds
    assert bench.limit("memory", 2.0, 2.0, unit="MiB", formula="f").holds
    assert bench.finish() == 0
    row = bench.limit("overhead", [2.0, 2.2, 9.0], 2.0, unit="%", formula="2 % of a step")
    assert not row.holds
    assert row.peer_name == "limit: 2 % of a step"
    assert not bench.limit("nan", math.nan, 2.0, unit="%", formula="f").holds
    assert not bench.limit("rate", 1.0, 2.0, unit="1/s", formula="f", better="higher").holds
    assert bench.finish() == 1


def test_a_row_without_target_only_informs_and_no_rows_is_a_failure() -> None:
    assert Benchmark("x", []).finish() == 1
    bench = Benchmark("x", [])
    assert bench.add("a", ours=[9.0], peer=[1.0], peer_name="p", unit="ms").target is None
    assert bench.finish() == 0


def test_compare_alternates_times_calls_and_takes_numbers_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(harness, "MIN_REPETITION_S", 0.05)
    calls: list[str] = []

    def ours() -> None:
        calls.append("o")
        time.sleep(0.004)

    def peer() -> float:
        calls.append("p")
        return 7.0

    row = Benchmark("x", ["--quick"]).compare(
        "a", ours=ours, peer=peer, peer_name="p", warmup=1, quick_repetitions=2
    )
    assert all(sample >= 4.0 for sample in row.ours_samples)
    assert set(row.peer_samples) == {7.0}
    assert len(row.ours_samples) == len(row.peer_samples) >= 2
    assert row.ours == statistics.median(row.ours_samples)
    assert "".join(calls).startswith("opoppo")  # warm-up, then by turns, the first one alternating


def test_repetitions_with_foreign_load_are_taken_again_a_bounded_number_of_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loads = iter([0.9, 0.1, 0.2, 0.8, 0.7, 0.6])

    class Watch(ForeignCores):
        def __exit__(self, *_: object) -> None:
            self.cores = next(loads)

    monkeypatch.setattr(harness, "ForeignCores", Watch)
    monkeypatch.setattr(harness, "MIN_REPETITION_S", 0.0)
    monkeypatch.setattr(harness, "_SETTLE_S", 0.0)
    samples = iter(range(100))
    row = Benchmark("x", []).compare(
        "a", ours=lambda: float(next(samples)), peer=lambda: 1.0, peer_name="p", warmup=0, repetitions=3
    )
    assert row.ours_samples == [1.0, 2.0, 5.0]  # 0, 3 and 4 were thrown away, then the retries were used up
    assert row.num_retaken == 3
    assert row.foreign_cores == [0.1, 0.2, 0.6]
    assert row.noisy


SPIN = "import time\nend = time.monotonic() + 30\nwhile time.monotonic() < end: pass"


def _ticks(pid: int) -> int:
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))


@pytest.mark.skipif(sys.platform != "linux", reason="processor time of others is read from /proc")
def test_foreign_cores_count_a_stranger() -> None:
    # the middle process ends at once, so that its child is no longer our descendant
    script = (
        "import subprocess, sys; "
        f"print(subprocess.Popen([sys.executable, '-c', {SPIN!r}], stdout=subprocess.DEVNULL).pid)"
    )
    stranger = int(subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True).stdout)
    try:
        before, begin_s = _ticks(stranger), time.perf_counter()
        with ForeignCores() as watch:
            time.sleep(0.6)
        used_s = (_ticks(stranger) - before) / os.sysconf("SC_CLK_TCK")
    finally:
        os.kill(stranger, signal.SIGKILL)
    assert used_s > 0.05
    assert watch.cores is not None
    assert watch.cores >= used_s / (time.perf_counter() - begin_s) - 0.1


@pytest.mark.skipif(sys.platform != "linux", reason="processor time of others is read from /proc")
def test_own_time_includes_children() -> None:
    with subprocess.Popen([sys.executable, "-c", SPIN]) as child:
        try:
            before, child_before = _busy_and_own_s(), _ticks(child.pid)
            _burn(0.3)
            child_s = (_ticks(child.pid) - child_before) / os.sysconf("SC_CLK_TCK")
            after = _busy_and_own_s()
        finally:
            child.kill()
    assert before is not None
    assert after is not None
    assert after[1] - before[1] >= 0.3 + child_s - 0.05
    assert after[0] - before[0] >= 0.3 + child_s - 0.05


def test_files_hold_the_form_of_the_architecture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_file, markdown_file = tmp_path / "r.json", tmp_path / "r.md"
    bench = Benchmark("reduce", ["--quick", "--json", str(json_file), f"--markdown={markdown_file}"])
    bench.add("a case", ours=[2.0, 2.5], peer=[4.5], peer_name="torch.add", unit="ms", target=1.8)
    assert bench.finish() == 0
    result = json.loads(json_file.read_text())
    assert result["benchmark"] == "reduce"
    assert result["command"] == "python -m benchmarks.reduce --quick"  # no path of this machine
    assert set(result) >= {"commit", "machine", "date", "rows"}
    assert result["rows"][0] | {"ratio": 2.0, "holds": True, "ours_samples": [2.0, 2.5]} == result["rows"][0]
    assert "| a case | 2.25 ±0.12 ms | 4.5 ms | torch.add | 2.00 | 1.80 | yes |" in markdown_file.read_text()
    assert "a case" in capsys.readouterr().out


def test_a_ratio_to_zero_is_null_in_json(tmp_path: Path) -> None:
    bench = Benchmark("served", ["--json", str(tmp_path / "r.json")])
    assert bench.limit("bytes on a worker", 0.0, 1.0, unit="bytes", formula="none").ratio == math.inf
    assert bench.finish() == 0
    (row,) = json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)["rows"]
    assert (row["ours"], row["ratio"], row["holds"]) == (0.0, None, True)


def test_a_missing_peer_says_what_to_install() -> None:
    with pytest.raises(SystemExit, match=r"no_such_peer.*pip install 'pycocotools>=2.0.10' "):
        peer_module("no_such_peer")
