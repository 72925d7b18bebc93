"""Averages weights over steps, and the statistics of batch norms over workers and images.

    a = decay a + (1 - decay) w          after each optimizer step

Sources: Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging" (1992), with exponential
weights and the warm-up of TensorFlow's ``ExponentialMovingAverage``. Averaged weights have other activations
than those of the running means and variances, which are therefore recomputed (Izmailov et al., "Averaging
Weights Leads to Wider Optima and Better Generalization", arXiv 1803.05407, section 3.2).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.errors import UsageError
from shoal.optim.moments import indices_by_kind, local_part
from shoal.train.gradients import average_over_workers, own_norms, running_statistics

T = TypeVar("T")


class WeightAverage:
    """Exponential moving average of a model's parameters and floating-point buffers; others are copied.

    All workers hold the same average. :attr:`model` is its whole state; include it in checkpoints.

    Args:
        model: the model that is trained, without its DistributedDataParallel wrapper.
        decay: at most; such as 0.9999 for a time constant of ten thousand steps. After step ``n`` it is
            ``(1 + n) / (10 + n)`` as long as that is less, which gives early weights little influence.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        """A copy of the model with the averaged weights, in evaluation mode."""

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Add the weights of ``model`` after optimizer step ``step``, counted from 1, to the average."""
        share = 1.0 - min(self.decay, (1 + step) / (10 + step))
        averages, weights = _tensors(self.model), _tensors(model)
        for indices in indices_by_kind(averages):
            ours, theirs = [averages[k] for k in indices], [weights[k] for k in indices]
            if ours[0].is_floating_point():
                torch._foreach_lerp_(ours, theirs, share)
            else:
                torch._foreach_copy_(ours, theirs)


def _tensors(model: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers, of shards this worker's."""
    return [local_part(tensor.detach()) for tensor in (*model.parameters(), *model.buffers())]


# ---- statistics of batch norms ----------------------------------------------------------------------------


def statistics_of(model: nn.Module) -> list[Tensor]:
    """Return the statistics of a worker's micro-batches in batch norms: means, variances, their number."""
    norms = own_norms(model)
    counts = [norm.num_batches_tracked for norm in norms if norm.num_batches_tracked is not None]
    return running_statistics(norms) + counts


@torch.no_grad()
def unite(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Average per-worker tensors over all workers; integers take the maximum.

    Args:
        tensors: of :func:`statistics_of`, or averages of weights; float32 and int64.
        group: of the workers.
    """
    average_over_workers([each for each in tensors if each.is_floating_point()], group)
    counts = [each for each in tensors if not each.is_floating_point()]
    if counts:
        largest = torch.stack(counts)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        torch._foreach_copy_(counts, list(largest))


@torch.no_grad()
def reestimate_norms(
    model: nn.Module,
    batches: Iterable[T],
    forward: Callable[[T], object],
    group: dist.ProcessGroup | None = None,
) -> int:
    """Set running means and variances of batch norms to their averages over the batches of all workers.

    Batches have equal weight, as with ``momentum=None`` in torch. Sums are in float64, so that the
    distribution of batches over workers does not matter. All other layers run in evaluation mode.

    Args:
        model: the same on all workers, which all call this.
        batches: those of this worker; their number may differ per worker.
        forward: runs ``model`` on a batch; the result is ignored.
        group: a CPU group such as ``World.control``; ``None``: there is one worker.

    Returns:
        The number of batches over all workers.

    Raises:
        UsageError: there are no batches.
    """
    norms = own_norms(model)
    if not norms:
        return 0
    total = torch.zeros_like(_statistics(norms))
    num_batches = 0
    with _per_batch_statistics(model, norms):
        for batch in batches:
            forward(batch)
            total += _statistics(norms)
            num_batches += 1
    sums = torch.cat([total.cpu(), torch.tensor([num_batches], dtype=torch.float64)])
    if group is not None:
        dist.all_reduce(sums, group=group)
    count = int(sums[-1])
    if count == 0:
        raise UsageError(
            "batch-norm statistics cannot be computed from 0 batches: at least one worker needs one"
        )
    running = running_statistics(norms)
    parts = torch.split(sums[:-1] / count, [tensor.numel() for tensor in running])
    for tensor, part in zip(running, parts, strict=True):
        tensor.copy_(part)
    for norm in norms:
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.fill_(count)
    return count


@contextmanager
def _per_batch_statistics(model: nn.Module, norms: list[_BatchNorm]) -> Iterator[None]:
    """Make the norms' running statistics those of the last batch; other layers are in evaluation mode."""
    modes = {module: module.training for module in model.modules()}
    momenta = [norm.momentum for norm in norms]
    model.eval()
    for norm in norms:
        norm.train()
        norm.reset_running_stats()
        norm.momentum = 1.0
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


def _statistics(norms: list[_BatchNorm]) -> Tensor:
    """Return the running means and variances as one float64 vector."""
    return torch.cat([tensor.double() for tensor in running_statistics(norms)])
