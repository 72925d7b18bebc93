"""Submitted jobs of all back-ends: what is listed of them, their output, and how they stop."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber

from shoal import record
from shoal.cli.runs import pace, runs
from shoal.errors import ShoalError, UsageError
from shoal.launch import sagemaker, submissions
from shoal.launch.job_folder import JobFolder
from shoal.launch.submissions import Submitted, jobs, logs, note, stop

NAME = "bert-20261123-164000"


def program(folder: Path, name: str, text: str) -> None:
    """Put a program of this name first in the path; it writes down how it was called."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f'#!/bin/sh\necho {name} "$@" >> "$(dirname "$0")/said"\n{text}\n')
    (folder / name).chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    program(folder, "squeue", "echo RUNNING")
    program(folder, "scancel", "")
    program(folder, "kubectl", "case $1 in get) echo 'Completed ';; logs) echo step 5;; esac")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def stub(monkeypatch: pytest.MonkeyPatch, name: str) -> tuple[Any, Stubber]:
    service = boto3.client(name, "us-east-1", aws_access_key_id="x", aws_secret_access_key="x")
    monkeypatch.setattr(sagemaker, "client", lambda asked, region: service)
    return service, Stubber(service)


def test_jobs_of_all_back_ends_in_one_table(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "jobs"
    note(folder / "a", "slurm", "4711", run=str(tmp_path / "run"))
    meeting = JobFolder(folder / "a", "4711.0")
    meeting.begin()
    meeting.progress_file.write_text("200\n")
    (folder / "a" / "output.log").write_text("step 1\nstep 210  loss 1.0\x1b[0m\n\n")
    note(folder / "b", "kubernetes", "b", api="trainjob", namespace="train")
    note(folder / "c", "sagemaker", NAME, region="us-east-1")
    _, stubbed = stub(monkeypatch, "sagemaker")
    stubbed.add_response(
        "describe_training_job",
        {"TrainingJobName": NAME, "TrainingJobArn": "a" * 60, "ModelArtifacts": {"S3ModelArtifacts": "s3://b"},
         "TrainingJobStatus": "InProgress", "SecondaryStatus": "Training", "CreationTime": 0,
         "AlgorithmSpecification": {"TrainingInputMode": "File"}, "ResourceConfig": {"VolumeSizeInGB": 1},
         "StoppingCondition": {}},
        {"TrainingJobName": NAME},
    )  # fmt: skip
    with stubbed:
        found = jobs([folder / name for name in "abc"])
    common = {"starts": 0, "step": "", "run": None, "last_line": ""}
    assert found == [
        Submitted(
            name="a", backend="slurm", id="4711", state="RUNNING", starts=1, step="200", run=tmp_path / "run",
            last_line="step 210  loss 1.0[0m",
        ),
        Submitted(name="b", backend="kubernetes", id="b", state="Completed", **common),
        Submitted(name="c", backend="sagemaker", id=NAME, state="InProgress: Training", **common),
    ]  # fmt: skip
    assert "kubectl get --namespace train trainjob b --output jsonpath=" in (programs / "said").read_text()
    (folder / "c" / submissions.SUBMITTED).unlink()
    program(programs, "kubectl", "echo 'Error: NotFound' >&2; exit 1")
    program(programs, "squeue", "echo 'cannot reach the controller' >&2; exit 1")
    assert runs(folder) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:5] == ["name", "on", "job", "state", "starts"]
    assert lines[1][:4] == [
        "a",
        "slurm",
        "4711",
        "?",
    ] and "(squeue: cannot reach the controller)" in " ".join(lines[1])
    assert lines[2] == ["b", "kubernetes", "b", "ENDED", "0", "-", "-", "-"]


