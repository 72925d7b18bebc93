"""Random draws without state on any device, and the balanced choice of anchors that a loss is computed on."""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed number; products wrap around
_ROUNDS = (30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)
_LAST_SHIFT = 31


def draw(keys: Tensor, counters: Tensor) -> Tensor:
    """Return 64 random bits as int64 for each (key, counter), both int64; they broadcast.

    The bits are those of :func:`shoal.decide.rng.draw`: splitmix64, read at any place.
    """
    x = (counters + 1) * _GOLDEN + keys
    for shift, multiplier in _ROUNDS:
        x = (x ^ _shifted(x, shift)) * multiplier
    return x ^ _shifted(x, _LAST_SHIFT)


def _shifted(x: Tensor, shift: int) -> Tensor:
    """Shift right as unsigned numbers."""
    return (x >> shift) & ((1 << (64 - shift)) - 1)


def sample_balanced(
    labels: Tensor, keys: Tensor, *, num_samples: int, positive_fraction: float
) -> tuple[Tensor, Tensor]:
    """Return which positives and which negatives to take, two of bool ``[B, A]``.

    Of each image at most ``num_samples * positive_fraction`` positives (rounded down) and as many negatives
    as are then missing; fewer where there are not enough. Which ones depends on the image's key alone, not on
    the rest of the batch.

    Args:
        labels: ``[B, A]``: 1 and above positive, 0 negative, below 0 neither.
        keys: int64 ``[B]``, a key an image: :func:`shoal.decide.rng.random_keys` of (seed, epoch, image),
            viewed as signed.
    """
    places = torch.arange(labels.shape[1], device=labels.device)
    # 62 bits, so that the largest number is above them all
    priority = _shifted(draw(keys[:, None], places[None]), 2)
    num_positives = int(num_samples * positive_fraction)
    positive, taken = _lowest(priority, labels >= 1, torch.full_like(keys, num_positives), num_positives)
    negative, _ = _lowest(priority, labels == 0, num_samples - taken, num_samples)
    return positive, negative


def _lowest(priority: Tensor, members: Tensor, counts: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return the ``counts [B]``, at most ``most``, members with the lowest priorities, and their number."""
    most = min(most, members.shape[1])
    counts = torch.minimum(counts, members.sum(dim=1))
    nobody = torch.iinfo(torch.int64).max
    best = priority.masked_fill(~members, nobody).topk(most, dim=1, largest=False).indices
    taken = torch.arange(most, device=members.device) < counts[:, None]
    return torch.zeros_like(members).scatter(1, best, taken), counts
