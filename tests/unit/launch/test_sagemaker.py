"""Training jobs of SageMaker: requests by the service's model, and calls against moto and a stub."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber
from moto import mock_aws

from shoal.cli.submit import Output
from shoal.cli.submit import sagemaker as command
from shoal.errors import ShoalError, UsageError
from shoal.launch import sagemaker
from shoal.launch.aws_checks import problems
from shoal.launch.sagemaker import SageMakerJob, base_name, checked, job_name, render, text_of
from shoal.launch.source import digest, pack

BERT = ("shoal", "train", "bert", "--preset", "large", "--data.path", "/opt/ml/input/data/fsx/text")
ROLE = "arn:aws:iam::123456789012:role/training"
COMMON: dict[str, Any] = {
    "hosts": 8, "instance": "ml.p4d.24xlarge",
    "image": "123456789012.dkr.ecr.us-east-1.amazonaws.com/shoal:1",
    "bucket": "s3://my-bucket/shoal", "role": ROLE, "fsx": "fs-0123456789abcdef0", "fsx_path": "/abcdefgh",
    "subnets": ("subnet-1",), "security_groups": ("sg-1",), "region": "us-east-1",
}  # fmt: skip
NAME = "bert-20261123-164000"

REQUEST = """\
{
  "TrainingJobName": "bert-20261123-164000",
  "RoleArn": "arn:aws:iam::123456789012:role/training",
  "AlgorithmSpecification": {
    "TrainingImage": "123456789012.dkr.ecr.us-east-1.amazonaws.com/shoal:1",
    "TrainingInputMode": "File",
    "ContainerEntrypoint": ["shoal", "launch"],
    "ContainerArguments": [
      "--workers=8", "--", "shoal", "train", "bert", "--preset", "large", "--data.path",
      "/opt/ml/input/data/fsx/text"
    ]
  },
  "InputDataConfig": [
    {
      "ChannelName": "fsx",
      "DataSource": {
        "FileSystemDataSource": {
          "FileSystemId": "fs-0123456789abcdef0",
          "FileSystemType": "FSxLustre",
          "FileSystemAccessMode": "rw",
          "DirectoryPath": "/abcdefgh"
        }
      }
    }
  ],
  "OutputDataConfig": {"S3OutputPath": "s3://my-bucket/shoal/bert"},
  "ResourceConfig": {
    "InstanceGroups": [
      {"InstanceGroupName": "workers", "InstanceType": "ml.p4d.24xlarge", "InstanceCount": 8},
      {"InstanceGroupName": "helpers", "InstanceType": "ml.c5n.18xlarge", "InstanceCount": 4}
    ],
    "VolumeSizeInGB": 100
  },
  "StoppingCondition": {"MaxRuntimeInSeconds": 86400, "MaxWaitTimeInSeconds": 172800},
  "Environment": {"SHOAL_SECRET_ID": "shoal/bert"},
  "Tags": [{"Key": "shoal:job", "Value": "bert"}],
  "VpcConfig": {"SecurityGroupIds": ["sg-1"], "Subnets": ["subnet-1"]},
  "EnableManagedSpotTraining": true
}"""


def request(**settings: Any) -> dict[str, Any]:
    return render(SageMakerJob(**{**COMMON, **settings}).filled(), BERT, NAME)


def test_a_job_with_helpers_on_spot_instances_reads_like_this() -> None:
    found = request(helpers=4, workers_per_host=8, spot=True)
    assert text_of(found) == REQUEST
    assert json.loads(REQUEST) == checked(found)
    assert len(REQUEST.splitlines()) <= 60


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"hosts": 1, "fsx": None, "fsx_path": None, "checkpoints": "s3://my-bucket/checkpoints"},
        {"channel": ("text=s3://my-bucket/text", "words=s3://my-bucket/words"), "global_batch": 512},
        {"helpers": 1, "helpers_required": True, "transport": "ofi:efa", "max_hours": 0.5},
        {"spot": True, "max_wait_hours": 30.0},
    ],
)
def test_the_model_takes_what_is_written(settings: dict[str, Any]) -> None:
    found = request(**settings)
    assert problems("sagemaker", "CreateTrainingJob", found) == []
    assert "secret" not in json.dumps(found["Environment"]).replace("SHOAL_SECRET_ID", "")


Change = Callable[[dict[str, Any]], Any]


MISTAKES: list[tuple[Change, str]] = [
    (lambda r: r["ResourceConfig"]["InstanceGroups"][0].update(InstanceTyp="x"), "InstanceTyp"),
    (lambda r: r["ResourceConfig"]["InstanceGroups"][0].update(InstanceCount="8"), "InstanceCount"),
    (
        lambda r: r["ResourceConfig"]["InstanceGroups"][0].update(InstanceType="ml.p4d.24xlage"),
        "'ml.p4d.24xlage' is not known. Did you mean 'ml.p4d.24xlarge'?",
    ),
    (
        lambda r: r["InputDataConfig"][0]["DataSource"]["FileSystemDataSource"].update(
            FileSystemType="Lustre"
        ),
        "FileSystemType 'Lustre' is not known. Did you mean 'FSxLustre'? Known are EFS, FSxLustre.",
    ),
    (lambda r: r.update(TrainingJobName="my_job"), "TrainingJobName 'my_job' does not match"),
    (lambda r: r.update(RoleArn="arn:aws:iam::12:role/training"), "RoleArn"),
    (lambda r: r["AlgorithmSpecification"].update(ContainerArguments=["x" * 257]), "is 257 long"),
    (
        lambda r: r["VpcConfig"].update(Subnets=["subnet-1"] * 17),
        "VpcConfig.Subnets is 17 long and must be 1 to 16",
    ),
    (lambda r: r["StoppingCondition"].update(MaxRuntimeInSeconds=0), "valid min value: 1"),
    (
        lambda r: r["ResourceConfig"].pop("VolumeSizeInGB") and r.pop("OutputDataConfig"),
        "OutputDataConfig",
    ),
]


@pytest.mark.parametrize(("change", "said"), MISTAKES)
def test_planted_mistakes_are_found(change: Change, said: str) -> None:
    good = request(helpers=4)
    bad = copy.deepcopy(good)
    change(bad)
    assert checked(good) == good
    with pytest.raises(UsageError) as raised:
        checked(bad)
    assert said in str(raised.value)


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"hosts": 0}, "--hosts 0 must be at least 1"),
    ({"bucket": "my-bucket"}, "--bucket 'my-bucket' is not of the form s3://"),
    ({"channel": ("s3://b/x",)}, "--channel 's3://b/x' is not of the form NAME=s3://"),
    ({"name": "my_job"}, "--name 'my_job' must be 1 to 40 letters"),
    ({"max_hours": 0.0}, "--max-hours 0.0 must be above 0"),
    ({"max_wait_hours": 30.0}, "--max-wait-hours goes with --spot"),
    ({"role": None}, "--role ARN or SAGEMAKER_ROLE"),
    ({"fsx_path": None}, "--fsx and --fsx-path go together"),
    ({"security_groups": ()}, "--subnets and --security-groups"),
    ({"fsx": None, "fsx_path": None}, "--hosts 8 needs --fsx"),
]


@pytest.mark.parametrize(("settings", "said"), SETTINGS)
def test_mistakes_in_the_options(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        SageMakerJob(**{**COMMON, **settings}).filled()


def test_more_workers_than_the_instances_have_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    def submit(workers: int, instance: str) -> int:
        job = SageMakerJob(**{**COMMON, "workers_per_host": workers, "instance": instance})
        words = (*BERT, "--run.dir", "/opt/ml/input/data/fsx/bert")
        return command(*words, job=job, output=Output(dry_run=True))

    with pytest.raises(
        UsageError, match=r"--workers-per-host 9 must be at most 8, the GPUs of ml\.p4d\.24xl"
    ):
        submit(9, "ml.p4d.24xlarge")
    assert submit(8, "ml.p4d.24xlarge") == submit(2, "ml.m5.xlarge") == 0  # one without GPUs may train too


def test_the_environment_says_what_the_options_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAGEMAKER_ROLE", ROLE)
    monkeypatch.setenv("SAGEMAKER_FSX_ID", "fs-0123456789abcdef1")
    monkeypatch.setenv("SAGEMAKER_SUBNET_IDS", "subnet-1, subnet-2")
    job = SageMakerJob(**{**COMMON, "role": None, "fsx": None, "subnets": ()}).filled()
    assert (job.role, job.fsx, job.subnets) == (ROLE, "fs-0123456789abcdef1", ("subnet-1", "subnet-2"))
    assert SageMakerJob(**COMMON).filled().fsx == "fs-0123456789abcdef0"


def test_names() -> None:
    job = SageMakerJob(**COMMON)
    assert base_name(job, ("python", "My_Script 2.py")) == "My-Script-2"
    assert job_name("bert", datetime(2026, 11, 23, 16, 40, tzinfo=UTC)) == NAME


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with mock_aws():
        yield


def test_source_secret_and_job_arrive(aws: None, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="my-bucket")
    job = SageMakerJob(**COMMON, helpers=2, source=tmp_path).filled()
    found = render(job, ("python", "train.py"), NAME)
    sagemaker.submit(job, checked(found))
    sagemaker.make_secret("shoal/bert", "us-east-1")  # of a second job with this name
    uri = found["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"]
    assert uri == f"s3://my-bucket/shoal/{NAME}/source.tar.gz"
    body = boto3.client("s3").get_object(Bucket="my-bucket", Key=f"shoal/{NAME}/source.tar.gz")["Body"].read()
    assert digest(body) == found["Environment"]["SHOAL_SOURCE_SHA256"] == digest(pack(tmp_path))
    manager = boto3.client("secretsmanager", region_name="us-east-1")
    assert len(manager.get_secret_value(SecretId="shoal/bert")["SecretString"]) == 64
    kept = boto3.client("sagemaker", region_name="us-east-1").describe_training_job(TrainingJobName=NAME)
    assert kept["ResourceConfig"] == found["ResourceConfig"]
    assert sagemaker.state_of(NAME, "us-east-1").startswith("Completed")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("ExpiredToken", "the credentials have expired"),
        ("InvalidClientTokenId", "aws configure"),
        ("ServiceQuotaExceededException", "ask for more under Service Quotas"),
        ("ThrottlingException", "try again in a minute"),
        ("ExpiredTokenException", "the credentials have expired: aws sso login"),
        ("ResourceLimitExceeded", "ask for more under Service Quotas"),
        ("AccessDeniedException", "this user's policy does not allow it"),
        ("ResourceInUse", "a job of this name exists"),
    ],
)
def test_what_aws_refuses_is_passed_on_with_a_remedy(
    aws: None, monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    service = boto3.client("sagemaker", region_name="us-east-1")
    monkeypatch.setattr(sagemaker, "client", lambda name, region: service if name == "sagemaker" else None)
    monkeypatch.setattr(sagemaker, "make_secret", lambda name, region: None)
    with Stubber(service) as stub:
        stub.add_client_error("create_training_job", code, "the text of AWS")
        with pytest.raises(ShoalError) as raised:
            sagemaker.submit(SageMakerJob(**COMMON), request())
    assert "the text of AWS" in str(raised.value) and said in str(raised.value)


def test_a_job_is_stopped_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    service = boto3.client("sagemaker", "us-east-1", aws_access_key_id="x", aws_secret_access_key="x")
    monkeypatch.setattr(sagemaker, "client", lambda name, region: service)
    with Stubber(service) as stub:
        stub.add_response("stop_training_job", {}, {"TrainingJobName": NAME})
        sagemaker.stop(NAME, "us-east-1")
        stub.assert_no_pending_responses()


def test_without_credentials_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    with pytest.raises(ShoalError, match="aws configure, or aws sso login"):
        sagemaker.stop(NAME, "us-east-1")
    with pytest.raises(ShoalError, match="aws configure, or --region"):
        monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
        sagemaker.stop(NAME, None)
