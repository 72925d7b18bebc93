"""The configuration for AWS ParallelCluster; its own schema reads it in tests/real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from parallelcluster_mistakes import COMMON
from shoal.cli.cluster import parallelcluster as write
from shoal.errors import UsageError
from shoal.launch.aws_cluster import ParallelCluster

CLUSTER = """\
Region: us-east-1
Image: {Os: ubuntu2404}
HeadNode:  # data is prepared here, and TensorBoard runs here: ssh -L 6006:localhost:6006
  InstanceType: m5.2xlarge
  Networking: {SubnetId: subnet-0123456789abcdef0}
  Ssh: {KeyName: key}
  LocalStorage: {RootVolume: {Size: 100, Encrypted: true}}
  Iam: {S3Access: [{BucketName: my-data, EnableWriteAccess: true}]}
Scheduling:
  Scheduler: slurm
  SlurmSettings:
    ScaledownIdletime: 10
  SlurmQueues:
  - Name: workers
    CapacityType: ONDEMAND
    ComputeResources:
    - Name: workers
      Instances: [{InstanceType: p4d.24xlarge}]
      MinCount: 0
      MaxCount: 8
      Efa: {Enabled: true, GdrSupport: true}
    Networking: {SubnetIds: [subnet-0123456789abcdef0], PlacementGroup: {Enabled: true}}
    Iam: {S3Access: [{BucketName: my-data}]}
  - Name: helpers
"""


def test_a_cluster_reads_like_this() -> None:
    text = ParallelCluster(**COMMON).files()["cluster.yaml"]
    assert text.startswith(CLUSTER)
    assert len(text.splitlines()) <= 60
    found = yaml.safe_load(text)
    _, helpers = found["Scheduling"]["SlurmQueues"]
    assert helpers["ComputeResources"][0]["Instances"] == [{"InstanceType": "c5n.18xlarge"}]
    assert helpers["ComputeResources"][0]["Efa"] == {"Enabled": True}
    (storage,) = found["SharedStorage"]
    assert (storage["MountDir"], storage["FsxLustreSettings"]["DeletionPolicy"]) == ("/fsx", "Retain")
    association = storage["FsxLustreSettings"]["DataRepositoryAssociations"][0]
    assert association["AutoExportPolicy"] == ["NEW", "CHANGED"]  # nothing is deleted in the bucket
    without_helpers = ParallelCluster(**COMMON, helpers=0, spot=True).files()["cluster.yaml"]
    alone = yaml.safe_load(without_helpers)["Scheduling"]["SlurmQueues"]
    assert [(queue["Name"], queue["CapacityType"]) for queue in alone] == [("workers", "SPOT")]


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"region": "Virginia"}, "--region 'Virginia' is not of the form"),
    ({"subnet": "subnet-1"}, "--subnet 'subnet-1' is not"),
    ({"bucket": "s3://b"}, "--bucket 's3://b' is not"),
    ({"key": "a: b"}, "--key 'a: b' is not"),
    ({"worker_instance": "p4d"}, "--worker-instance 'p4d' is not"),
    ({"workers": 0}, "--workers 0 must be at least 1"),
    ({"fsx_gb": 1_300}, "--fsx-gb 1300 must be 1200 or a multiple of 2400"),
    ({"name": "my cluster"}, "--name 'my cluster' is not"),
]


@pytest.mark.parametrize(("settings", "said"), SETTINGS)
def test_mistakes_in_the_options(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ParallelCluster(**{**COMMON, **settings})


def test_the_command_prints_the_commands_that_make_and_delete_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert write(plan=ParallelCluster(**COMMON, helper_instance="m5.large"), out=tmp_path / "aws") == 0
    said = capsys.readouterr().out
    files = ParallelCluster(**COMMON, helper_instance="m5.large").files()
    assert {path.name: path.read_text() for path in (tmp_path / "aws").iterdir()} == files
    assert "pcluster create-cluster --cluster-name shoal --region us-east-1 --cluster-configuration" in said
    assert "pcluster delete-cluster" in said and "without m5.large" in said
    assert "an hour of the head node: $0.38 " in said and "an hour of the file system: $0.35," in said


def test_an_instance_type_that_ec2_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"--worker-instance 'p4de.24xlarg' is no instance type.*p4de.24xlarge"
    ):
        write(plan=ParallelCluster(**COMMON, worker_instance="p4de.24xlarg"), out=tmp_path / "aws")
    assert not (tmp_path / "aws").exists()
