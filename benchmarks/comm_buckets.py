"""A step's gradients over many emulated hosts, in buckets of several sizes."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.comm_runs import run_on
from shoal.launch.emulated import Cluster


def bucket_samples(
    num_hosts: int,
    workers_per_host: int,
    nic: str,
    total_bytes: int,
    bucket_bytes: Sequence[int],
    repeats: int,
) -> list[list[float]]:
    """Return the seconds of a step's all-reduces for each size, measured by turns.

    All buckets are submitted at once, as if the backward pass took no time. One process a host: its workers
    are engines on threads.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(hosts=num_hosts, nic=nic) as cluster,
    ):
        spec = {
            "addresses": [cluster.address(host) for host in range(num_hosts)],
            "workers_per_host": workers_per_host,
            "total_bytes": total_bytes,
            "bucket_bytes": list(bucket_bytes),
            "repeats": repeats,
            "folder": folder,
        }
        run_on(cluster, [sys.executable, "-m", "benchmarks.comm_buckets_worker", json.dumps(spec)])
        samples: Any = json.loads((Path(folder) / "samples").read_text())
    return [list(of_size) for of_size in samples]
