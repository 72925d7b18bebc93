"""Writes and submits training jobs of SageMaker: a request for ``CreateTrainingJob``, without its SDK.

All instances run the same image and ``shoal launch``, which reads its part from the name of its group of
instances (:mod:`shoal.launch.sagemaker_host`).
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from shoal.env.sagemaker import SECRET_ID, SOURCE_SHA256, sagemaker_defaults
from shoal.env.settings import TRANSPORT
from shoal.errors import ShoalError, UsageError
from shoal.launch.aws_calls import called, client
from shoal.launch.aws_checks import problems
from shoal.launch.job_size import SIZE, JobSize, check_form, name_of
from shoal.launch.source import ARCHIVE, digest, pack

REQUEST = "request.json"
WORKERS, HELPERS = "workers", "helpers"
INPUT, CHECKPOINTS, MODEL = "/opt/ml/input/data", "/opt/ml/checkpoints", "/opt/ml/model"
FSX_CHANNEL, SOURCE_CHANNEL = "fsx", "source"
_NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,39}")
_S3 = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[\w!.*'()/-]*)?")
_CHANNEL = re.compile(r"[\w.-]{1,64}=s3://.+")
_WIDTH = 100
_LOGS = "/aws/sagemaker/TrainingJobs"


@dataclass(frozen=True, kw_only=True)
class SageMakerJob(JobSize):
    """A training job: its instances, its files and the role that it acts for."""

    name: str | None = None
    """Name of the job, to which the time is appended; default: the command's first words."""
    instance: Annotated[str, SIZE]
    """Type of the worker instances, like ml.p4d.24xlarge."""
    helper_instance: Annotated[str, SIZE] = "ml.c5n.18xlarge"
    """Type of the helper instances."""
    image: str
    """Container image in ECR with shoal."""
    bucket: str
    """S3 prefix for outputs and --source, like s3://my-bucket/shoal."""
    role: str | None = None
    """ARN of the job's role; default: SAGEMAKER_ROLE."""
    fsx: str | None = None
    """Id of the FSx for Lustre file system, which all hosts mount; default: SAGEMAKER_FSX_ID."""
    fsx_path: str | None = None
    """Folder of the file system to mount; it begins with the file system's mount name, like
    /abcdefgh/bert."""
    channel: tuple[str, ...] = ()
    """Data to copy from S3: NAME=s3://…, available in the job at /opt/ml/input/data/NAME."""
    checkpoints: str | None = None
    """S3 prefix that is synchronized with /opt/ml/checkpoints; for one host."""
    subnets: tuple[str, ...] = ()
    """Subnets; default: SAGEMAKER_SUBNET_IDS, separated by commas."""
    security_groups: tuple[str, ...] = ()
    """Security groups; EFA needs one that allows all traffic within the group."""
    spot: bool = False
    """Use spot instances; SageMaker starts the job again after an interruption."""
    max_hours: float = 24.0
    """Hours after which SageMaker stops the job."""
    max_wait_hours: float | None = None
    """Hours to wait for spot instances, --max-hours included; default: twice --max-hours."""
    volume_gb: int = 100
    """Size of each instance's disk."""
    source: Path | None = None
    """Folder with your own script, in which the command runs."""
    region: str | None = None
    """Region; default: that of the AWS configuration."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_hours <= 0:
            raise UsageError(f"--max-hours {self.max_hours} must be above 0")
        if self.max_wait_hours is not None and (not self.spot or self.max_wait_hours < self.max_hours):
            raise UsageError("--max-wait-hours goes with --spot, and includes --max-hours")
        for name in ("bucket", "checkpoints"):
            check_form(self, name, _S3, "is not of the form s3://BUCKET/PREFIX")
        check_form(self, "channel", _CHANNEL, "is not of the form NAME=s3://BUCKET/PREFIX")
        check_form(self, "name", _NAME, "must be 1 to 40 letters, digits and single hyphens")

    def filled(self) -> SageMakerJob:
        """Return the job with missing fields filled from the environment.

        Raises:
            UsageError: a field is missing that has no default.
        """
        defaults = sagemaker_defaults()
        job = replace(
            self,
            role=self.role or defaults.role,
            fsx=self.fsx or defaults.fsx,
            subnets=self.subnets or defaults.subnets,
        )
        if job.role is None:
            raise UsageError("--role ARN or SAGEMAKER_ROLE says for whom the job acts")
        if bool(job.fsx) != bool(job.fsx_path):
            raise UsageError("--fsx and --fsx-path go together: the file system, and /MOUNTNAME/folder in it")
        if job.fsx and not (job.subnets and job.security_groups):
            raise UsageError("a file system is reached from a VPC: --subnets and --security-groups")
        if bool(job.subnets) != bool(job.security_groups):
            raise UsageError("--subnets and --security-groups go together")
        if job.hosts > 1 and not job.fsx:
            raise UsageError(
                f"--hosts {job.hosts} needs --fsx: a run's directory is shared by all hosts, and "
                f"{CHECKPOINTS} is a folder of each"
            )
        return job


def base_name(job: SageMakerJob, command: Sequence[str]) -> str:
    """Return the given name, or one from the command's first words."""
    name = re.sub(r"[^a-zA-Z0-9]+", "-", name_of(command)).strip("-")[:40].strip("-")
    return job.name or name or "shoal"


