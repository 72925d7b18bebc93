"""One worker of ``stragglers``: its emulated accelerator pauses now and then, by a seeded schedule.

    python -m benchmarks.stragglers_waiting_worker SPEC OUT

SPEC is JSON: ``{"steps": 300, "seconds": [[0.2, 1.0, 0.2], ...], "options": {"staleness": 4}}``, with the
seconds of each worker's gradients. ``options`` are those of ``bound_waiting``; null: plain DDP. OUT gets when
each step of rank 0 ended, how many steps were taken by then, and how many gradients each step took.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoal.optim.adamw import AdamW
from shoal.train.bounded_waiting import BoundedWaiting, bound_waiting


def main() -> None:
    spec: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("shoal")
    seconds = spec["seconds"][dist.get_rank()]
    out = Path(sys.argv[2])
    log = out.with_suffix(".jsonl")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 2)))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    training: BoundedWaiting | None = None
    batches: Iterable[int] = range(1, spec["steps"] + 1)
    if spec["options"] is not None:
        training = bound_waiting(model, optimizer, **spec["options"], log=log)
        batches = training.batches(batches)
    ends, computed = [(time.monotonic(), 0)], itertools.count()
    for batch in batches:
        model(torch.full((4, 16), batch / spec["steps"])).square().mean().backward()
        time.sleep(seconds[next(computed) % len(seconds)])
        (training or optimizer).step()
        optimizer.zero_grad()
        ends.append((time.monotonic(), batch if training is None else training.next_step - 1))
    used = [dist.get_world_size()] * spec["steps"]
    if training is not None:
        training.finish()
    if dist.get_rank() == 0:
        if training is not None:
            rows = [json.loads(line) for line in log.read_text().splitlines()[1:]]
            used = [len(row["used"]) for row in rows if row["used"]]
        out.write_text(json.dumps({"ends": ends, "used": used}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
