"""One worker of ``stragglers``: trains a small model whose computing an emulated accelerator does."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from shoal.env.launcher import worker_env
from shoal.optim.adamw import AdamW
from shoal.record import Shares, Step, read_record
from shoal.train.config import DistributedConfig, LoopConfig, RunOutputConfig
from shoal.train.run import Run, Sizes
from shoal.train.servers.waiting import BoundedSteps, bound_waiting


def share(spec: dict[str, Any]) -> dict[str, Any]:
    """Train on samples that take an accelerator a given time.

    The spec: ``{"batch": 512, "micro_batch": 16, "steps": 60, "shares": "by-speed", "speeds": [62.5]}``, with
    the samples per second of each worker's accelerator. Returns the losses, when each step ended, and the
    changes of shares.
    """
    torch.set_num_threads(1)
    worker = worker_env()
    assert worker is not None
    speed = spec["speeds"][worker.ranks.rank]
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(8_192, 16, generator=draw)
    dataset = TensorDataset(inputs, (inputs.prod(dim=1) > 0).long())
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 2))
    ends = []
    run_dir = Path(spec["folder"]) / "run"
    with Run.open(
        run_dir, settings=RunOutputConfig(log_frequency=1, save=False), loop=LoopConfig(seed=0),
        distributed=DistributedConfig(backend="gloo", shares=spec["shares"]),
    ) as run:  # fmt: skip
        model = run.data_parallel(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        run.keep(model=module, optimizer=optimizer)
        sizes = Sizes(global_batch_size=spec["batch"], micro_batch_size=spec["micro_batch"])
        for step in run.steps(dataset, sizes, until=spec["steps"]):
            with step:
                for features, labels in step:
                    loss = F.cross_entropy(model(features), labels, reduction="sum")
                    time.sleep(len(labels) / speed)
                    step.backward(loss / step.num_samples)
                step.update(optimizer)
            ends.append(time.monotonic())
        run.finish()
    if worker.ranks.rank:  # rank 0 has the record
        return {}
    rows = read_record(run_dir)
    return {
        "losses": [row.loss for row in rows if isinstance(row, Step)],
        "ends": ends,
        "shares": [(row.step, row.samples) for row in rows if isinstance(row, Shares)],
    }


def wait(spec: dict[str, Any]) -> dict[str, Any]:
    """Train with an accelerator that pauses now and then.

    The spec: ``{"steps": 300, "seconds": [[0.2, 1.0, 0.2], ...], "options": {"staleness": 4}}``, with the
    seconds of each worker's gradients. ``options`` are those of ``bound_waiting``; null: plain DDP. Returns
    when each step of rank 0 ended, how many steps were taken by then, and how many gradients each step took.
    """
    torch.set_num_threads(1)
    dist.init_process_group("shoal")
    seconds = spec["seconds"][dist.get_rank()]
    log = Path(spec["folder"]) / "waiting.jsonl"
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 2)))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    bounded: BoundedSteps | None = None
    batches: Iterable[int] = range(1, spec["steps"] + 1)
    with ExitStack() as stack:
        if spec["options"] is not None:
            bounded = bound_waiting(model, optimizer, **spec["options"], log=log)
            stack.enter_context(bounded)
            batches = bounded.batches(batches)
        ends, computed = [(time.monotonic(), 0)], itertools.count()
        for batch in batches:
            model(torch.full((4, 16), batch / spec["steps"])).square().mean().backward()
            time.sleep(seconds[next(computed) % len(seconds)])
            optimizer.step()
            optimizer.zero_grad()
            ends.append((time.monotonic(), batch if bounded is None else bounded.next_step - 1))
    used = [dist.get_world_size()] * spec["steps"]
    if bounded is not None and dist.get_rank() == 0:
        rows = [json.loads(line) for line in log.read_text().splitlines()[1:]]
        used = [len(row["used"]) for row in rows if row["used"]]
    dist.barrier()
    dist.destroy_process_group()
    return {"ends": ends, "used": used}
