"""One worker of ``priority``: trains under plain DDP, or with ``shoal.comm.priority``.

    python -m benchmarks.priority_worker SPEC OUT

SPEC is JSON: ``{"helpers": 8, "sequence": 128, "layers": 12, "steps": 3, "side": "plain"}``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForPreTraining

from benchmarks.comm_worker import shoal_group
from benchmarks.ddp_emulated_worker import batch_of
from shoal.bench.groups import Groups
from shoal.bench.settings import CommBench
from shoal.comm.priority import prioritize
from shoal.env import joined

LEARNING_RATE = 1e-3
WARM_UPS = 2
"""After the first step DDP orders its buckets anew; the end of the second is where the clock starts."""


def digest_of(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()[:16]


def seconds_of(
    model: nn.Module, group: dist.ProcessGroup, spec: dict[str, Any], groups: Groups
) -> list[float]:
    """Return the seconds of each step after the warm-up, on the slowest rank."""
    ddp = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True, init_sync=False)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)  # no momentum: it would take memory
    training = prioritize(ddp, optimizer) if spec["side"] == "priority" else None
    draw = torch.Generator().manual_seed(groups.rank)
    groups.barrier()
    ends = []
    for _ in range(WARM_UPS + spec["steps"]):
        optimizer.zero_grad()
        ddp(**batch_of("bert-base", spec["sequence"], draw)).loss.backward()
        (optimizer if training is None else training).step()
        ends.append(time.perf_counter())
    if training is not None:
        training.finish()
    return groups.largest([end - begin for begin, end in itertools.pairwise(ends[WARM_UPS - 1 :])])


def main() -> None:
    spec: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    place = joined()
    assert place is not None
    groups = Groups(CommBench(sizes=(), collectives=(), backends=("gloo",)), place)
    group = shoal_group(spec["helpers"])
    torch.manual_seed(0)
    model = BertForPreTraining(BertConfig(num_hidden_layers=spec["layers"]))
    torch.manual_seed(1 + groups.rank)  # for dropout
    seconds = seconds_of(model, group, spec, groups)
    digests = groups.gather_json(digest_of(model))
    if len(set(digests)) != 1:
        raise SystemExit(f"the weights of the ranks differ: {digests}")
    if groups.rank == 0:
        num_bytes = sum(parameter.numel() * 4 for parameter in model.parameters())
        result = {"seconds": seconds, "weights": digests[0], "gradient_bytes": num_bytes}
        Path(sys.argv[2]).write_text(json.dumps(result))
    groups.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
