"""Fills in the files in ``aws/``, from which AWS's own tools create a cluster.

ParallelCluster makes a cluster with Slurm from one file. CloudFormation makes two stacks from their templates
and parameters: a file system over an S3 bucket with a data host, then a cluster. Data is prepared on the data
host before the cluster costs anything. That cluster has no scheduler: the data host finds the others by their
tags, and ``shoal submit ssh`` starts jobs there. Each start's secret goes through ssh: none is kept in AWS.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from string import Template

from shoal.errors import UsageError
from shoal.launch.job_size import check_form

FILE_SYSTEM, CLUSTER = "filesystem.yaml", "cluster.yaml"
"""Files of the two stacks, and of ParallelCluster's configuration."""
_CARDS = (1, 2, 4, 8, 16, 17, 32)
"""Numbers in the table of network cards of ``aws/cluster.yaml``."""
_TEMPLATES = Path(__file__).parent / "aws"

_INSTANCE = r"[a-z0-9-]+\.[a-z0-9-]+"
_SUBNET = r"subnet-[0-9a-f]{8,17}"
_FORMS = {
    "region": (r"[a-z]{2}(-[a-z]+)+-\d", "us-east-1"),
    "vpc": (r"vpc-[0-9a-f]{8,17}", "vpc-0123456789abcdef0"),
    "subnet": (_SUBNET, "subnet-0123456789abcdef0"),
    "data_subnet": (_SUBNET, "subnet-0123456789abcdef0"),
    "key": (r"[\w.@-]{1,255}", "mykey"),
    "bucket": (r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", "my-data, without s3://"),
    "ssh_from": (r"(\d{1,3}\.){3}\d{1,3}/\d{1,2}", "203.0.113.7/32"),
    "name": (r"[a-zA-Z][a-zA-Z0-9-]{0,39}", "bert-cluster"),
    "worker_instance": (_INSTANCE, "p4d.24xlarge"),
    "helper_instance": (_INSTANCE, "c5n.18xlarge"),
    "head_instance": (_INSTANCE, "m5.2xlarge"),
    "data_instance": (_INSTANCE, "m5.2xlarge"),
}
"""Pattern of each setting's value, and an example."""


@dataclass(frozen=True, kw_only=True)
class AwsCluster:
    """A cluster to create: workers with EFA, helpers, FSx for Lustre over an S3 bucket.

    Raises:
        UsageError: a setting is not of its form.
    """

    region: str
    """Region, like us-east-1."""
    subnet: str
    """Subnet of worker and helper hosts: a private one with a way out, such as a NAT gateway."""
    key: str
    """EC2 key pair to log in with."""
    bucket: str
    """S3 bucket that is linked to /fsx/data: new files there are exported to it."""
    name: str = "shoal"
    """Name of the cluster."""
    workers: int = 8
    """Worker hosts, which have EFA and are in one placement group."""
    worker_instance: str = "p4d.24xlarge"
    """Type of the worker hosts."""
    helpers: int = 4
    """Helper hosts."""
    helper_instance: str = "c5n.18xlarge"
    """Type of the helper hosts."""
    fsx_gb: int = 1200
    """Size of the FSx for Lustre file system: 1200, or a multiple of 2400."""
    spot: bool = False
    """Use spot instances for workers."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name in _FORMS:
                form, example = _FORMS[field.name]
                check_form(self, field.name, re.compile(form), f"is not of the form {form}, like {example}")
        if self.workers < 1 or self.helpers < 0:
            raise UsageError(
                f"--workers {self.workers} must be at least 1, --helpers {self.helpers} at least 0"
            )
        if self.fsx_gb != 1200 and (self.fsx_gb < 2400 or self.fsx_gb % 2400):
            raise UsageError(f"--fsx-gb {self.fsx_gb} must be 1200 or a multiple of 2400")


@dataclass(frozen=True, kw_only=True)
class ParallelCluster(AwsCluster):
    """A cluster with Slurm; its hosts are started for a job and stopped after it."""

    head_instance: str = "m5.2xlarge"
    """Type of the head node, which prepares data and runs TensorBoard."""

    def files(self) -> dict[str, str]:
        """Return the configuration as YAML, by the name of its file."""
        text = Template(_template("parallelcluster.yaml")).substitute(
            asdict(self),
            capacity="SPOT" if self.spot else "ONDEMAND",
            gdr=str(self.worker_instance.startswith("p")).lower(),
        )
        if not self.helpers:
            text = re.sub(r"^  - Name: helpers\n(    .*\n)+", "", text, flags=re.MULTILINE)
        return {CLUSTER: text}


@dataclass(frozen=True, kw_only=True)
class CloudFormation(AwsCluster):
    """Two stacks, called NAME-fs and NAME; their hosts run until the second is deleted."""

    vpc: str
    """VPC of all hosts."""
    data_subnet: str | None = None
    """Subnet of the data host, which you reach by ssh: a public one in the same zone; default: --subnet."""
    ssh_from: str
    """Addresses that may reach the data host by ssh, like 203.0.113.7/32."""
    worker_cards: int = 4
    """Network cards with EFA of a worker host: 4 of p4d.24xlarge, 32 of p5.48xlarge, 1 of p3dn.24xlarge."""
    data_instance: str = "m5.2xlarge"
    """Type of the data host, which prepares data and runs TensorBoard."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.worker_cards not in _CARDS:
            numbers = ", ".join(map(str, _CARDS))
            raise UsageError(f"--worker-cards {self.worker_cards} must be one of {numbers}")

    def files(self) -> dict[str, str]:
        """Return the templates of both stacks as YAML, by the names of their files."""
        return {file: _template(file) for file in (FILE_SYSTEM, CLUSTER)}

    @property
    def stack_names(self) -> dict[str, str]:
        """Names of the stacks, by the names of the templates' files."""
        return {FILE_SYSTEM: f"{self.name}-fs", CLUSTER: self.name}

    @property
    def parameters(self) -> dict[str, dict[str, str]]:
        """Parameters of both stacks, by the names of the templates' files."""
        return {
            FILE_SYSTEM: {
                "Bucket": self.bucket,
                "Vpc": self.vpc,
                "Subnet": self.subnet,
                "SizeGb": str(self.fsx_gb),
                "DataSubnet": self.data_subnet or self.subnet,
                "DataType": self.data_instance,
                "KeyName": self.key,
                "SshFrom": self.ssh_from,
            },
            CLUSTER: {
                "FileSystemStack": self.stack_names[FILE_SYSTEM],
                "Subnet": self.subnet,
                "KeyName": self.key,
                "Workers": str(self.workers),
                "WorkerType": self.worker_instance,
                "WorkerCards": str(self.worker_cards),
                "Helpers": str(self.helpers),
                "HelperType": self.helper_instance,
                "Spot": str(self.spot).lower(),
            },
        }

    def create_stack(self, file: str, path: Path) -> str:
        """Return the command that creates the stack of a template and waits for it."""
        values = " ".join(
            f"ParameterKey={key},ParameterValue={value}" for key, value in self.parameters[file].items()
        )
        role = " --capabilities CAPABILITY_IAM" if file == FILE_SYSTEM else ""
        return (
            f"{self._aws('create-stack', file)}{role} --template-body file://{path} --parameters {values} && "
            f"{self._aws('wait stack-create-complete', file)}"
        )

    def delete_stack(self, file: str) -> str:
        """Return the command that deletes a stack."""
        return self._aws("delete-stack", file)

    def print_data_host(self) -> str:
        """Return the command that prints the data host's name."""
        query = "'Stacks[0].Outputs[?OutputKey==`DataHost`].OutputValue'"
        return f"{self._aws('describe-stacks', FILE_SYSTEM)} --output text --query {query}"

    def _aws(self, command: str, file: str) -> str:
        stack = self.stack_names[file]
        return f"aws cloudformation {command} --region {self.region} --stack-name {stack}"


def _template(file: str) -> str:
    return (_TEMPLATES / file).read_text(encoding="utf-8")
