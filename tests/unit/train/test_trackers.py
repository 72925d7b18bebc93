"""Experiment trackers by their own packages, offline: what they have stored is read back."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from wandb.proto.wandb_internal_pb2 import Record

from shoal.errors import UsageError
from shoal.record import Start
from shoal.train.config import RunOutputConfig
from shoal.train.row_writers import MLflowTracker, Tracker, WandbTracker
from shoal.train.run import Run, Sizes

DEADLINE_S = 30.0
DATA = [(torch.randn(4), torch.tensor(number % 2)) for number in range(32)]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    mlflow.set_tracking_uri(f"file:{tmp_path}/mlruns")


def train(directory: Path, *names: Any, until: int = 4, fails_at: int = 0, stops_at: int = 0) -> int:
    settings = RunOutputConfig(report_to=names, log_frequency=2, checkpoint_frequency=2)
    with Run.open(directory, settings=settings) as run:
        model = run.data_parallel(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.keep(model=model.module, optimizer=optimizer)
        for step in run.steps(DATA, Sizes(global_batch_size=8), until=until):
            with step:
                for inputs, labels in step:
                    step.backward(F.cross_entropy(model(inputs), labels, reduction="sum") / step.num_samples)
                step.update(optimizer)
            if run.due(2):
                run.evaluation("validation", {"accuracy": run.step / 10}, num_samples=8)
            if run.step == fails_at:
                raise RuntimeError("of the script")
            if run.step == stops_at:
                run.stop_request.requested = "SIGTERM"
        return run.finish()


def records(directory: Path) -> Iterator[Record]:
    """Yield what W&B has stored offline, once its service has written all: how the run ended comes last."""
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        end = time.monotonic() + DEADLINE_S
        while not any(record.HasField("exit") for record in messages(path.read_bytes())):
            assert time.monotonic() < end, path
            time.sleep(0.05)
        yield from messages(path.read_bytes())


def messages(data: bytes) -> Iterator[Record]:
    """Yield the whole messages of LevelDB's log format, in blocks of 32 KiB."""
    at, message = 7, b""
    while at + 7 <= len(data):
        if (left := 32_768 - at % 32_768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4) and at <= len(data):  # whole, or its last part
            yield Record.FromString(message)
            message = b""


def history(directory: Path) -> list[dict[str, Any]]:
    rows = [record.history.item for record in records(directory) if record.HasField("history")]
    return [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in row} for row in rows]


def test_wandb_has_the_figures_and_scores(tmp_path: Path) -> None:
    train(tmp_path / "run", "wandb")
    rows = history(tmp_path / "run")
    assert [row["step"] for row in rows if "train/loss" in row] == [2, 4]
    assert {row["step"]: row["validation/accuracy"] for row in rows if "validation/accuracy" in row} == {
        2: 0.2,
        4: 0.4,
    }
    stored = list(records(tmp_path / "run"))
    (begun,) = {record.run.run_id for record in stored if record.HasField("run")}
    assert begun == (tmp_path / "run" / "wandb-run.txt").read_text().strip()
    assert [record.exit.exit_code for record in stored if record.HasField("exit")] == [0]


def test_mlflow_has_the_figures_and_scores(tmp_path: Path) -> None:
    train(tmp_path / "run", "mlflow")
    client = mlflow.MlflowClient()
    identity = (tmp_path / "run" / "mlflow-run.txt").read_text().strip()
    stored = client.get_run(identity)
    assert stored.info.status == "FINISHED" and stored.info.run_name == "run"
    scores = client.get_metric_history(identity, "validation/accuracy")
    assert [(score.step, score.value) for score in scores] == [(2, 0.2), (4, 0.4)]
    assert [loss.step for loss in client.get_metric_history(identity, "train/loss")] == [2, 4]


def test_a_run_that_continues_writes_on_in_the_same_run(tmp_path: Path) -> None:
    assert train(tmp_path / "run", "wandb", "mlflow", until=6, stops_at=4) != 0
    identity = (tmp_path / "run" / "mlflow-run.txt").read_text().strip()
    client = mlflow.MlflowClient()
    assert client.get_run(identity).info.status == "KILLED"
    train(tmp_path / "run", "wandb", "mlflow", until=6)
    stored = client.get_run(identity)
    assert stored.info.status == "FINISHED"
    steps = sorted(loss.step for loss in client.get_metric_history(identity, "train/loss"))
    assert steps == [2, 4, 6]
    assert [row["step"] for row in history(tmp_path / "run") if "train/loss" in row] == [2, 4, 6]
    assert len({record.run.run_id for record in records(tmp_path / "run") if record.HasField("run")}) == 1


def test_a_run_that_fails_has_failed_there(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="of the script"):
        train(tmp_path / "run", "wandb", "mlflow", fails_at=3)
    identity = (tmp_path / "run" / "mlflow-run.txt").read_text().strip()
    assert mlflow.MlflowClient().get_run(identity).info.status == "FAILED"
    codes = [record.exit.exit_code for record in records(tmp_path / "run") if record.HasField("exit")]
    assert codes == [1]


def test_a_tracker_that_refuses_to_begin_ends_the_run(tmp_path: Path) -> None:
    mlflow.set_tracking_uri("ftp://nowhere")
    mlflow.set_tracking_uri("ftp://nowhere")
    with pytest.raises(UsageError, match=r"run\.report_to mlflow: .*Set MLFLOW_TRACKING_URI"):
        train(tmp_path / "run", "mlflow")


def test_a_tracker_that_fails_later_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(self: object, *values: object, **options: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", full)
    monkeypatch.setattr("shoal.train.row_writers.flat_settings", lambda tree: {})
    assert train(tmp_path / "run", "mlflow") == 0
    assert capfd.readouterr().err.count("mlflow failed: no space left; training goes on without it") == 1


def test_another_name_is_refused() -> None:
    with pytest.raises(UsageError, match=r"run\.report_to 'comet' must be one of wandb, mlflow"):
        RunOutputConfig(report_to=("comet",))  # type: ignore[arg-type]


def test_both_have_hundreds_of_settings(tmp_path: Path) -> None:
    trackers: list[Tracker] = [MLflowTracker(tmp_path), WandbTracker(tmp_path)]
    config = {"section": {f"setting{number}": number for number in range(250)}}
    for tracker in trackers:
        tracker.write(start(config))
        tracker.close()
    identity = (tmp_path / "mlflow-run.txt").read_text().strip()
    parameters = mlflow.MlflowClient().get_run(identity).data.params
    assert parameters == {f"section.setting{number}": str(number) for number in range(250)}
    (begun,) = [record.run.config.update for record in records(tmp_path) if record.HasField("run")]
    stored = {item.key: item.value_json for item in begun}
    assert parameters.items() <= stored.items()


def start(config: dict[str, Any]) -> Start:
    return Start(
        run="r", recipe="script", command=[], config=config, num_workers=1, num_hosts=1, backend="gloo",
        device="cpu", precision="fp32", versions={}, num_parameters=1, total_steps=1, micro_batch_size=1,
        global_batch_size=1, accumulation_steps=1, epoch_samples=1,
    )  # fmt: skip
