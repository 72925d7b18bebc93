"""The values of a run for other programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import report_records as records

from forked import shoal
from shoal.json_text import json_document
from shoal.report.runs import load_runs
from shoal.report.summary import summary


def test_a_finished_run(tmp_path: Path) -> None:
    path = records.write_run(tmp_path / "one", records.RUNS["finished"]())
    (run,) = load_runs([path])
    found = summary(run)
    assert found["path"] == str(path)
    assert (found["name"], found["recipe"], found["state"]) == ("first-light", "albert", "finished")
    assert (found["step"], found["total_steps"], found["stop_reason"]) == (1_000, 1_000, None)
    assert found["checkpoint_step"] == run.checkpoints[-1].step
    assert found["step_s"] == pytest.approx(sum(step.step_s for step in run.steps) / len(run.steps), rel=0.05)
    last = run.evaluations[-1]
    assert {score["metric"]: score["value"] for score in found["scores"] if score["step"] == last.step} == (
        last.metrics
    )


def test_numbers_that_are_not_finite_are_null() -> None:
    assert json.loads(json_document({"a": [float("nan"), 1.5], "b": (float("inf"),)})) == {
        "a": [None, 1.5],
        "b": [None],
    }


def test_reports_and_runs_print_the_same(tmp_path: Path) -> None:
    for name in ("finished", "one-step"):
        records.write_run(tmp_path / "runs" / name, records.RUNS[name]())
    paths = [f"runs/{name}" for name in ("finished", "one-step")]
    report = shoal("report", *paths, "--json", cwd=tmp_path)
    assert report.returncode == 0, report.stderr
    listed = json.loads(shoal("runs", "--json", cwd=tmp_path).stdout)
    assert listed["jobs"] == []
    assert [run["path"] for run in listed["runs"]] == paths
    keys = ("path", "state", "step", "scores", "recipe", "training_s")
    reported = json.loads(report.stdout)["runs"]
    assert [[run[key] for key in keys] for run in listed["runs"]] == [
        [run[key] for key in keys] for run in reported
    ]
    assert not list(tmp_path.rglob("report.html"))


def test_runs_below_the_folder_are_listed(tmp_path: Path) -> None:
    records.write_run(tmp_path / "runs" / "done", records.RUNS["finished"]())
    records.write_run(tmp_path / "deep" / "er" / "dead", records.RUNS["one-step"]())
    records.write_run(tmp_path / "runs" / "done" / "checkpoints" / "x", records.RUNS["one-step"]())
    broken = tmp_path / "runs" / "broken"
    broken.mkdir()
    (broken / "record.jsonl").write_text("")
    result = shoal("runs", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["run", "recipe", "state", "step", "last", "score"]
    assert [line.split()[0] for line in lines[1:]] == ["deep/er/dead", "runs/broken", "runs/done"]
    assert lines[3].split()[1:4] == ["albert", "finished", "1,000/1,000"]
    assert "nothing has been trained there yet" in lines[2]
    (tmp_path / "none").mkdir()
    said = shoal("runs", "none", cwd=tmp_path).stdout
    assert said == f"{tmp_path / 'none'} has no run and no submitted job\n"
