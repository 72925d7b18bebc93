"""One worker of ``stragglers``: trains a small model whose samples take an emulated accelerator a given time.

    python -m benchmarks.stragglers_worker SPEC OUT

SPEC is JSON: ``{"batch": 512, "micro_batch": 16, "steps": 60, "shares": "by-speed", "speeds": [62.5]}``, with
the samples per second of each worker's accelerator. OUT gets the losses, when each step ended, and the
changes of shares; the run directory lies beside it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from shoal.env.launcher import worker_env
from shoal.record import Shares, Step, read_record
from shoal.train.config import DistributedConfig, LoopConfig, RunOutputConfig
from shoal.train.run import Run, Sizes


def main() -> None:
    spec: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    place = worker_env()
    assert place is not None
    speed = spec["speeds"][place.place.rank]
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(8_192, 16, generator=draw)
    dataset = TensorDataset(inputs, (inputs.prod(dim=1) > 0).long())
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 2))
    ends = []
    out = Path(sys.argv[2])
    with Run.open(
        out.parent / "run", settings=RunOutputConfig(log_frequency=1, save=False), loop=LoopConfig(seed=0),
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
    if place.place.rank == 0:
        rows = read_record(out.parent / "run")
        result = {
            "losses": [row.loss for row in rows if isinstance(row, Step)],
            "ends": ends,
            "shares": [(row.step, row.samples) for row in rows if isinstance(row, Shares)],
        }
        out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
