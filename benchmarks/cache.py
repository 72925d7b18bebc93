"""Eight emulated hosts read images for two epochs from an object store behind 100 Mbit/s.

Each host reads its part of each epoch's shuffled images through a cache in memory: with peers, each for
itself, and without a cache, which gives the images to compare. The store stands in for S3 on a host of its
own, whose link is limited to 100 Mbit/s, and counts the bytes that it sends. Bytes of the second epoch come
from memory; they are compared with the same shards in a local folder.

In two further runs a host is killed with its server, in the middle of the first and of the second epoch. At
last the hosts sum gradients by backend shoal over links of 500 Mbit/s, without reads and beside those of the
first epoch with peers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark
from benchmarks.worker import command
from shoal.data.images.manifest import ImageManifest
from shoal.data.images.shards import ImageShardWriter
from shoal.env.settings import HELPERS
from shoal.launch.emulated import Cluster

HOSTS, NUM_SHARDS = 8, 48
DATA_BYTES, QUICK_DATA_BYTES = 1_000_000_000, 100_000_000
IMAGE_BYTES = 100_000
STORE_PORT, LOCATION = 9000, "s3://bucket/set"
DEADLINE_S = 2_400.0
SPEC: dict[str, Any] = {
    "backend": "gloo",
    "cache": "",
    "peers": False,
    "epochs": 2,
    "local": "",
    "killed": None,
}


def prepare(folder: Path, num_bytes: int) -> int:
    """Write shards of random images of some 100 kB; return the bytes of all files."""
    folder.mkdir()
    draw, shards = np.random.default_rng(1), []
    for shard in range(NUM_SHARDS):
        with ImageShardWriter(folder, f"train-{shard:05d}") as writer:
            for image in range(num_bytes // IMAGE_BYTES // NUM_SHARDS):
                data = draw.bytes(int(draw.integers(IMAGE_BYTES // 2, IMAGE_BYTES * 3 // 2)))
                writer.add(f"{shard}-{image}", data, width=8, height=8, label=0)
            shards.append(writer.finish())
    ImageManifest(classes=("only",), source="random", splits={"train": tuple(shards)}).save(folder)
    return sum(path.stat().st_size for path in folder.iterdir())


class Store:
    """The object store on the emulated host behind the slow link; counts what it has sent."""

    def __init__(self, cluster: Cluster, data: Path) -> None:
        argv = [sys.executable, "-m", "benchmarks.object_store", str(data)]
        address = cluster.plan[HOSTS].address
        argv += ["--address", address, "--port", str(STORE_PORT)]
        self.process = cluster.start(HOSTS, argv, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        self.sent = 0
        threading.Thread(target=self._count, daemon=True).start()

    def _count(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.sent += int(line.split()[1])

    def environment(self) -> dict[str, str]:
        """Return the variables by which boto3 finds the store."""
        keys = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "made")
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "*",
            HELPERS: "",
            **keys,
        }


def run(
    cluster: Cluster, store: Store, work: str = "read", **changes: Any
) -> tuple[list[dict[str, Any]], int]:
    """Work on all hosts; return the results of those that end, by rank, and the bytes the store has sent."""
    before = store.sent
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        spec = {**SPEC, **changes}
        if spec["cache"]:
            spec["cache"] = memory
        argv = command(f"benchmarks.cache_worker:{work}", spec, Path(folder) / "out.json")
        log = (Path(folder) / "log").open("w+")
        workers = cluster.start_workers(argv, env=store.environment(), outputs=lambda rank: (log, log))
        codes = [worker.wait(DEADLINE_S) for worker in workers]
        lost = [HOSTS - 1] if spec["killed"] is not None else []
        if any(code for rank, code in enumerate(codes) if rank not in lost):
            log.seek(0)
            raise SystemExit(f"workers ended with {codes}:\n{log.read()[-4000:]}")
        log.seek(0)
        said = [line for line in log.read().splitlines() if line.startswith(("shards of", "cache "))]
        print(*said[:20], sep="\n", flush=True)
        files = [Path(folder) / f"{rank}.json" for rank in range(HOSTS) if rank not in lost]
        return [json.loads(file.read_text()) for file in files], store.sent - before


def hashes(results: list[dict[str, Any]]) -> list[list[str]]:
    """Return the hashes of each host's epochs."""
    return [result["hashes"] for result in results]