def test_the_pace_is_that_of_the_record(tmp_path: Path) -> None:
    start = record.Start(
        run="run", recipe="albert", command=[], config={}, num_workers=1, num_hosts=1, backend="gloo",
        device="CPU", precision="fp32", versions={}, num_parameters=1, total_steps=1_000, global_batch_size=1,
        micro_batch_size=1, accumulation_steps=1,
    )  # fmt: skip
    step = record.Step(
        step=100, samples=100, loss=1.0, metrics={}, learning_rate=1.0, loss_scale=1.0, grad_norm=1.0,
        weight_norm=1.0, samples_per_s=2.0, step_s=0.5, parts_s={},
    )  # fmt: skip
    rows = [{"kind": row.kind, **asdict(row)} for row in (start, step)]
    (tmp_path / "record.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert pace(tmp_path) == ("2", "7 min 30 s")
    assert pace(tmp_path / "none") == pace(None) == ("-", "-")


def test_stop(tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note(tmp_path / "a", "slurm", "4711")
    assert stop(tmp_path / "a") == "job 4711 saves and leaves"
    note(tmp_path / "b", "kubernetes", "b", namespace="train")
    assert "the pods of b save and leave" in stop(tmp_path / "b")
    said = (programs / "said").read_text().splitlines()
    assert said[1:] == [
        "scancel --signal=USR1 4711",
        f"kubectl delete --namespace train --filename {tmp_path}/b/job.yaml --ignore-not-found --wait=false",
        "kubectl delete --namespace train secret b-secret --ignore-not-found --wait=false",
    ]
    note(tmp_path / "c", "sagemaker", NAME)
    _, stubbed = stub(monkeypatch, "sagemaker")
    stubbed.add_response("stop_training_job", {}, {"TrainingJobName": NAME})
    with stubbed:
        assert stop(tmp_path / "c") == f"training job {NAME} has two minutes to save"
    with pytest.raises(UsageError, match="has no job that waits or runs"):
        stop(tmp_path / "none")
    (tmp_path / "a" / submissions.SUBMITTED).write_text("[]")
    with pytest.raises(ShoalError, match="has no job id; remove it"):
        stop(tmp_path / "a")


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"id": "4; rm"}', '{"backend": "kubernetes", "id": "a b"}'],
    ids=["JSON", "list", "words", "name"],
)  # fmt: skip
def test_a_job_id_that_is_none(tmp_path: Path, text: str) -> None:
    assert submissions.earlier_id(tmp_path) is None
    (tmp_path / "submitted.json").write_text(text)
    with pytest.raises(ShoalError, match=r"submitted\.json.*remove it|remove .*submitted\.json"):
        submissions.earlier_id(tmp_path)


def test_logs(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    note(tmp_path / "a", "slurm", "4711")
    with pytest.raises(UsageError, match="a has no output yet: the job is RUNNING"):
        logs(tmp_path / "a", follow=False)
    (tmp_path / "a" / "output.log").write_text("step 1\n")
    assert logs(tmp_path / "a", follow=False) == 0
    note(tmp_path / "b", "kubernetes", "b")
    assert logs(tmp_path / "b", follow=True) == 0
    note(tmp_path / "old", "kubernetes", "old", api="job")
    with pytest.raises(ShoalError, match=r"old was submitted with --api job,.* has only jobset and trainjob"):
        logs(tmp_path / "old", follow=False)
    note(tmp_path / "c", "sagemaker", NAME)
    _, stubbed = stub(monkeypatch, "logs")
    asked = {"logGroupName": "/aws/sagemaker/TrainingJobs", "logStreamNamePrefix": f"{NAME}/", "startTime": 0}
    for token, following, text in ((None, "t", "step 7\n"), ("t", None, "step 8\n")):
        event = {"logStreamName": f"{NAME}/algo-1-1700000000", "message": text, "timestamp": 5}
        answer = {"events": [event], **({"nextToken": following} if following else {})}
        stubbed.add_response("filter_log_events", answer, asked | ({"nextToken": token} if token else {}))
    with stubbed:
        assert logs(tmp_path / "c", follow=False) == 0
    stubbed.add_client_error("filter_log_events", "ResourceNotFoundException")
    monkeypatch.setattr(sagemaker, "state_of", lambda name, region: "InProgress: Starting")
    with stubbed, pytest.raises(UsageError, match=f"{NAME} has no output yet: the job is InProgress: Sta"):
        logs(tmp_path / "c", follow=False)
    assert capfd.readouterr().out == "step 1\nstep 5\nalgo-1: step 7\nalgo-1: step 8\n"
    assert "kubectl logs job/b-workers-0 --tail=100 --follow" in (programs / "said").read_text()
