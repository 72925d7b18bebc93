"""Mistakes that ParallelCluster finds in the configuration that is written for it."""

from __future__ import annotations

from typing import Any

COMMON: dict[str, Any] = {
    "region": "us-east-1", "subnet": "subnet-0123456789abcdef0", "key": "key", "bucket": "my-data",
}  # fmt: skip

Path = tuple[str | int, ...]

MISTAKES: list[tuple[Path, Any]] = [
    (("SharedStorage", 0, "FsxLustreSettings", "DeploymentType"), "PERSISTENT_9"),
    (("SharedStorage", 0, "FsxLustreSettings", "AutoImportPolic"), "NEW"),
    (("SharedStorage", 0, "MountDir"), None),
    (("Scheduling", "SlurmQueues", 0, "ComputeResources", 0, "Efa"), {"Enable": True}),
    (("Scheduling", "SlurmQueues", 0, "CapacityType"), "SPOTT"),
    (("Scheduling", "SlurmQueues", 1, "Networking", "PlacementGroup"), {"Enabled": "yes?"}),
    (("HeadNode", "Networking"), {"Subnet": "x"}),
    (("Image", "Os"), "debian"),
]
"""Places in the configuration and wrong values, which the schema refuses."""

UNSOUND: list[tuple[Path, Any, str]] = [
    (("SharedStorage", 0, "FsxLustreSettings", "StorageCapacity"), 1_300, "FsxStorageCapacityValidator"),
    (
        ("Scheduling", "SlurmQueues", 1, "ComputeResources", 0, "Instances"),
        [{"InstanceType": "m5.2xlarge"}],
        "InstancesEFAValidator",
    ),
]
"""Places, values that the schema takes, and the validators that refuse them."""