def job_name(base: str, now: datetime | None = None) -> str:
    """Return a unique name: SageMaker never forgets the names of jobs."""
    return f"{base}-{(now or datetime.now(UTC)):%Y%m%d-%H%M%S}"


def secret_name(base: str) -> str:
    """Return the name of the job's secret in Secrets Manager."""
    return f"shoal/{base}"


def render(job: SageMakerJob, command: Sequence[str], name: str) -> dict[str, Any]:
    """Return the request of a :meth:`~SageMakerJob.filled` job.

    Args:
        job: the job.
        command: of the workers.
        name: from :func:`job_name`.
    """
    base = name.rsplit("-", 2)[0]
    environment = {SECRET_ID: secret_name(base)}
    if job.transport:
        environment[TRANSPORT] = job.transport
    if job.source:
        environment[SOURCE_SHA256] = digest(pack(job.source))
    request: dict[str, Any] = {
        "TrainingJobName": name,
        "RoleArn": job.role,
        "AlgorithmSpecification": {
            "TrainingImage": job.image,
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["shoal", "launch"],
            "ContainerArguments": [*job.launch_options(), "--", *command],
        },
        "InputDataConfig": _channels(job, name),
        "OutputDataConfig": {"S3OutputPath": f"{job.bucket.rstrip('/')}/{base}"},
        "ResourceConfig": _instances(job),
        "StoppingCondition": {"MaxRuntimeInSeconds": round(job.max_hours * 3600)},
        "Environment": environment,
        "Tags": [{"Key": "shoal:job", "Value": base}],
    }
    if job.subnets:
        groups = {"SecurityGroupIds": list(job.security_groups), "Subnets": list(job.subnets)}
        request["VpcConfig"] = groups
    if job.checkpoints:
        request["CheckpointConfig"] = {"S3Uri": job.checkpoints, "LocalPath": CHECKPOINTS}
    if job.spot:
        wait_s = round((job.max_wait_hours or 2 * job.max_hours) * 3600)
        request["EnableManagedSpotTraining"] = True
        request["StoppingCondition"]["MaxWaitTimeInSeconds"] = wait_s
    return {key: value for key, value in request.items() if value != []}


def _channels(job: SageMakerJob, name: str) -> list[dict[str, Any]]:
    pairs = [channel.split("=", 1) for channel in job.channel]
    if job.source:
        pairs.append([SOURCE_CHANNEL, source_uri(job, name)])
    channels: list[dict[str, Any]] = [
        {"ChannelName": key, "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": uri}}}
        for key, uri in pairs
    ]
    if job.fsx:
        system = {"FileSystemId": job.fsx, "FileSystemType": "FSxLustre", "FileSystemAccessMode": "rw"}
        source = {"FileSystemDataSource": {**system, "DirectoryPath": job.fsx_path}}
        channels.append({"ChannelName": FSX_CHANNEL, "DataSource": source})
    return channels


def channels(job: SageMakerJob) -> list[str]:
    """Return the folders of data in the containers."""
    return [f"{INPUT}/{channel.split('=', 1)[0]}" for channel in job.channel]


def kept(job: SageMakerJob) -> list[str]:
    """Return the folders in the containers that outlive the job and that all of its hosts share."""
    own = [*([CHECKPOINTS] if job.checkpoints else []), MODEL] if job.hosts == 1 else []
    return [*([f"{INPUT}/{FSX_CHANNEL}"] if job.fsx else []), *own]


def source_uri(job: SageMakerJob, name: str) -> str:
    """Return the S3 location of the archive of ``--source``."""
    return f"{job.bucket.rstrip('/')}/{name}/{ARCHIVE}"


