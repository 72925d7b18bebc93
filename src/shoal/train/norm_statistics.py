"""Statistics of batch norms taken anew, for weights that no training step has seen.

An average of weights, or weights trained on smaller images, have other activations than those that the
running means and variances are of. Some batches through the model in its final form give them anew (Izmailov
et al., "Averaging Weights Leads to Wider Optima and Better Generalization", arXiv 1803.05407, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.errors import UsageError

T = TypeVar("T")


@torch.no_grad()
def reestimate_norms(
    model: nn.Module,
    batches: Iterable[T],
    forward: Callable[[T], object],
    group: dist.ProcessGroup | None = None,
) -> int:
    """Set the running means and variances to their averages over all batches of all workers.

    Each batch counts once, as with torch's ``momentum=None``; sums are taken in float64, so that it does not
    matter which worker had which batch. All else, dropout included, is as in evaluation meanwhile.

    Args:
        model: on this worker; alike on all, of which each calls this.
        batches: this worker's; another may have more or fewer of them.
        forward: runs ``model`` on a batch; what it returns is not used.
        group: of processors, such as ``World.control``; ``None``: there is one worker.

    Returns:
        The number of batches over all workers; the same on all.

    Raises:
        UsageError: there was not one batch.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    norms = [norm for norm in norms if norm.running_mean is not None]
    if not norms:
        return 0
    total = torch.zeros_like(_statistics(norms))
    num_batches = 0
    with _showing_each_batch(model, norms):
        for batch in batches:
            forward(batch)
            total += _statistics(norms)
            num_batches += 1
    sums = torch.cat([total.cpu(), torch.tensor([num_batches], dtype=torch.float64)])
    if group is not None:
        dist.all_reduce(sums, group=group)
    count = int(sums[-1])
    if count == 0:
        raise UsageError("batch norms cannot be estimated anew from 0 batches: at least one worker needs one")
    parts = torch.split(sums[:-1] / count, [tensor.numel() for tensor in _running(norms)])
    for tensor, part in zip(_running(norms), parts, strict=True):
        tensor.copy_(part)
    for norm in norms:
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.fill_(count)
    return count


@contextmanager
def _showing_each_batch(model: nn.Module, norms: list[_BatchNorm]) -> Iterator[None]:
    """Let the norms' running statistics be those of the last batch alone, and the rest be evaluated."""
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


def _running(norms: list[_BatchNorm]) -> list[Tensor]:
    pairs = [(norm.running_mean, norm.running_var) for norm in norms]
    return [tensor for pair in pairs for tensor in pair if tensor is not None]


def _statistics(norms: list[_BatchNorm]) -> Tensor:
    """Return the running means and variances as one float64 vector."""
    return torch.cat([tensor.double() for tensor in _running(norms)])
