"""One host of ``comm_buckets``: an engine for each of its workers, on threads, without torch.

The workers of a host share one array for their gradients and one for the sums, or the memory of this machine
would not do for hundreds of workers; the engines do not know that and move everything.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shoal.comm.engine import Engine, EngineOptions, Operation, Peer
from shoal.decide.server_assignment import chunk_pattern
from shoal.env.secret import job_secret

DEADLINE_S = 300.0
WARM_UP_ELEMENTS = 1 << 20


class Worker:
    """One rank."""

    def __init__(self, rank: int, spec: dict[str, Any], secret: bytes) -> None:
        self.rank = rank
        self.hosts = [h for h in range(len(spec["addresses"])) for _ in range(spec["workers_per_host"])]
        self.engine = Engine(
            rank=rank,
            size=len(self.hosts),
            group="buckets",
            secret=secret,
            address=spec["addresses"][self.hosts[rank]],
            options=EngineOptions(),
        )

    def connect(self, records: list[dict[str, Any]]) -> None:
        names = [f"host{host}" for host in self.hosts]
        peers = [Peer(**record) for record in records]
        self.engine.connect(
            peers,
            [],
            chunk_pattern(names),
            segment=f"shoal-buckets-{records[0]['pid']}",
            timeout_s=DEADLINE_S,
        )

    def submit(self, kind: str, input: Any, output: Any, *, op: str = "sum") -> int:
        asked = Operation(
            kind=kind,
            input=input.ctypes.data,
            output=output.ctypes.data,
            count=len(input),
            dtype=str(input.dtype),
            op=op,
            timeout_s=DEADLINE_S,
        )
        return self.engine.submit(asked)

    def seconds(self, grads: Any, sums: Any, bucket_bytes: int) -> float:
        """Return the slowest rank's time from a common start until all buckets are summed."""
        nothing = np.empty(0, dtype=np.uint8)
        self.engine.wait(self.submit("barrier", nothing, nothing))
        begin = time.perf_counter()
        step = bucket_bytes // 4
        handles = [
            self.submit("all_reduce", grads[start : start + step], sums[start : start + step])
            for start in range(0, len(grads), step)
        ]
        for handle in handles:
            self.engine.wait(handle)
        took = np.array([time.perf_counter() - begin])
        self.engine.wait(self.submit("all_reduce", took, took, op="max"))
        return float(took[0])


def on_all(workers: list[Worker], what: Callable[[Worker], Any]) -> list[Any]:
    """Call ``what`` on a thread for each worker; return the results, or end if one failed."""
    results: dict[int, Any] = {}

    def run(worker: Worker) -> None:
        results[worker.rank] = what(worker)

    threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(results) < len(workers):
        raise SystemExit("a worker failed")
    return [results[worker.rank] for worker in workers]


def meet(folder: Path, host: int, num_hosts: int, own: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Exchange the ranks' addresses through files: the hosts are emulated and share a file system."""
    (folder / f"{host}.new").write_text(json.dumps(own))
    (folder / f"{host}.new").rename(folder / f"{host}.json")
    until = time.monotonic() + DEADLINE_S
    records = []
    for other in range(num_hosts):
        path = folder / f"{other}.json"
        while not path.exists():
            if time.monotonic() > until:
                raise SystemExit(f"host {other} did not come")
            time.sleep(0.1)
        records += json.loads(path.read_text())
    return records


def measure(spec: dict[str, Any]) -> list[list[float]]:
    """Return the seconds of each size of buckets."""
    host, local = int(os.environ["RANK"]), spec["workers_per_host"]
    secret = job_secret()
    assert secret is not None
    workers = [Worker(host * local + index, spec, secret) for index in range(local)]
    own = [
        {
            "host": f"host{host}",
            "address": spec["addresses"][host],
            "port": worker.engine.port,
            "global_rank": worker.rank,
            "pid": os.getpid(),
        }
        for worker in workers
    ]
    records = meet(Path(spec["folder"]), host, len(spec["addresses"]), own)
    on_all(workers, lambda worker: worker.connect(records))
    grads = np.full(spec["total_bytes"] // 4, 1.0, dtype=np.float32)
    sums = np.zeros_like(grads)
    short = slice(0, WARM_UP_ELEMENTS)
    on_all(workers, lambda worker: worker.seconds(grads[short], sums[short], WARM_UP_ELEMENTS))
    samples: list[list[float]] = [[] for _ in spec["bucket_bytes"]]
    for _ in range(spec["repeats"]):
        for which, bucket_bytes in enumerate(spec["bucket_bytes"]):
            seconds = on_all(
                workers, partial(Worker.seconds, grads=grads, sums=sums, bucket_bytes=bucket_bytes)
            )
            samples[which].append(seconds[0])
    if not (sums == len(records)).all():
        raise SystemExit("wrong sums")
    on_all(workers, lambda worker: worker.engine.close())
    return samples