def first_epoch_s(results: list[dict[str, Any]]) -> float:
    return float(max(result["seconds"][0] for result in results))


def compare(bench: Benchmark, cluster: Cluster, data: Path, num_bytes: int) -> None:
    """Run all cases and add their rows."""
    store = Store(cluster, data)
    shared: Mapping[str, Any] = {"location": LOCATION, "cache_bytes": 2 * num_bytes, "repeats": 5}
    plain, _ = run(cluster, store, **shared, epochs=2)
    print("read without a cache", flush=True)
    together, sent = run(cluster, store, **shared, cache="yes", peers=True, local=str(data))
    bench.limit(
        "bytes sent by the store, with peers",
        sent / num_bytes,
        1.02,
        unit="x data",
        formula="once",
    )
    same = float(hashes(together) == hashes(plain))
    bench.limit("batches equal to those without a cache", same, 1.0, unit="", formula="all", better="higher")
    alone, sent_alone = run(cluster, store, **shared, cache="yes")
    print(f"each host for itself: {sent_alone / num_bytes:.2f} x the data sent", flush=True)
    bench.add(
        "first epoch",
        unit="s",
        ours=[first_epoch_s(together)],
        peer=[first_epoch_s(alone)],
        peer_name="each host for itself",
        target=5.0,
    )
    bench.add(
        "epoch from the cache",
        unit="s",
        ours=together[0]["cached_s"],
        peer=together[0]["local_s"],
        peer_name="local folder",
        target=1 / 1.05,
    )
    for epoch in range(2):
        killed, sent = run(cluster, store, **shared, cache="yes", peers=True, killed=epoch)
        again = max(0.0, sent / num_bytes - 1) * HOSTS
        bench.limit(
            f"read again, a host killed in epoch {epoch}",
            again,
            1.1,
            unit="x data/hosts",
            formula="its own",
        )
        same = float(hashes(killed) == hashes(plain)[: HOSTS - 1])
        bench.limit(
            f"batches of the others, of epoch {epoch}",
            same,
            1.0,
            unit="",
            formula="all",
            better="higher",
        )


def compare_sums(bench: Benchmark, data: Path, num_bytes: int) -> None:
    """Add the row of sums, on links that this machine's processors can fill."""
    with Cluster(hosts=HOSTS, helpers=1, nic="500mbit", helper_nic="100mbit") as cluster:
        found, _ = run(
            cluster,
            Store(cluster, data),
            "exchange",
            location=LOCATION,
            cache_bytes=2 * num_bytes,
            backend="shoal",
            cache="yes",
            peers=True,
        )
    bench.add(
        "sum of a gradient, the first epoch read beside it",
        unit="s",
        ours=found[0]["beside"],
        peer=found[0]["alone"],
        peer_name="without reads",
        target=1 / 1.05,
    )


def main() -> None:
    """Measure, and exit with 1 if a target does not hold."""
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--bytes", type=int, help="of the data; default: 1e9, 1e8 with --quick")
    bench = Benchmark("cache", options=options)
    num_bytes = bench.args.bytes or (QUICK_DATA_BYTES if bench.args.quick else DATA_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        size = prepare(data, num_bytes)
        with Cluster(hosts=HOSTS, helpers=1, nic="1gbit", helper_nic="100mbit") as cluster:
            compare(bench, cluster, data, size)
        compare_sums(bench, data, size)
    raise SystemExit(bench.finish())


if __name__ == "__main__":
    main()
