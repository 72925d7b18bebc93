"""Log lines of MLPerf: read back by the package's own parser and checked by its own rules."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from mlperf_logging.compliance_checker import mlp_compliance
from mlperf_logging.compliance_checker.mlp_parser import parse_file

from shoal.errors import UsageError
from shoal.record import End, Evaluation, Phase, Resume, Row, Start, Step, Stop, Target
from shoal.train.row_writers import MLPerfLog

OF_SUBMISSIONS = {
    "submission_org": "shoal",
    "submission_platform": "test",
    "submission_division": "open",
    "submission_status": "onprem",
    "submission_benchmark": "resnet",
    "cache_clear": True,
}
"""Lines that a submission adds to those of its run."""


def start(**changes: Any) -> Start:
    values: dict[str, Any] = {
        "run": "r",
        "recipe": "resnet50",
        "command": [],
        "config": {"train": {"seed": 7}, "optim": {"optimizer": "lars"}},
        **{"num_workers": 2, "num_hosts": 1, "backend": "gloo", "device": "cpu", "precision": "fp32"},
        **{"versions": {}, "num_parameters": 1, "total_steps": 100, "micro_batch_size": 8},
        "global_batch_size": 32,
        "accumulation_steps": 2,
        "epoch_samples": 320,
        "time_s": 10.0,
    }
    return Start(**{**values, **changes})


def step(number: int, time_s: float) -> Step:
    rates = dict.fromkeys(
        ("loss", "learning_rate", "loss_scale", "grad_norm", "weight_norm", "samples_per_s", "step_s"), 1.0
    )
    return Step(step=number, samples=32 * number, metrics={}, parts_s={}, time_s=time_s, **rates)


def scored(number: int, time_s: float, split: str = "validation", **metrics: float) -> Evaluation:
    """Scores of an evaluation that took 2 s."""
    return Evaluation(
        step=number,
        split=split,
        num_samples=50,
        metrics=metrics,
        seconds=2.0,
        samples=32 * number,
        time_s=time_s,
    )


def reached(number: int, time_s: float) -> Target:
    return Target(step=number, until="u", metrics={}, seconds=1.0, evaluation_s=1.0, time_s=time_s)


def lines(path: Path) -> list[tuple[float, str, Any, dict[str, Any]]]:
    """Return (time in s, key, value, metadata) of each line but the first, as MLPerf's parser reads it."""
    found, failed = parse_file(str(path), ruleset="4.0.0")
    assert not failed
    first, *others = [
        (line.timestamp / 1_000, line.key, line.value["value"], line.value["metadata"]) for line in found
    ]
    assert first[1] == "init_start"
    for _, _, _, metadata in others:
        assert metadata.pop("file") and metadata.pop("lineno")
    return others


def written(path: Path, rows: list[Row], **options: Any) -> Path:
    log = MLPerfLog(path, **options)
    for row in rows:
        log.write(row)
    log.close()
    return path


def test_lines_of_a_run_that_reaches_its_target(tmp_path: Path) -> None:
    rows: list[Row] = [
        start(),
        step(5, 14.0),
        scored(10, 20.0, top1_accuracy=0.5, loss=2.0),
        scored(10, 23.0, "other", top1_accuracy=0.4, loss=2.5),
        step(15, 27.0),
        scored(20, 32.0, top1_accuracy=0.8, loss=1.0),
        reached(20, 32.5),
        End(step=20, seconds=22.0, metrics={}, time_s=40.0),
    ]
    path = written(tmp_path / "log", rows, watched=frozenset({"top1_accuracy"}))
    half, whole = {"samples_count": 320, "epoch_num": 1.0}, {"samples_count": 640, "epoch_num": 2.0}
    block = {"samples_count": 0, "first_epoch_num": 0.0}
    middle, last = ({"samples_count": n, "first_epoch_num": n / 320} for n in (320, 640))
    assert lines(path) == [
        (10.0, "seed", 7, {}),
        (10.0, "global_batch_size", 32, {}),
        (10.0, "gradient_accumulation_steps", 2, {}),
        (10.0, "max_steps", 100, {}),
        (10.0, "opt_name", "lars", {}),
        (10.0, "train_samples", 320, {}),
        (10.0, "init_stop", None, {}),
        (10.0, "run_start", None, {}),
        (10.0, "block_start", None, block),
        (18.0, "block_stop", None, middle),
        (18.0, "eval_samples", 50, {}),
        (18.0, "eval_start", None, half),
        (20.0, "eval_accuracy", 0.5, {"split": "validation", **half}),
        (20.0, "eval_stop", None, half),
        (21.0, "eval_start", None, half),
        (23.0, "eval_accuracy", 0.4, {"split": "other", **half}),
        (23.0, "eval_stop", None, half),
        (23.0, "block_start", None, middle),
        (30.0, "block_stop", None, last),
        (30.0, "eval_start", None, whole),
        (32.0, "eval_accuracy", 0.8, {"split": "validation", **whole}),
        (32.0, "eval_stop", None, whole),
        (32.5, "run_stop", None, {"status": "success"}),
    ]


