"""Writes the configuration of a Slurm cluster for AWS ParallelCluster 3, with a shared file system."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.launch.aws_cluster import AwsCluster

CONFIGURATION = "cluster.yaml"


@dataclass(frozen=True, kw_only=True)
class ParallelCluster(AwsCluster):
    """A Slurm cluster to be made; its hosts are started for a job and stopped after it."""

    head_instance: str = "m5.2xlarge"
    """Type of the head node, which prepares data and runs TensorBoard."""


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
      AutoExportPolicy: [NEW, CHANGED]  # rm on /fsx/data leaves the bucket as it is
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
