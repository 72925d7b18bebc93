"""One worker of ``elastic``: trains a small model in a crew, and may be lost or come late."""

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
from torch._C._distributed_c10d import TCPStore

from shoal.comm.engine import CommError
from shoal.comm.folder_store import FolderStore
from shoal.train.crew import Crew

SAMPLES = 24
_POLL_S = 0.001


def train(spec: dict[str, Any]) -> dict[str, Any]:
    """Train some steps with ``size_at_end`` members; return when each step ended, and its members' number.

    The spec: ``{"rank": 0, "size": 4, "size_at_end": 3, "steps_at_end": 50, "signal_at": 0, "signal": 9,
    "starts_at": 0, "patience_s": 30, "width": 256, "store_port": 0, "waits_at": 0}``. A worker with
    ``signal_at`` writes the time and sends itself the signal in that step; one with ``starts_at`` begins when
    the others are at that step. With a port, the store is there instead of in a file. At ``waits_at`` all
    wait for the time of the loss to be written. One that the others have given up ends early.
    """
    torch.set_num_threads(1)
    folder = Path(spec["folder"])
    dist.init_process_group(
        "shoal",
        store=_store(folder, spec["store_port"]),
        rank=spec["rank"],
        world_size=spec["size"],
        timeout=timedelta(seconds=60),
        enable_reconfigure=True,
    )
    if spec["starts_at"]:
        _await(folder / f"at-{spec['starts_at']}")
    width = spec["width"]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    crew = Crew({"model": model}, optimizer, patience_s=spec["patience_s"])
    ddp = crew.data_parallel(model)
    ends: list[float] = []
    try:
        for step in crew.steps(until=1_000_000):
            with step:
                (folder / f"at-{step.number}").touch()
                if step.number == spec["signal_at"]:
                    (folder / "lost").write_text(repr(time.time()))
                    os.kill(os.getpid(), spec["signal"])
                if step.number == spec["waits_at"]:
                    _await(folder / "lost")
                inputs = torch.randn(SAMPLES, width, generator=torch.Generator().manual_seed(step.number))
                begin, end = crew.share(SAMPLES)
                (ddp(inputs[begin:end]).square().mean(1).sum() * crew.size / SAMPLES).backward()
            if step.is_done:
                ends.append(time.time())
            if [size for _, size in crew.history].count(spec["size_at_end"]) == spec["steps_at_end"]:
                break
        dist.barrier()
    except CommError as error:
        (folder / f"given-up-{spec['rank']}").write_text(str(error))
        signal.alarm(5)  # the end of the group may wait for a network that is not there
    dist.destroy_process_group()
    lost = folder / "lost"
    return {
        "ends": ends,
        "sizes": [size for _, size in crew.history],
        "lost": float(lost.read_text()) if lost.exists() else None,
    }


def _store(folder: Path, port: int) -> Any:
    if not port:
        return FolderStore(folder / "store", timedelta(minutes=5))
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def _await(path: Path) -> None:
    while not path.exists():
        time.sleep(_POLL_S)
