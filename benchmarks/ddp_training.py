"""A model under DistributedDataParallel whose gradients are averaged by one group after the other.

One model and one DDP serve all backends, which differ in the group that DDP's own hook (``allreduce_hook``)
is given: the memory of one machine would not do for a model a backend.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from shoal.bench.collectives import Groups

LEARNING_RATE = 1e-3


class Training:
    """The model, and the group that sums its gradients at the moment.

    Args:
        model: the same weights on every rank, so that they need not travel.
        loss: of the wrapped model; called once a step.
        bucket_cap_mb: DDP's; None: its default.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module], torch.Tensor],
        groups: Groups,
        *,
        bucket_cap_mb: float | None = None,
    ) -> None:
        self._loss, self._groups = loss, groups
        cap: dict[str, Any] = {} if bucket_cap_mb is None else {"bucket_cap_mb": bucket_cap_mb}
        self.ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False, **cap)
        self.group: dist.ProcessGroup | None = groups.control
        """None: gradients stay where they are."""
        self.hook: Callable[..., Any] = default_hooks.allreduce_hook
        """DDP's communication hook, which averages them."""

        def average(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
            assert self.group is not None
            return self.hook(self.group, bucket)

        self.ddp.register_comm_hook(None, average)
        self._optimizer = torch.optim.SGD(model.parameters())  # no momentum: it would take memory

    def step(self) -> float:
        """Take a step together; return its seconds on this rank."""
        self._groups.barrier()
        # Without sums the ranks' weights would become different: the optimizer's step takes its time only.
        self._optimizer.param_groups[0]["lr"] = 0.0 if self.group is None else LEARNING_RATE
        begin = time.perf_counter()
        self._optimizer.zero_grad()
        with self.ddp.no_sync() if self.group is None else nullcontext():
            self._loss(self.ddp).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return time.perf_counter() - begin

    def samples_of(
        self,
        group_of: dict[str, dist.ProcessGroup | None],
        repeats: int,
        watched: Callable[[str], AbstractContextManager[object]] = lambda name: nullcontext(),
    ) -> dict[str, list[float]]:
        """Return the seconds of the slowest rank, ``repeats`` steps with each group by turns.

        Args:
            watched: given a group's name, is entered for each of its steps.
        """
        samples: dict[str, list[float]] = {name: [] for name in group_of}
        for turn in range(repeats):
            for name in list(group_of) if turn % 2 == 0 else reversed(list(group_of)):
                self.group = group_of[name]
                with watched(name):
                    samples[name].append(self.step())
        return {name: self._groups.largest(seconds) for name, seconds in samples.items()}

    def check(self) -> None:
        """End if the ranks' weights have become different."""
        sums = torch.tensor([float(p.detach().double().sum()) for p in self.ddp.parameters()])
        least, most = sums.clone(), sums.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self._groups.control)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._groups.control)
        if not torch.equal(least, most) or not torch.isfinite(sums).all():
            raise SystemExit("the weights of the ranks differ")
