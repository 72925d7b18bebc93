"""One worker of ``priority``: trains under plain DDP, or with ``shoal.comm.priority``.

Its spec: ``{"helpers": 8, "layers": 12, "compute_s": 8.8, "steps": 3, "side": "plain"}``.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.comm_worker import shoal_group, with_groups
from benchmarks.priority_shapes import Part, parts_of_bert
from shoal.bench.collectives import Groups
from shoal.comm.priority import prioritize

LEARNING_RATE = 1e-3
WARM_UPS = 2
"""After the first step DDP rebuilds its buckets; the clock starts at the end of the second."""


class Compute(torch.autograd.Function):
    """Stand in for an accelerator's work on a part: time passes and the processor is free.

    The output depends on every weight, and each gradient on the output: a part that ran before the step of
    its weights would change them all.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, *weights: Tensor) -> Tensor:
        time.sleep(seconds)
        ctx.seconds = seconds
        ctx.save_for_backward(*weights)
        return x + torch.stack([weight.square().mean() for weight in weights]).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        (gradient,) = gradients
        return (gradient, None, *(weight * gradient for weight in ctx.saved_tensors))


class Emulated(nn.Module):
    """A part of the model: its weights, and the time that it takes."""

    def __init__(self, part: Part, forward_s: float) -> None:
        super().__init__()
        self.forward_s = forward_s
        for number, shape in enumerate(part.shapes):
            self.register_parameter(f"weight{number}", nn.Parameter(torch.randn(shape)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Compute.apply(x, self.forward_s, *self.parameters())
        return y


def model_of(spec: dict[str, Any]) -> nn.Sequential:
    """Return the parts of BERT-base; a forward pass takes a third of ``compute_s``, a backward pass two."""
    parts = parts_of_bert(spec["layers"])
    second = spec["compute_s"] / 3 / sum(part.work for part in parts)
    return nn.Sequential(*(Emulated(part, part.work * second) for part in parts))


def common_digest(model: nn.Module, groups: Groups) -> str:
    """Return the digest of the weights.

    Raises:
        SystemExit: those of another rank differ.
    """
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    digests = groups.gather_json(digest.hexdigest()[:16])
    if len(set(digests)) != 1:
        raise SystemExit(f"the weights of the ranks differ: {digests}")
    return str(digests[0])


def seconds_of(
    model: nn.Module, group: dist.ProcessGroup, spec: dict[str, Any], groups: Groups
) -> list[float]:
    """Return the seconds of each step after the warm-up, on the slowest rank."""
    ddp = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True, init_sync=False)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)  # no momentum: it would take memory
    training = prioritize(ddp, optimizer) if spec["side"] == "priority" else None
    groups.barrier()
    ends = []
    for step in range(WARM_UPS + spec["steps"]):
        optimizer.zero_grad()
        ddp(torch.tensor(float(groups.rank + step))).sin().backward()
        (optimizer if training is None else training).step()
        ends.append(time.perf_counter())
    if training is not None:
        training.finish()
    return groups.largest([end - begin for begin, end in itertools.pairwise(ends[WARM_UPS - 1 :])])


@with_groups("gloo")
def train(spec: dict[str, Any], groups: Groups) -> dict[str, Any]:
    """Return the seconds of each step, the digest of the weights, and the bytes of the gradient."""
    group = shoal_group(spec["helpers"])
    torch.manual_seed(0)
    model = model_of(spec)
    seconds = seconds_of(model, group, spec, groups)
    num_bytes = sum(math.prod(parameter.shape) * 4 for parameter in model.parameters())
    return {"seconds": seconds, "weights": common_digest(model, groups), "gradient_bytes": num_bytes}
