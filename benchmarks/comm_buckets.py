"""A step's gradients over many emulated hosts, in buckets of several sizes."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.worker import run_on_hosts
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
    with Cluster(hosts=num_hosts, nic=nic) as cluster:
        spec = {
            "addresses": [cluster.address(host) for host in range(num_hosts)],
            "workers_per_host": workers_per_host,
            "total_bytes": total_bytes,
            "bucket_bytes": list(bucket_bytes),
            "repeats": repeats,
        }
        samples: list[list[float]] = run_on_hosts(cluster, "benchmarks.comm_buckets_worker:measure", spec)
    return samples