def _instances(job: SageMakerJob) -> dict[str, Any]:
    size = {"VolumeSizeInGB": job.volume_gb}
    if not job.helpers:
        return {"InstanceType": job.instance, "InstanceCount": job.hosts, **size}
    groups = ((WORKERS, job.instance, job.hosts), (HELPERS, job.helper_instance, job.helpers))
    keys = ("InstanceGroupName", "InstanceType", "InstanceCount")
    return {"InstanceGroups": [dict(zip(keys, group, strict=True)) for group in groups], **size}


def checked(request: dict[str, Any]) -> dict[str, Any]:
    """Return the request if it conforms to the service's model.

    Raises:
        UsageError: it does not, with all violations.
    """
    if violations := problems("sagemaker", "CreateTrainingJob", request):
        raise UsageError("SageMaker would refuse the job: " + "; ".join(violations))
    return request


def text_of(value: Any, indent: str = "") -> str:
    """Return JSON with each object and list on one line where that is short enough."""
    flat = json.dumps(value)
    if len(indent) + len(flat) <= _WIDTH or not isinstance(value, dict | list) or not value:
        return flat
    inner = indent + "  "
    if isinstance(value, dict):
        rows = [f"{json.dumps(key)}: {text_of(each, inner)}" for key, each in value.items()]
    else:
        words = all(isinstance(each, str) for each in value)
        rows = (
            _filled([json.dumps(each) for each in value], inner)
            if words
            else [text_of(each, inner) for each in value]
        )
    begin, end = "{}" if isinstance(value, dict) else "[]"
    lines = ",\n".join(inner + row for row in rows)
    return f"{begin}\n{lines}\n{indent}{end}"


def _filled(words: list[str], indent: str) -> list[str]:
    """Return lines of words, each but the last to be followed by a comma."""
    lines = [words[0]]
    for word in words[1:]:
        if len(indent) + len(lines[-1]) + len(word) + 3 <= _WIDTH:
            lines[-1] += f", {word}"
        else:
            lines.append(word)
    return lines


# ---- calls of AWS ------------------------------------------------------------------------------------------


def submit(job: SageMakerJob, request: dict[str, Any]) -> None:
    """Upload the source, make the secret unless it is there, and create the training job.

    Raises:
        ShoalError: AWS refuses.
    """
    if job.source:
        bucket, _, key = source_uri(job, request["TrainingJobName"]).removeprefix("s3://").partition("/")
        storage = client("s3", job.region)
        called(lambda: storage.put_object(Bucket=bucket, Key=key, Body=pack(job.source or Path())))
    make_secret(request["Environment"][SECRET_ID], job.region)
    service = client("sagemaker", job.region)
    called(lambda: service.create_training_job(**request))


def make_secret(name: str, region: str | None) -> None:
    """Create the job's secret in Secrets Manager, unless one of that name exists.

    Raises:
        ShoalError: AWS refuses.
    """
    manager = client("secretsmanager", region)
    try:
        called(lambda: manager.create_secret(Name=name, SecretString=secrets.token_hex(32)))
    except ShoalError as problem:
        if "ResourceExists" not in str(problem):
            raise


def state_of(name: str, region: str | None) -> str:
    """Return SageMaker's state of a job, such as ``InProgress: Training``."""
    service = client("sagemaker", region)
    answer = called(lambda: service.describe_training_job(TrainingJobName=name))
    states = dict.fromkeys((answer["TrainingJobStatus"], answer.get("SecondaryStatus", "")))
    return ": ".join(filter(None, states))


def log_lines(name: str, region: str | None, *, since: int) -> Iterator[tuple[str, int]]:
    """Yield lines of a job's output in CloudWatch, each after its host's name, and their times in ms.

    Raises:
        ShoalError: AWS refuses.
    """
    service = client("logs", region)
    request: dict[str, Any] = {"logGroupName": _LOGS, "logStreamNamePrefix": f"{name}/", "startTime": since}
    while True:
        try:
            answer = called(lambda: service.filter_log_events(**request))
        except ShoalError as problem:
            if "ResourceNotFound" in str(problem):  # no output yet
                return
            raise
        for event in answer["events"]:
            host = event["logStreamName"].partition("/")[2].rpartition("-")[0]
            yield f"{host}: {event['message'].rstrip()}", event["timestamp"]
        if not (token := answer.get("nextToken")):
            return
        request["nextToken"] = token


def stop(name: str, region: str | None) -> None:
    """Stop a job: its containers get SIGTERM and two minutes to save."""
    service = client("sagemaker", region)
    called(lambda: service.stop_training_job(TrainingJobName=name))
