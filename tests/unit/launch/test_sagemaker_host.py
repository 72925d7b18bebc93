"""The files of ``/opt/ml`` that an instance of SageMaker reads, and those that it leaves when it fails."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto import mock_aws

from shoal.errors import ShoalError, UsageError
from shoal.launch import sagemaker_host
from shoal.launch.in_job import HostOptions
from shoal.launch.sagemaker_host import JobInstance, is_here, read_instance

# As in AWS's documentation of training containers
GROUPS = [
    {"instance_group_name": "helpers", "instance_type": "ml.c5n.18xlarge", "hosts": ["algo-1"]},
    {"instance_group_name": "workers", "instance_type": "ml.p4d.24xlarge", "hosts": ["algo-3", "algo-2"]},
]


def write(base: Path, host: str, **changes: Any) -> Path:
    found = {
        "current_host": host,
        "current_instance_type": "ml.p4d.24xlarge",
        "hosts": ["algo-1", "algo-2", "algo-3"],
        "instance_groups": GROUPS,
        "network_interface_name": "eth0",
        **changes,
    }
    path = base / "input" / "config" / "resourceconfig.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found))
    return path


def test_instances(tmp_path: Path) -> None:
    workers = ("algo-2", "algo-3")
    common = {"workers": workers, "helpers": ("algo-1",), "interface": "eth0"}
    assert read_instance(write(tmp_path, "algo-1")) == JobInstance(role="helper", number=0, **common)
    assert read_instance(write(tmp_path, "algo-3")) == JobInstance(role="worker", number=1, **common)
    alone = read_instance(write(tmp_path, "algo-1", hosts=["algo-1"], instance_groups=None))
    assert alone == JobInstance(role="worker", number=0, workers=("algo-1",), helpers=(), interface="eth0")


@pytest.mark.parametrize("changes", [{"current_host": "algo-9"}, {"hosts": None}, {"instance_groups": [1]}])
def test_a_file_of_somebody_else(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = write(tmp_path, **{"host": "algo-1", **changes})
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ShoalError, match=r"resourceconfig.json: is not what SageMaker writes"):
        read_instance(path)


def test_the_reason_of_a_failure_is_where_sagemaker_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_SAGEMAKER_BASE", str(tmp_path))
    assert not is_here()
    write(tmp_path, "algo-1", hosts=["algo-1"], instance_groups=[])
    assert is_here()
    with pytest.raises(UsageError, match="name the command"):
        sagemaker_host.run((), HostOptions())
    assert (tmp_path / "output" / "failure").read_text().startswith("name the command of the workers")


def test_the_secret_comes_from_secrets_manager_into_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("SHOAL_SECRET_ID", "shoal/bert")
    monkeypatch.setenv("SHOAL_SECRET_FILE", "")
    monkeypatch.delenv("SHOAL_SECRET_FILE")
    with mock_aws():
        with pytest.raises(ShoalError, match="the job's role needs secretsmanager:GetSecretValue on it"):
            sagemaker_host.fetch_secret()
        boto3.client("secretsmanager").create_secret(Name="shoal/bert", SecretString="5" * 64)
        sagemaker_host.fetch_secret()
    path = Path(os.environ["SHOAL_SECRET_FILE"])
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("5" * 64, 0o600)
    path.unlink()
