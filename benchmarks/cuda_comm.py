"""Cost of a GPU's gradients on their way through the host's memory.

A tensor goes to the host chunk by chunk and comes back, without a network in between; the peer is
what one would write by hand: one copy to pinned memory, and one back. Overlap: two processes, as two hosts,
train on the one GPU over TCP of this machine; the peer is computation and averaging one after the other. Such
a row says that the copies run beside the backward pass; the network is this machine's memory.

``--device memory`` tries the benchmark without a GPU: its figures say nothing about one.
"""

from __future__ import annotations

import argparse
import gzip
import json
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Benchmark
from benchmarks.memory_device import MemoryDevice
from benchmarks.worker import run_here
from shoal.comm.collectives import collective
from shoal.comm.cuda_device import CudaDevice
from shoal.comm.devices import Device
from shoal.comm.engine import EngineOptions, SingleProcessEngine
from shoal.comm.routes import flat_route
from shoal.comm.staging import DeviceWork, Staging, Transfer
from shoal.env.settings import NATIVE_GROUP

MIB = 1 << 20
SIZES_MIB = (1, 25, 256)
HOSTS = ("one", "other")
OVERLAP_TARGET = 0.5
LIMITS = {"events": 2, "waits": 1}
STAGING_TARGET = 0.9
"""of a plain copy's bandwidth; both directions at once may give more than 1"""
MODEL = {"width": 4096, "layers": 8, "batch": 16384, "bucket_mb": 64}
SMALL_MODEL = {"width": 256, "layers": 4, "batch": 256, "bucket_mb": 0.25}


class _NoFailure:
    """A group that cannot fail."""

    def error(self) -> None:
        return None

    def abort(self, reason: str) -> None:
        raise RuntimeError(reason)

    def explain(self, problem: Exception) -> Exception:
        return problem


def staged_and_back(
    staging: Staging, device: Device, engine: SingleProcessEngine, tensor: torch.Tensor
) -> None:
    operation = collective("all_reduce", tensor, tensor)
    work = DeviceWork(device, "all_reduce", [tensor], _NoFailure(), lambda: None)
    staging.begin(
        Transfer(
            route=flat_route(operation, engine, 0, 1),
            ready=device.current_stream().record_event(),
            timeout_s=60, work=work, on_end=lambda: None,
        )
    )  # fmt: skip
    work.wait(timedelta(seconds=60))
    device.current_stream().record_event().synchronize()


def add_staging(bench: Benchmark, device: Device) -> None:
    options, engine = EngineOptions(), SingleProcessEngine()
    staging = Staging(
        device, _NoFailure(), num_buffers=options.staging_buffers, buffer_bytes=options.staging_bytes
    )
    for size in SIZES_MIB[:1] if bench.args.device == "memory" else SIZES_MIB:
        tensor = torch.zeros(size * MIB // 4, device=device.torch_device)
        pinned = torch.empty(size * MIB // 4, pin_memory=bench.args.device == "cuda")

        def plain(tensor: torch.Tensor = tensor, pinned: torch.Tensor = pinned) -> None:
            pinned.copy_(tensor, non_blocking=True)
            tensor.copy_(pinned, non_blocking=True)
            device.current_stream().record_event().synchronize()

        bench.compare(
            f"{size} MiB to the host and back",
            ours=partial(staged_and_back, staging, device, engine, tensor),
            peer=plain,
            peer_name="a pinned copy each way",
            target=STAGING_TARGET if size >= 25 else None,
        )
    counts = staging.lane.counters()
    for case, count in (("events recorded", "events"), ("waits of the host for an event", "waits")):
        bench.limit(
            f"{case}, for each chunk", counts[count] / counts["chunks"], LIMITS[count], unit="",
            formula="one for each copy" if count == "events" else "for the copy to the host",
        )  # fmt: skip
    staging.stop()
    device.close()


def overlap_of_trace(events: list[dict[str, Any]]) -> float | None:
    """Return the share of the copies' time during which a kernel runs; ``None`` without copies.

    Args:
        events: of a trace that torch's profiler wrote.
    """

    def spans(category: str) -> list[tuple[float, float]]:
        """Return the times of a category, joined where they overlap."""
        found = sorted(
            (each["ts"], each["ts"] + each["dur"]) for each in events if each.get("cat") == category
        )
        joined: list[tuple[float, float]] = []
        for begin, end in found:
            if joined and begin <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(joined[-1][1], end))
            else:
                joined.append((begin, end))
        return joined

    copies, kernels = spans("gpu_memcpy"), spans("kernel")
    total = sum(end - begin for begin, end in copies)
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in copies for b in kernels)
    return both / total if total else None


def add_trace(bench: Benchmark, path: Path) -> None:
    """Add the overlap of copies and kernels in a trace, which only one of a GPU has."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        share = overlap_of_trace(json.load(file)["traceEvents"])
    if share is not None:
        bench.limit(
            "copies beside kernels, in a trace", share, OVERLAP_TARGET, unit="of their time", formula="half",
            better="higher",
        )  # fmt: skip


def add_overlap(bench: Benchmark) -> None:
    memory = bench.args.device == "memory"
    spec = (SMALL_MODEL if memory else MODEL) | {
        "device": bench.args.device,
        "repeats": 3 if bench.quick else 10,
        "trace": str(bench.args.trace.absolute()) if bench.args.trace else "",
    }
    # Only the group in Python can be given a device that is none.
    settings = {NATIVE_GROUP: "0"} if memory else {}
    samples: dict[str, list[float]] = run_here(
        "benchmarks.cuda_comm_worker:train", spec, len(HOSTS), settings=settings, hosts=HOSTS
    )
    bench.add(
        f"a step of {spec['layers']} layers of {spec['width']}², two hosts on this device",
        ours=[1e3 * s for s in samples["step"]],
        peer=[1e3 * (c + a) for c, a in zip(samples["compute"], samples["average"], strict=True)],
        peer_name="computation, then averaging",
        unit="ms",
    )
    if bench.args.trace:
        add_trace(bench, bench.args.trace)


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--device", choices=("cuda", "memory"), default="cuda")
    options.add_argument(
        "--trace", type=Path, metavar="FILE", help="write torch's profile of a step for chrome://tracing"
    )
    bench = Benchmark("cuda_comm", options=options)
    if bench.args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "cuda_comm measures copies to and from a GPU, and torch finds no CUDA device here; "
            "--device memory tries the benchmark itself"
        )
    device = MemoryDevice() if bench.args.device == "memory" else CudaDevice(torch.device("cuda"))
    add_staging(bench, device)
    add_overlap(bench)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
