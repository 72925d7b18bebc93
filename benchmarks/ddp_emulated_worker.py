"""One worker of ``ddp_emulated``: trains under DDP, its buckets summed by one backend after the other.

    python -m benchmarks.ddp_emulated_worker SPEC OUT

SPEC is JSON: ``{"model": "albert-base", "sequence": 32, "backends": {"gloo": null, "colocated": 0,
"8 helpers": 8}, "repeats": 5}``; a number says how many helper hosts a shoal group uses. One model and one
DDP serve all backends, which differ in the group that DDP's own hook (``allreduce_hook``) is given, or the
memory of this machine would not do. A step that sums nothing is measured beside them.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from transformers import AlbertConfig, AlbertForPreTraining, BertConfig, BertForPreTraining

from benchmarks.comm_worker import shoal_group
from shoal.bench.groups import Groups
from shoal.bench.settings import CommBench
from shoal.env import joined

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


class Training:
    """The model, and the group that sums its gradients at the moment."""

    def __init__(self, name: str, sequence: int, groups: Groups) -> None:
        self._name, self._sequence, self._groups = name, sequence, groups
        self._draw = torch.Generator().manual_seed(groups.rank)
        model = build(name)
        # All ranks have the same seed: the weights need not travel.
        self.ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False)
        self.group: dist.ProcessGroup | None = groups.control  # None: gradients stay where they are

        def average(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
            assert self.group is not None
            return default_hooks.allreduce_hook(self.group, bucket)

        self.ddp.register_comm_hook(None, average)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)  # no momentum: it would take memory

    def step(self) -> float:
        """Take a step together; return its seconds on this rank."""
        batch = batch_of(self._name, self._sequence, self._draw)
        self._groups.barrier()
        begin = time.perf_counter()
        self._optimizer.zero_grad()
        with self.ddp.no_sync() if self.group is None else nullcontext():
            self.ddp(**batch).loss.backward()
        if self.group is not None:  # else the ranks' weights would become different
            self._optimizer.step()
        return time.perf_counter() - begin

    def check(self) -> None:
        """End if the ranks' weights have become different."""
        sums = torch.tensor([float(p.detach().double().sum()) for p in self.ddp.parameters()])
        least, most = sums.clone(), sums.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self._groups.control)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._groups.control)
        if not torch.equal(least, most) or not torch.isfinite(sums).all():
            raise SystemExit("the weights of the ranks differ")


def memory_of(pid: int | str = "self") -> tuple[int, int]:
    """Return the most bytes that a process has held of its own, and those of libraries and shared memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    peak, *shared = (int(fields[name].split()[0]) * 1024 for name in ("VmHWM", "RssFile", "RssShmem"))
    return peak - sum(shared), sum(shared)


def main() -> None:
    spec: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    place = joined()
    assert place is not None
    groups = Groups(CommBench(sizes=(), collectives=(), backends=("gloo",)), place)
    backends: dict[str, dist.ProcessGroup | None] = {
        name: groups.of_backend["gloo"] if num_helpers is None else shoal_group(num_helpers)
        for name, num_helpers in spec["backends"].items()
    }
    backends[COMPUTATION] = None
    training = Training(spec["model"], spec["sequence"], groups)
    training.group = next(iter(backends.values()))
    training.step()  # after the first step DDP orders its buckets anew
    samples: dict[str, list[float]] = {name: [] for name in backends}
    for turn in range(spec["repeats"]):
        for name in list(backends) if turn % 2 == 0 else reversed(list(backends)):
            training.group = backends[name]
            samples[name].append(training.step())
    training.check()
    samples = {name: groups.largest(seconds) for name, seconds in samples.items()}
    memory = groups.gather_json(memory_of())
    num_bytes = sum(p.numel() * 4 for p in training.ddp.parameters())
    if groups.rank == 0:
        result = {"samples": samples, "memory": memory, "gradient_bytes": num_bytes}
        Path(sys.argv[2]).write_text(json.dumps(result))
    groups.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
