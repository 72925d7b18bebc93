"""One worker of ``ddp_emulated``: trains under DDP, its buckets summed by one backend after the other.

Its spec: ``{"model": "albert-base", "sequence": 32, "backends": {"gloo": null, "colocated": 0,
"8 helpers": 8}, "repeats": 5}``; a number says how many helper hosts a shoal group uses. A step that sums
nothing is measured beside them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AlbertConfig, AlbertForPreTraining, BertConfig, BertForPreTraining

from benchmarks.comm_worker import shoal_group, with_groups
from benchmarks.ddp_training import Training
from shoal.bench.collectives import Groups

BATCH = 1
COMPUTATION = "computation alone"
"""The name of the samples of steps without averaging."""
ALBERT_BASE = {
    "embedding_size": 128,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module
    if name == "albert-base":
        model = AlbertForPreTraining(AlbertConfig(**ALBERT_BASE))
    else:
        model = BertForPreTraining(BertConfig())
    return model


def batch_of(name: str, sequence: int, draw: torch.Generator) -> dict[str, torch.Tensor]:
    """Return random tokens with labels for both of the model's losses."""
    labels = "sentence_order_label" if name == "albert-base" else "next_sentence_label"
    tokens = torch.randint(5, 30_000, (BATCH, sequence), generator=draw)
    return {"input_ids": tokens, "labels": tokens, labels: torch.zeros(BATCH, dtype=torch.long)}


def memory_of(pid: int | str = "self") -> tuple[int, int]:
    """Return the most bytes that a process has held of its own, and those of libraries and shared memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    peak, *shared = (int(fields[name].split()[0]) * 1024 for name in ("VmHWM", "RssFile", "RssShmem"))
    return peak - sum(shared), sum(shared)


@with_groups("gloo")
def measure(spec: dict[str, Any], groups: Groups) -> dict[str, Any]:
    """Return samples of steps by backend, the memory of each worker, and the bytes of the gradient."""
    backends: dict[str, dist.ProcessGroup | None] = {
        name: groups.of_backend["gloo"] if num_helpers is None else shoal_group(num_helpers)
        for name, num_helpers in spec["backends"].items()
    }
    backends[COMPUTATION] = None
    draw = torch.Generator().manual_seed(groups.rank)

    def loss(model: nn.Module) -> torch.Tensor:
        value: torch.Tensor = model(**batch_of(spec["model"], spec["sequence"], draw)).loss
        return value

    training = Training(build(spec["model"]), loss, groups)
    training.group = next(iter(backends.values()))
    training.step()  # after the first step DDP rebuilds its buckets
    samples = training.samples_of(backends, spec["repeats"])
    training.check()
    memory = groups.gather_json(memory_of())
    num_bytes = sum(p.numel() * 4 for p in training.ddp.parameters())
    return {"samples": samples, "memory": memory, "gradient_bytes": num_bytes}
