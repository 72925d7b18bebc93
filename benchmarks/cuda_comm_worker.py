"""One worker of ``cuda_comm``: a host of its own that shares the GPU with the others."""

from __future__ import annotations

import gzip
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shoal.comm
from shoal.comm.d2h_pipeline import ChunkTiming
from shoal.comm.memory_device import MemoryDevice

_NS_PER_US = 1e3


class Worker:
    """Trains a stack of linear layers over a group of two hosts, whole or in parts."""

    def __init__(self, spec: dict[str, Any], rank: int) -> None:
        self.device = torch.device("cpu" if spec["device"] == "memory" else "cuda")
        if spec["device"] == "memory":
            group: Any = dist.group.WORLD
            group.devices["cpu"] = lambda _: MemoryDevice()
        torch.manual_seed(rank)
        width = spec["width"]
        layers = [nn.Linear(width, width, bias=False) for _ in range(spec["layers"])]
        self.module = DistributedDataParallel(
            nn.Sequential(*layers).to(self.device), bucket_cap_mb=spec["bucket_mb"]
        )
        self.batch = torch.randn(spec["batch"], width, device=self.device)

    def step(self) -> None:
        """Forward, backward and averaging."""
        self.module.zero_grad(set_to_none=False)
        self.module(self.batch).square().mean().backward()

    def compute(self) -> None:
        with self.module.no_sync():
            self.step()

    def average(self, pieces: list[Tensor]) -> None:
        works: list[Any] = [dist.all_reduce(piece, async_op=True) for piece in pieces]
        for work in works:
            work.wait()

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, call: Any) -> float:
        self.finish()
        dist.barrier()
        begin = time.perf_counter()
        call()
        self.finish()
        return time.perf_counter() - begin


def measure(worker: Worker, spec: dict[str, Any]) -> dict[str, list[float]]:
    bucket = int(spec["bucket_mb"] * 2**20) // 4
    count = sum(parameter.numel() for parameter in worker.module.parameters())
    pieces = [torch.zeros(min(bucket, count - at), device=worker.device) for at in range(0, count, bucket)]
    calls = {"step": worker.step, "compute": worker.compute, "average": lambda: worker.average(pieces)}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(spec["repeats"] + 2):
        for name, call in calls.items():
            seconds = worker.seconds(call)
            if repeat >= 2:
                samples[name].append(seconds)
    return samples


def write_trace(worker: Worker, path: Path) -> None:
    """Profile a step and add the chunk timings of the copy pipeline."""
    group: Any = dist.group.WORLD
    pipeline = next(iter(group._resources.device_groups.values())).pipeline
    pipeline.timings = timings = []
    activities = [torch.profiler.ProfilerActivity.CPU]
    if worker.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        worker.step()
        worker.finish()
    pipeline.timings = None
    profile.export_chrome_trace(str(path))
    add_chunks(path, timings)


def add_chunks(path: Path, timings: list[ChunkTiming]) -> None:
    """Add rows to a Chrome trace of torch's profiler, whose times count from ``baseTimeNanoseconds``."""
    raw = path.read_bytes()
    trace = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    base = trace.get("baseTimeNanoseconds", 0)
    for chunk in timings:
        for row, begin, end in (
            ("from the device", chunk.begun, chunk.submitted),
            ("over the network", chunk.submitted, chunk.summed),
        ):
            trace["traceEvents"].append(
                {
                    "ph": "X", "pid": "shoal", "tid": row, "name": f"{chunk.name} {chunk.index}",
                    "ts": (begin - base) / _NS_PER_US, "dur": (end - begin) / _NS_PER_US,
                }
            )  # fmt: skip
    path.write_text(json.dumps(trace), encoding="utf-8")


def main() -> None:
    spec, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    rank = int(os.environ["RANK"])
    shoal.comm.register()
    dist.init_process_group("shoal")
    worker = Worker(spec, rank)
    samples = measure(worker, spec)
    if spec["trace"] and rank == 0:
        write_trace(worker, Path(spec["trace"]))
    elif spec["trace"]:
        worker.step()
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, samples)
    if rank == 0:  # the slowest counts
        slowest = {
            name: [max(each) for each in zip(*(s[name] for s in everybody), strict=True)] for name in samples
        }
        out.write_text(json.dumps(slowest))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
