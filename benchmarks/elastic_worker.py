"""One worker of ``elastic``: trains a small model in a crew, and may kill itself or come late."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore

from shoal.train.crew import Crew

SAMPLES, STEPS_AT_END = 24, 50


def train(spec: dict[str, Any]) -> dict[str, Any]:
    """Train some steps with ``size_at_end`` members; return when each step ended, and its members' number.

    The spec: ``{"rank": 0, "size": 4, "size_at_end": 3, "dies_at": 0, "starts_at": 0, "width": 256}``. A
    worker that dies writes the time before; one with ``starts_at`` begins when the others are at that step.
    """
    torch.set_num_threads(1)
    folder = Path(spec["folder"])
    store = FileStore(str(folder / "store"), -1)
    dist.init_process_group(
        "shoal",
        store=store,
        rank=spec["rank"],
        world_size=spec["size"],
        timeout=timedelta(seconds=60),
        enable_reconfigure=True,
    )
    if spec["starts_at"]:
        store.get(f"bench/{spec['starts_at']}")
    width = spec["width"]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    crew = Crew({"model": model}, optimizer, patience_s=30)
    ddp = crew.data_parallel(model)
    ends = []
    for step in crew.steps(until=1_000_000):
        with step:
            store.set(f"bench/{step.number}", "1")
            if step.number == spec["dies_at"]:
                (folder / "died").write_text(repr(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            inputs = torch.randn(SAMPLES, width, generator=torch.Generator().manual_seed(step.number))
            begin, end = crew.share(SAMPLES)
            (ddp(inputs[begin:end]).square().mean(1).sum() * crew.size / SAMPLES).backward()
        if step.is_done:
            ends.append(time.time())
        if [size for _, size in crew.history].count(spec["size_at_end"]) == STEPS_AT_END:
            break
    dist.barrier()
    dist.destroy_process_group()
    died = folder / "died"
    return {
        "ends": ends,
        "sizes": [size for _, size in crew.history],
        "died": float(died.read_text()) if died.exists() else None,
    }