def test_every_line_has_the_form_of_the_specification(tmp_path: Path) -> None:
    path = written(tmp_path / "log", [start(), scored(10, 20.0, a=0.1, b=0.2), reached(10, 21.0)])
    for line in path.read_text().splitlines():
        found = re.fullmatch(r":::MLLOG (\{.*\})", line)
        assert found, line
        tree = json.loads(found[1])
        assert list(tree) == ["namespace", "time_ms", "event_type", "key", "value", "metadata"]
        assert isinstance(tree["time_ms"], int) and tree["namespace"] == ""
        kinds = {"start": "INTERVAL_START", "stop": "INTERVAL_END"}
        assert tree["event_type"] == kinds.get(tree["key"].rpartition("_")[2], "POINT_IN_TIME")
    (score,) = [value for _, key, value, _ in lines(path) if key == "eval_accuracy"]
    assert score == {"a": 0.1, "b": 0.2}


def test_mlperfs_own_checker_accepts_a_run_with_what_a_submission_adds(tmp_path: Path) -> None:
    path, now = tmp_path / "log", time.time()
    added = [
        {"key": key, "value": value, "time_ms": 0, "metadata": {}} for key, value in OF_SUBMISSIONS.items()
    ]
    path.write_text("".join(f":::MLLOG {json.dumps(line)}\n" for line in added))
    scores = scored(10, now + 5, top1_accuracy=0.8)
    written(path, [start(time_s=now + 1), step(5, now + 2), scores, reached(10, now + 6)])
    checker = mlp_compliance.make_checker("training", "4.0.0", False, False)
    assert mlp_compliance.main(str(path), "training_4.0.0/common.yaml", checker)[0], checker.overwritable
    assert not checker.warnings


@pytest.mark.parametrize(
    ("rows", "watched", "status"),
    [
        ([End(step=10, seconds=1.0, metrics={}, time_s=30.0)], frozenset(), "success"),
        ([End(step=10, seconds=1.0, metrics={}, time_s=30.0)], frozenset({"top1_accuracy"}), "aborted"),
        ([Stop(step=10, reason="SIGTERM", exit_code=75, time_s=30.0)], frozenset(), "aborted"),
    ],
)
def test_the_end_is_a_success_or_not(tmp_path: Path, rows: list[Row], watched: Any, status: str) -> None:
    path = written(tmp_path / "log", [start(), step(10, 20.0), *rows], watched=watched)
    assert lines(path)[-2][1] == "block_stop"
    assert lines(path)[-1][:2] == (30.0, "run_stop") and lines(path)[-1][3] == {"status": status}


def test_phases_have_their_sizes_and_a_run_that_continues_appends(tmp_path: Path) -> None:
    phase = Phase(
        step=1, last_step=9, name="phase1", sequence_length=128, global_batch_size=64, micro_batch_size=4,
        accumulation_steps=8, time_s=11.0,
    )  # fmt: skip
    path = written(tmp_path / "log", [start(epoch_samples=0), phase])
    assert [(key, value) for _, key, value, _ in lines(path)[-3:]] == [
        ("global_batch_size", 64),
        ("gradient_accumulation_steps", 8),
        ("max_sequence_length", 128),
    ]
    before = path.read_text()
    again = [start(time_s=50.0), Resume(step=10, path="c", samples=320, time_s=50.0), scored(20, 60.0, x=1.0)]
    assert written(path, again).read_text().startswith(before)
    assert [m for _, key, _, m in lines(path) if key == "block_start"] == [
        {"samples_count": 320, "first_epoch_num": 1.0}
    ]


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"run.mlperf_log .*/none/log cannot be written \(No such file"):
        MLPerfLog(tmp_path / "none" / "log")
    monkeypatch.setitem(sys.modules, "mlperf_logging.mllog.mllog", None)
    with pytest.raises(UsageError, match=r"needs mlperf-logging.*pip install 'mlperf-logging>=4.1'"):
        MLPerfLog(tmp_path / "log")
