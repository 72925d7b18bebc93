"""Reads ranges of an object over HTTP by boto3 (shoal's way to S3), obstore and fsspec.

The object store stands in for S3 in a process of its own on this host, and its Python is most of the time
that passes; what tells the libraries apart is the processor time of the reader, by range.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.harness import Benchmark, peer_module
from shoal.data.objects import DEADLINE_S
from shoal.data.objects_obstore import ObstoreObjects
from shoal.data.objects_s3 import S3Objects

OBJECT_BYTES = 2_000_000
RANGE_BYTES = 110_000
"""An image of ImageNet."""
THREADS = 8
Read = Callable[[int], bytes]


def readers(url: str) -> dict[str, Read]:
    """Return what reads the range from an offset on, by library."""
    boto3 = S3Objects("s3://bucket/set", DEADLINE_S)
    settings = {"endpoint": url, "region": "us-east-1", "virtual_hosted_style_request": False}
    obstore = ObstoreObjects("s3://bucket/set", DEADLINE_S, **settings)
    web = peer_module("fsspec").filesystem("http")
    return {
        "boto3": lambda start: boto3.get("object", start, RANGE_BYTES),
        "obstore": lambda start: obstore.get("object", start, RANGE_BYTES),
        "fsspec": lambda start: bytes(
            web.cat_file(f"{url}/bucket/set/object", start=start, end=start + RANGE_BYTES)
        ),
    }


def measure(read: Read, starts: list[int], expected: bytes) -> tuple[float, float]:
    """Return the ms of this process's processors by range, and the ms that passed."""
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(read, starts[:THREADS]))  # opens connections
        began, busy = time.perf_counter(), time.process_time()
        parts = list(pool.map(read, starts))
        busy, passed = time.process_time() - busy, time.perf_counter() - began
    assert all(
        part == expected[start : start + RANGE_BYTES] for part, start in zip(parts, starts, strict=True)
    )
    return 1e3 * busy / len(starts), 1e3 * passed / len(starts)


def main() -> None:
    """Measure, and exit with 1 if a target does not hold."""
    bench = Benchmark("object_ranges", options=argparse.ArgumentParser(add_help=False))
    repeats, count = (5, 200) if bench.args.quick else (11, 500)
    draw = np.random.default_rng(1)
    data = draw.bytes(OBJECT_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "object").write_bytes(data)
        argv = [sys.executable, "-m", "benchmarks.object_store", folder]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as store:
            assert store.stdout is not None
            url = store.stdout.readline().strip()
            threading.Thread(target=store.stdout.read, daemon=True).start()  # its lines
            os.environ |= {"AWS_ENDPOINT_URL": url, "AWS_EC2_METADATA_DISABLED": "true", "NO_PROXY": "*"}
            os.environ |= dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "made")
            by_library = readers(url)
            busy: dict[str, list[float]] = {name: [] for name in by_library}
            passed: dict[str, list[float]] = {name: [] for name in by_library}
            for _ in range(repeats):
                starts = draw.integers(0, OBJECT_BYTES - RANGE_BYTES, count).tolist()
                for name, read in by_library.items():
                    one, other = measure(read, starts, data)
                    busy[name].append(one)
                    passed[name].append(other)
            store.terminate()
    for peer in ("obstore", "fsspec"):
        for what, times in (("processor time by range", busy), ("time by range", passed)):
            bench.add(
                f"{what}, boto3 and {peer}", unit="ms", ours=times["boto3"], peer=times[peer], peer_name=peer
            )
    raise SystemExit(bench.finish())


if __name__ == "__main__":
    main()
