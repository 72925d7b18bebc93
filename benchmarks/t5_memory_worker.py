"""One worker of ``t5_memory``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shoal.env.worker import WorkerEnv, WorkerRanks
from shoal.models import t5 as _models  # noqa: F401  # imported before the first measurement
from shoal.recipes import stages, t5_classify  # noqa: F401
from shoal.recipes.finetuning import FinetuneRunConfig, FinetuneTrainConfig, SourceConfig
from shoal.train.config import DistributedConfig, ParallelConfig


def resident(name: str) -> int:
    """Return ``VmRSS`` or ``VmHWM`` of this process in bytes."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


def growth(spec: dict[str, Any]) -> int:
    """Finetune as worker ``rank`` of ``pipeline``; return by how many bytes the resident memory grew."""
    torch.set_num_threads(1)
    pairs, pipeline, rank = Path(spec["pairs"]), spec["pipeline"], spec["rank"]
    config = t5_classify.T5ClassifyConfig(
        model=SourceConfig(path=Path(spec["model"])),
        data=t5_classify.T5DataConfig(path=pairs, eval=(pairs,), max_seq_length=32),
        train=FinetuneTrainConfig(
            total_steps=2, global_batch_size=8, micro_batch_size=2, precision="fp32", compile=False
        ),
        run=FinetuneRunConfig(dir=Path(spec["run"]), evaluation_batch_size=8),
        distributed=DistributedConfig(device="cpu", backend="gloo"),
        parallel=ParallelConfig(pipeline=pipeline),
    )
    ranks = WorkerRanks(rank=rank, num_workers=pipeline, local_rank=rank, num_local_workers=pipeline)
    worker = WorkerEnv(ranks=ranks, master_addr="127.0.0.1", master_port=spec["port"], launcher="test")
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1).step()  # imports dynamo, as any optimizer
    before = resident("VmRSS")
    if code := t5_classify.main(config, worker):
        raise SystemExit(code)
    return resident("VmHWM") - before
