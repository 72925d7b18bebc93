"""Divides the state of optimizers over data-parallel workers (ZeRO-1, arXiv 1910.02054).

1. Each parameter has an owner (:func:`shoal.decide.ownership.assign_owners`). Gradients are averaged,
   measured and clipped on all workers as without this.
2. Each worker's optimizer steps the parameters that it owns, and so has the state of no others.
3. Owners broadcast their new weights.

Parameters stay whole, or divided over other workers alone, so each optimizer whose update of one does not
read the others computes the same bits. Checkpoints name the state by parameter, as those of pipeline stages
do, and any number of workers restores them.

``torch.distributed.optim.ZeroRedundancyOptimizer`` shards in the same way and is not used. It constructs the
inner optimizer and does not forward its attributes, such as ``found_inf``, by which fused optimizers skip a
step without waiting. To checkpoint, it pickles the whole state onto one worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer

from shoal.decide.ownership import assign_owners
from shoal.errors import UsageError
from shoal.optim.moments import local_part, parameters_of

_BUCKET_BYTES = 25 << 20
"""Weights that travel in one message, unless one is larger."""
_MOST_IN_FLIGHT = 8


class OptimizerShards:
    """Keeps the optimizer's state of a parameter on one of the workers that have the parameter.

    Args:
        group: of these workers; default: all.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._rank, self.num_workers = dist.get_rank(group), dist.get_world_size(group)
        self._owners: dict[nn.Parameter, int] = {}
        self._loads = [0] * self.num_workers

    def owned(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Return the parameters of ``optimizer`` whose state this worker keeps.

        Raises:
            UsageError: the optimizer or a parameter is divided already, or its updates depend on each other.
        """
        parameters = self._assigned(optimizer)
        return [parameter for parameter in parameters if self._owners[parameter] == self._rank]

    @contextmanager
    def restricted(self, optimizer: Optimizer) -> Iterator[None]:
        """Restrict ``optimizer`` to its owned parameters, within this context."""
        own = set(self.owned(optimizer))
        all_parameters = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter in own]
        try:
            yield
        finally:
            for group, parameters in zip(optimizer.param_groups, all_parameters, strict=True):
                group["params"] = parameters

    @torch.no_grad()
    def broadcast(self, optimizers: Sequence[Optimizer]) -> None:
        """Replace all weights by those of their owners. A collective."""
        if self.num_workers == 1:
            return
        sent: deque[tuple[dist.Work, Tensor, list[Tensor]]] = deque()
        for owner, weights in self._buckets(optimizers):
            if len(sent) == _MOST_IN_FLIGHT:
                self._receive(*sent.popleft())
            alone = len(weights) == 1 and weights[0].is_contiguous()
            flat = weights[0] if alone else torch.cat([weight.reshape(-1) for weight in weights])
            work = dist.broadcast(flat, group_src=owner, group=self._group, async_op=True)
            assert work is not None
            sent.append((work, flat, [] if alone or owner == self._rank else weights))
        for each in sent:
            self._receive(*each)

    def _receive(self, work: dist.Work, flat: Tensor, weights: list[Tensor]) -> None:
        work.wait()
        if weights:
            parts = torch.split(flat, [weight.numel() for weight in weights])
            torch._foreach_copy_(weights, [part.view_as(w) for part, w in zip(parts, weights, strict=True)])

    def _buckets(self, optimizers: Sequence[Optimizer]) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield owners with weights of one type and device; owners take turns, so that all send at a time."""
        of_owner: list[list[list[Tensor]]] = [[] for _ in range(self.num_workers)]
        open_bytes: dict[tuple[int, torch.dtype, torch.device], int] = {}
        open_bucket: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}
        for parameter in (p for each in optimizers for p in self._assigned(each) if p.requires_grad):
            owner, num_bytes = self._owners[parameter], parameter.nbytes
            kind = owner, parameter.dtype, parameter.device
            if kind not in open_bucket or open_bytes[kind] + num_bytes > _BUCKET_BYTES:
                open_bucket[kind], open_bytes[kind] = [], 0
                of_owner[owner].append(open_bucket[kind])
            open_bucket[kind].append(local_part(parameter.detach()))
            open_bytes[kind] += num_bytes
        for turn in zip_longest(*of_owner):
            yield from ((owner, bucket) for owner, bucket in enumerate(turn) if bucket)

    def _assigned(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Assign an owner to each parameter of an optimizer, and return the parameters."""
        parameters = parameters_of(optimizer)
        new = [parameter for parameter in parameters if parameter not in self._owners]
        if new:
            self._check(optimizer)
            owners = assign_owners([parameter.nbytes for parameter in new], self._loads)
            for parameter, owner in zip(new, owners, strict=True):
                self._owners[parameter] = owner
                self._loads[owner] += parameter.nbytes
        return parameters

    def _check(self, optimizer: Optimizer) -> None:
        name = type(optimizer).__name__
        if isinstance(optimizer, LBFGS | ZeroRedundancyOptimizer):
            why = (
                "steps all parameters as one" if isinstance(optimizer, LBFGS) else "divides its state itself"
            )
            raise UsageError(
                f"train.shard_optimizer: {name} {why}, so its state cannot be divided by parameter; leave it "
                "out"
            )
        ranks = set(dist.get_process_group_ranks(self._group or dist.group.WORLD))
        if any(_is_divided_over(ranks, parameter) for parameter in parameters_of(optimizer)):
            raise UsageError(
                "train.shard_optimizer: the model's parameters are sharded (DTensor) over the same workers, "
                "and the optimizer's state with them; leave it out"
            )


def _is_divided_over(ranks: set[int], parameter: Tensor) -> bool:
    """Return whether a parameter is divided over workers of ``ranks``, and not only over others."""
    if not isinstance(parameter, DTensor):
        return False
    mesh = parameter.device_mesh
    groups = [mesh.get_group(k) for k, place in enumerate(parameter.placements) if not place.is_replicate()]
    return any(len(ranks.intersection(dist.get_process_group_ranks(group))) > 1 for group in groups)
