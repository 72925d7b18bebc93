"""One worker of ``cuda_comm``: a host of its own that shares the GPU with the others."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shoal.comm
from benchmarks.memory_device import MemoryDevice


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
    """Profile a step, in which the chunks' copies run beside the backward pass."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if worker.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        worker.step()
        worker.finish()
    profile.export_chrome_trace(str(path))


def train(spec: dict[str, Any]) -> dict[str, list[float]]:
    """Return the slowest rank's seconds of a step, of its computation, and of averaging."""
    shoal.comm.register()
    dist.init_process_group("shoal")
    rank = dist.get_rank()
    worker = Worker(spec, rank)
    samples = measure(worker, spec)
    if spec["trace"] and rank == 0:
        write_trace(worker, Path(spec["trace"]))
    elif spec["trace"]:
        worker.step()
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, samples)
    dist.destroy_process_group()
    return {name: [max(each) for each in zip(*(s[name] for s in everybody), strict=True)] for name in samples}
