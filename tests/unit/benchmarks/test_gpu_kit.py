"""The kit's driver: limits of time, failures, and its table; commands are small Python programs."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from benchmarks.gpu.kit import Kit, main, table
from benchmarks.gpu.stages import Job, Kind, Stage, stages

from shoal.bench.step_timing import TrainResult

RESULTS = Path(__file__).parents[3] / "benchmarks/results"
WRITE = "import json, sys; json.dump(json.loads(sys.argv[1]), open(sys.argv[2], 'w'))"


def job(title: str, program: str, *words: str, kind: Kind = "exit", limit_s: float = 20.0) -> Job:
    command = (sys.executable, "-c", program, *words)
    return Job(title=title, command=command, kind=kind, limit_s=limit_s, target=100.0)


def trained(folder: Path) -> str:
    result = TrainResult(
        recipe="bert-large", sequence_length=512, num_parameters=1, device="x", num_devices=1,
        precision="bf16", global_batch=64, micro_batch=64, samples_s=(0.5,), parts_s={"forward": 0.5},
        peak_memory_bytes=1, flops_per_sample=1e9, matmul_flops_per_s=2.56e11,
    )  # fmt: skip
    result.write(folder / "train.json")
    return (folder / "train.json").read_text()


def test_failures_and_hangs_are_reported_and_the_rest_is_measured(tmp_path: Path) -> None:
    rows = (RESULTS / "overhead_epyc-2core_2026-11-21.json").read_text()
    row = json.loads(rows)["rows"][0]
    hang = "import subprocess, sys; subprocess.call([sys.executable, '-c', 'import time; time.sleep(60)'])"
    first = Stage(
        name="first",
        limit_s=30,
        jobs=(
            job("breaks", "import sys; print('the reason'); sys.exit(3)"),
            job("hangs", hang, limit_s=1.5),
            job("throughput", WRITE, trained(tmp_path), "{out}", kind="train"),
            job("misses its target", WRITE + "; sys.exit(1)", rows, "{out}", kind="rows"),
            job("writes something else", WRITE, '{"rows": [{}]}', "{out}", kind="rows"),
        ),
    )
    kit = Kit(tmp_path / "out", 60, rehearsal=True)
    begin_s = time.monotonic()
    assert not kit.run([first])
    assert time.monotonic() - begin_s < 30
    assert [outcome.status for outcome in kit.outcomes] == ["failed", "out of time", "done", "done", "failed"]
    assert kit.outcomes[-1].said == "its file cannot be read: KeyError('case')"
    assert kit.outcomes[0].said == "the reason"
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert len(written) == 3 and written[0] == "kit.log"
    tree = json.loads(next((tmp_path / "out").glob("*.json")).read_text())
    assert [one["title"] for one in tree["jobs"]] == [one.title for one in first.jobs]
    lines = table(kit.outcomes, title="a title", target_share=0.9)
    assert "| first | breaks | failed | | |" in lines
    assert "| first | throughput | 128 sequences/s |  | 90 |" in lines
    assert "| first | throughput: share of a large product | 0.5  |  |  |" in lines
    shown = next(line for line in lines if row["case"] in line)
    assert f" {row['ours']:.4g} {row['unit']} | {row['ratio']:.2f} × {row['peer_name']} " in shown


def test_the_budget_ends_the_kit(tmp_path: Path) -> None:
    slow = Stage(
        name="slow", limit_s=30, jobs=(job("sleeps", "import time; time.sleep(60)"), job("is left", ""))
    )
    kit = Kit(tmp_path, 2.5, rehearsal=True)
    assert not kit.run([slow, slow])
    assert [outcome.status for outcome in kit.outcomes] == ["out of time", "not run", "not run", "not run"]


def test_stages_fit_the_budget_and_are_rehearsed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full, tiny = (stages(tmp_path, rehearsal=rehearsal) for rehearsal in (False, True))
    assert [stage.name for stage in full] == [stage.name for stage in tiny]
    assert sum(stage.limit_s for stage in full[1:]) <= 22 * 60
    assert all("cuda" not in job.command for stage in tiny for job in stage.jobs)
    for words, said in (
        ([], "--rehearsal tries"),
        (["--rehearsal", "--stage", "brt"], "brt is none of build,"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2 and said in capsys.readouterr().err
