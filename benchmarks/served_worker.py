"""One worker of ``served``: trains under DDP whose workers step, or with weights on servers.

Its spec: ``{"helpers": 4, "layers": 12, "compute_s": 8.8, "steps": 3, "side": "workers"}``; the other
sides are those of ``served``.
"""

from __future__ import annotations

import itertools
import time
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.comm_worker import shoal_group, with_groups
from benchmarks.priority_worker import WARM_UPS, common_digest, model_of
from shoal.bench.collectives import Groups
from shoal.optim.adamw import AdamW
from shoal.train.servers.update import update_on_servers

MAX_NORM = 1e6
"""No gradient is so long: the bits are those without clipping."""


def bytes_of_state(optimizer: AdamW) -> int:
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.dim() > 0
    )


def time_alone(optimizer: AdamW, groups: Groups) -> float:
    """Return the seconds that rank 0's optimizer takes while the other ranks wait; the weights stay."""
    took_s = 0.0
    if groups.rank == 0:
        weights = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        before = [weight.detach().clone() for weight in weights]
        begin = time.perf_counter()
        optimizer.step()
        took_s = time.perf_counter() - begin
        with torch.no_grad():
            torch._foreach_copy_(weights, before)
    groups.barrier()
    return groups.largest([took_s])[0]


@with_groups("gloo")
def train(spec: dict[str, Any], groups: Groups) -> dict[str, Any]:
    """Return the seconds of each step after the warm-up on the slowest rank, and what the optimizer takes."""
    group = shoal_group(spec["helpers"])
    torch.manual_seed(0)
    model = model_of(spec)
    ddp = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True, init_sync=False)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    on_servers = spec["side"] != "workers"
    ends, stepping = [], []
    with ExitStack() as stack:
        if on_servers:
            update = update_on_servers(
                ddp, optimizer, max_norm=MAX_NORM if spec["side"].startswith("clipped") else None,
                weights="bf16" if spec["side"].endswith("bf16") else "fp32",
                replicas=2 if spec["side"].endswith("copies") else 1,
            )  # fmt: skip
            stack.enter_context(update)
        groups.barrier()
        for step in range(WARM_UPS + spec["steps"]):
            ddp(torch.tensor(float(groups.rank + step))).sin().backward()
            begin = time.perf_counter()
            optimizer.step()
            if not on_servers:
                groups.barrier()  # the hosts share processors: all have stepped before one goes on
            stepping.append(time.perf_counter() - begin)
            optimizer.zero_grad(set_to_none=False)
            ends.append(time.perf_counter())
        state_bytes, digest = bytes_of_state(optimizer), common_digest(model, groups)
    seconds = [end - begin for begin, end in itertools.pairwise(ends[WARM_UPS - 1 :])]
    alone_s = 0.0
    if not on_servers:
        ddp(torch.tensor(0.0)).sin().backward()
        alone_s = time_alone(optimizer, groups)
        rest = [whole - own for whole, own in zip(seconds, stepping[WARM_UPS:], strict=True)]
        seconds = [each + alone_s for each in groups.largest(rest)]
    else:
        seconds = groups.largest(seconds)
    return {"seconds": seconds, "optimizer_s": alone_s, "state_bytes": state_bytes, "weights": digest}
