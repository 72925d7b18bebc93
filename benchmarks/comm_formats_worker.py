"""One worker of ``comm_formats``: trains under DDP, its gradients in one format after the other.

Its spec: ``{"model": "albert-base", "sequence": 8, "repeats": 5}``. One group of backend shoal, with
servers on the workers' hosts, serves all formats.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from benchmarks.comm_worker import with_groups
from benchmarks.ddp_emulated_worker import COMPUTATION, batch_of, build
from benchmarks.ddp_training import Training
from shoal.bench.collectives import Groups
from shoal.bench.comm_options import COLOCATED
from shoal.comm.hooks import EightBitWire, bf16_wire

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


@with_groups(COLOCATED)
def measure(spec: dict[str, Any], groups: Groups) -> dict[str, Any]:
    """Return seconds and sent bytes of each step by format, and the number of weights."""
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
    return {
        "samples": {name: groups.largest(seconds) for name, seconds in samples.items()},
        "sent": {name: groups.largest(counts) for name, counts in sent.items()},
        "count": sum(p.numel() for p in training.ddp.parameters()),
    }
