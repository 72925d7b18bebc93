"""Writes the configuration of a Slurm cluster for AWS ParallelCluster 3, with a shared file system."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from shoal.errors import UsageError

CONFIGURATION = "cluster.yaml"
_FORMS = {
    "region": r"[a-z]{2}(-[a-z]+)+-\d",
    "subnet": r"subnet-[0-9a-f]{8,17}",
    "key": r"[\w.@-]{1,255}",
    "bucket": r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]",
    "name": r"[a-zA-Z][a-zA-Z0-9-]{0,39}",
    "worker_instance": r"[a-z0-9-]+\.[a-z0-9-]+",
    "helper_instance": r"[a-z0-9-]+\.[a-z0-9-]+",
    "head_instance": r"[a-z0-9-]+\.[a-z0-9-]+",
}


@dataclass(frozen=True, kw_only=True)
class ParallelCluster:
    """A cluster to be made."""

    region: str
    """Region, like us-east-1."""
    subnet: str
    """Subnet of all hosts; workers without public addresses need a private one with a way out."""
    key: str
    """EC2 key pair to log in with."""
    bucket: str
    """S3 bucket that appears as /fsx/data, and takes back what is written there."""
    name: str = "shoal"
    """Name of the cluster."""
    workers: int = 8
    """Maximum number of worker hosts; they are started for a job and stopped after it."""
    worker_instance: str = "p4d.24xlarge"
    """Type of the worker hosts; they have EFA and are in one placement group."""
    helpers: int = 4
    """Maximum number of helper hosts."""
    helper_instance: str = "c5n.18xlarge"
    """Type of the helper hosts."""
    head_instance: str = "m5.2xlarge"
    """Type of the head node, which prepares data and shows TensorBoard."""
    fsx_gb: int = 1200
    """Size of the FSx for Lustre file system: 1200, or a multiple of 2400."""
    spot: bool = False
    """Use spot instances for workers."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            form = _FORMS.get(field.name)
            if form and not re.fullmatch(form, value):
                raise UsageError(f"--{field.name.replace('_', '-')} {value!r} is not of the form {form}")
        if self.workers < 1 or self.helpers < 0:
            raise UsageError(
                f"--workers {self.workers} must be at least 1, --helpers {self.helpers} at least 0"
            )
        if self.fsx_gb != 1200 and (self.fsx_gb < 2400 or self.fsx_gb % 2400):
            raise UsageError(f"--fsx-gb {self.fsx_gb} must be 1200 or a multiple of 2400")


def render(cluster: ParallelCluster) -> str:
    """Return the configuration as YAML."""
    helpers = _QUEUE.format(
        name="helpers",
        instance=cluster.helper_instance,
        count=cluster.helpers,
        capacity="ONDEMAND",
        subnet=cluster.subnet,
        bucket=cluster.bucket,
        gdr="",
    )
    return _CLUSTER.format(
        region=cluster.region,
        subnet=cluster.subnet,
        key=cluster.key,
        bucket=cluster.bucket,
        head=cluster.head_instance,
        fsx_gb=cluster.fsx_gb,
        workers=_QUEUE.format(
            name="workers",
            instance=cluster.worker_instance,
            count=cluster.workers,
            capacity="SPOT" if cluster.spot else "ONDEMAND",
            subnet=cluster.subnet,
            bucket=cluster.bucket,
            gdr=", GdrSupport: true" if cluster.worker_instance.startswith("p") else "",
        ),
        helpers=helpers if cluster.helpers else "",
    )


_CLUSTER = """\
Region: {region}
Image: {{Os: ubuntu2404}}
HeadNode:  # data is prepared here, and TensorBoard runs here: ssh -L 6006:localhost:6006
  InstanceType: {head}
  Networking: {{SubnetId: {subnet}}}
  Ssh: {{KeyName: {key}}}
  LocalStorage: {{RootVolume: {{Size: 100, Encrypted: true}}}}
  Iam: {{S3Access: [{{BucketName: {bucket}, EnableWriteAccess: true}}]}}
Scheduling:
  Scheduler: slurm
  SlurmSettings:
    ScaledownIdletime: 10
    CustomSlurmSettings: [{{PreemptType: preempt/partition_prio}}, {{PreemptMode: REQUEUE}}]
  SlurmQueues:
{workers}{helpers}SharedStorage:
- Name: fsx
  StorageType: FsxLustre
  MountDir: /fsx
  FsxLustreSettings:
    StorageCapacity: {fsx_gb}
    DeploymentType: PERSISTENT_2
    PerUnitStorageThroughput: 250
    DataCompressionType: LZ4
    DeletionPolicy: Retain  # runs and checkpoints outlive the cluster
    DataRepositoryAssociations:
    - Name: data
      FileSystemPath: /data
      DataRepositoryPath: s3://{bucket}
      BatchImportMetaDataOnCreate: true
      AutoImportPolicy: [NEW, CHANGED, DELETED]
      AutoExportPolicy: [NEW, CHANGED, DELETED]
"""

_QUEUE = """\
  - Name: {name}
    CapacityType: {capacity}
    ComputeResources:
    - Name: {name}
      Instances: [{{InstanceType: {instance}}}]
      MinCount: 0
      MaxCount: {count}
      Efa: {{Enabled: true{gdr}}}
    Networking: {{SubnetIds: [{subnet}], PlacementGroup: {{Enabled: true}}}}
    Iam: {{S3Access: [{{BucketName: {bucket}}}]}}
"""
