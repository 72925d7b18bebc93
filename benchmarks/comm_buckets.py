"""DDP's gradients in its default buckets and in those of the recommended size, over many emulated hosts."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.comm_runs import run_on
from shoal.decide.links import DDP_BUCKET_BYTES, recommended_bucket_bytes
from shoal.launch.emulated import Cluster


@dataclass(frozen=True, kw_only=True)
class BucketSamples:
    """Seconds of all buckets of one step."""

    recommended_bytes: int
    recommended_s: list[float]
    default_s: list[float]


def bucket_samples(
    num_hosts: int, workers_per_host: int, nic: str, total_bytes: int, repeats: int
) -> BucketSamples:
    """Measure both sizes by turns. One process a host: its workers are engines on threads."""
    recommended = recommended_bucket_bytes(num_hosts, ranks_per_host=workers_per_host)
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(hosts=num_hosts, nic=nic) as cluster,
    ):
        spec = {
            "addresses": [cluster.address(host) for host in range(num_hosts)],
            "workers_per_host": workers_per_host,
            "total_bytes": total_bytes,
            "bucket_bytes": [recommended, DDP_BUCKET_BYTES],
            "repeats": repeats,
            "folder": folder,
        }
        run_on(cluster, [sys.executable, "-m", "benchmarks.comm_buckets_worker", json.dumps(spec)])
        ours, peer = json.loads((Path(folder) / "samples").read_text())
    return BucketSamples(recommended_bytes=recommended, recommended_s=ours, default_s=peer)
