"""One worker of ``plan_emulated``: what a step takes with each backend, and what the planner is given.

Its spec: ``{"cases": [["even", 1]], "backends": {"gloo": null, "shoal": 0, "8 helpers": 8}, "repeats":
5}``: models with the MiB of their buckets; a number says how many helper hosts a shoal group uses.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.comm_worker import samples_of, shoal_group, with_groups
from benchmarks.ddp_training import Training
from shoal.bench.collectives import Case, Groups, prepare

BATCH = 32
COMPUTATION = "computation"
"""The name of the samples of steps without averaging."""
_SMALL = 256
"""Elements of the all-reduces that show the latency of hops."""
_STREAM = 4 << 20
"""Elements of the vectors that show the memory's rate."""


class Perceptron(nn.Module):
    """Linear layers of the given widths with ReLU between them; returns a loss."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in itertools.pairwise(widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


def even() -> tuple[nn.Module, dict[str, torch.Tensor], int]:
    """Twelve equal layers, 12.6 MB: the backward pass releases bucket after bucket."""
    return Perceptron(*[512] * 13), {"x": torch.zeros(BATCH, 512)}, BATCH


def front() -> tuple[nn.Module, dict[str, torch.Tensor], int]:
    """A first layer as large as the six others, 12.6 MB: half of the gradients is ready only at the end."""
    return Perceptron(3072, *[512] * 7), {"x": torch.zeros(BATCH, 3072)}, BATCH


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, torch.Tensor], int]]] = {
    "even": even,
    "front": front,
}


class Busy:
    """Share of all processors that were busy, by what went on."""

    def __init__(self) -> None:
        self.shares: dict[str, list[float]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        busy, total = _ticks()
        yield
        busy_then, total_then = _ticks()
        share = (busy_then - busy) / max(total_then - total, 1)
        self.shares.setdefault(name, []).append(share)


def _ticks() -> tuple[int, int]:
    """Return ticks of all processors that were busy, and all."""
    words = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    user, nice, system, idle, iowait, irq, softirq, steal = map(int, words)
    busy = user + nice + system + irq + softirq + steal
    return busy, busy + idle + iowait


def memory_bytes_per_s(groups: Groups, repeats: int = 5) -> float:
    """Return a worker's memory rate in an optimizer's step, while all workers take one (the slowest's)."""
    weights, gradients = torch.zeros(_STREAM), torch.zeros(_STREAM)
    seconds = []
    for _ in range(repeats):
        groups.barrier()
        begin = time.perf_counter()
        weights.add_(gradients, alpha=-1e-3)
        seconds.append(time.perf_counter() - begin)
    return 3 * 4 * _STREAM / sorted(groups.largest(seconds))[repeats // 2]


def measure_case(
    name: str,
    bucket_mib: float,
    backends: dict[str, dist.ProcessGroup],
    groups: Groups,
    repeats: int,
) -> dict[str, Any]:
    """Return samples in seconds and the busy shares of a model's steps."""
    torch.manual_seed(0)
    model, inputs, _ = MODELS[name]()
    draw = torch.Generator().manual_seed(groups.rank)
    inputs = {key: torch.randn(value.shape, generator=draw) for key, value in inputs.items()}

    def loss(ddp: nn.Module) -> torch.Tensor:
        value: torch.Tensor = ddp(**inputs)
        return value

    training = Training(model, loss, groups, bucket_cap_mb=bucket_mib)
    busy = Busy()
    group_of: dict[str, dist.ProcessGroup | None] = {**backends, COMPUTATION: None}
    for group in group_of.values():  # after the first step DDP rebuilds its buckets; connections are made
        training.group = group
        training.step()
    samples = training.samples_of(group_of, repeats, busy)
    training.check()
    return {"samples": samples, "busy": busy.shares}


@with_groups("gloo")
def measure(spec: dict[str, Any], groups: Groups) -> dict[str, Any]:
    """Return the latency of small all-reduces, the memory's rate, and samples of each case's steps."""
    backends = {
        name: groups.of_backend["gloo"] if num_helpers is None else shoal_group(num_helpers)
        for name, num_helpers in spec["backends"].items()
    }
    small = Case(collective="all_reduce", num_elements=_SMALL, num_bytes=4 * _SMALL)
    calls = {name: prepare(small, group, torch.float32, name) for name, group in backends.items()}
    small_s, _ = samples_of(calls, groups, spec["repeats"])
    return {
        "small_s": small_s,
        "memory_bytes_per_s": memory_bytes_per_s(groups),
        "cases": [
            measure_case(name, bucket_mib, backends, groups, spec["repeats"])
            for name, bucket_mib in spec["cases"]
        ],
    }
