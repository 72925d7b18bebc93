"""One worker of ``comm_formats``: trains under DDP, its gradients in one format after the other.

    python -m benchmarks.comm_formats_worker SPEC OUT

SPEC is JSON: ``{"model": "albert-base", "sequence": 8, "repeats": 5}``. One group of backend shoal, with
servers beside the workers, serves all formats.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from benchmarks.ddp_emulated_worker import COMPUTATION, batch_of, build
from benchmarks.ddp_training import Training
from shoal.bench.collectives import Groups
from shoal.bench.comm_options import COLOCATED
from shoal.comm.hooks import EightBitWire, bf16_wire
from shoal.env.launcher import worker_env

FORMATS = ("fp32", "bf16", "int8")
_INTERFACE = "eth0"
_FIELD_SENT = 8
"""Bytes sent among the figures of an interface in /proc/net/dev."""


def wire_bytes() -> int:
    """Return the bytes that this host has sent, headers and acknowledgements included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == _INTERFACE:
            return int(figures.split()[_FIELD_SENT])
    raise SystemExit(f"this host has no interface {_INTERFACE}: run it on emulated hosts")


def main() -> None:
    spec: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    place = worker_env()
    assert place is not None
    groups = Groups(place, (COLOCATED,))
    draw = torch.Generator().manual_seed(groups.rank)

    def loss(model: nn.Module) -> torch.Tensor:
        value: torch.Tensor = model(**batch_of(spec["model"], spec["sequence"], draw)).loss
        return value

    training = Training(build(spec["model"]), loss, groups)
    group = training.group = groups.of_backend[COLOCATED]
    hooks: dict[str, Callable[..., Any]] = {
        "fp32": default_hooks.allreduce_hook,
        "bf16": bf16_wire,
        "int8": EightBitWire(training.ddp.module.named_parameters(), group),
    }
    samples: dict[str, list[float]] = {name: [] for name in (*FORMATS, COMPUTATION)}
    sent: dict[str, list[float]] = {name: [] for name in FORMATS}
    training.step()  # after the first step DDP rebuilds its buckets
    for turn in range(-1, spec["repeats"]):  # the first turn only makes buffers
        for name in samples if turn % 2 == 0 else reversed(samples):
            training.group = None if name == COMPUTATION else group
            training.hook = hooks.get(name, default_hooks.allreduce_hook)
            before = wire_bytes()
            seconds = training.step()
            groups.barrier()
            if turn >= 0:
                samples[name].append(seconds)
                if name in sent:
                    sent[name].append(wire_bytes() - before)
    training.group = group
    training.check()
    result = {
        "samples": {name: groups.largest(seconds) for name, seconds in samples.items()},
        "sent": {name: groups.largest(counts) for name, counts in sent.items()},
        "count": sum(p.numel() for p in training.ddp.parameters()),
    }
    if groups.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(result))
    groups.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
