"""Holds the settings that a cluster on AWS has, whichever tool makes it, and checks their form."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from shoal.errors import UsageError

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
    """A cluster to be made: workers with EFA, helpers, FSx for Lustre over an S3 bucket.

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
    """S3 bucket that appears as /fsx/data, and takes back what is written there."""
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
            value = getattr(self, field.name)
            form, example = _FORMS.get(field.name, ("", ""))
            if form and value is not None and not re.fullmatch(form, value):
                raise UsageError(
                    f"--{field.name.replace('_', '-')} {value!r} is not of the form {form}, like {example}"
                )
        if self.workers < 1 or self.helpers < 0:
            raise UsageError(
                f"--workers {self.workers} must be at least 1, --helpers {self.helpers} at least 0"
            )
        if self.fsx_gb != 1200 and (self.fsx_gb < 2400 or self.fsx_gb % 2400):
            raise UsageError(f"--fsx-gb {self.fsx_gb} must be 1200 or a multiple of 2400")
