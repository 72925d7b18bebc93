"""Mixes images and labels of a batch (mixup), and smooths labels, on the device of the model.

Mixup (Zhang et al., "mixup: Beyond empirical risk minimization", 2018) replaces an image by
λ · image + (1 - λ) · its partner, and its target likewise. λ ~ Beta(α, α) is one number for an optimizer
step, a pure function of (seed, step). Partners are neighbours in the stream of samples: 0 and 1, 2 and 3,
and so on; the stream is shuffled, so they are random pairs. Workers and micro-batches are contiguous parts
of the global batch: if all have even sizes, the pairs are those of the global batch, and neither the number
of workers nor the micro-batch changes them. An odd part is refused.
"""

from __future__ import annotations

from itertools import count

import torch

from shoal.decide.rng import Stream, draw, random_keys, uniform
from shoal.errors import UsageError


def mixup_weight(alpha: float, seed: int, step: int) -> float:
    """Return λ of an optimizer step, from Beta(``alpha``, ``alpha``); 1 (no mixing) for an alpha of 0.

    Jöhnk's method (1964): of two uniform numbers to the power of 1 / alpha, the first's part of their sum,
    once the sum is at most 1.

    Raises:
        UsageError: alpha is not from 0 to 1.
    """
    if not 0 <= alpha <= 1:
        raise UsageError(f"mixup's alpha {alpha} must be from 0 (off) to 1")
    if not alpha:
        return 1.0
    key = random_keys(seed, Stream.MIXUP, step)
    x = y = 0.0
    for at in count(0, 2):
        x, y = (uniform(draw(key, [at, at + 1])) ** (1.0 / alpha)).tolist()
        if 0 < x + y <= 1:
            break
    return x / (x + y)


def mix(images: torch.Tensor, weight: float) -> torch.Tensor:
    """Return ``weight`` · images + (1 - ``weight``) · partners, floats ``[B, …]`` in the same memory format.

    Raises:
        UsageError: the number of images is odd.
    """
    return images if weight == 1 else torch.lerp(_partners(images), images, weight)


def soft_targets(
    labels: torch.Tensor, num_classes: int, *, weight: float = 1.0, smoothing: float = 0.0
) -> torch.Tensor:
    """Return the targets of mixed images as probabilities, float32 ``[B, num_classes]``.

    A label has 1 - ``smoothing`` + ``smoothing`` / num_classes, every other class ``smoothing`` / num_classes
    (Szegedy et al., "Rethinking the Inception architecture", 2016); two partners share them as ``mix`` did.
    ``torch.nn.functional.cross_entropy`` accepts them.

    Args:
        labels: int64 ``[B]``.
        weight: λ, as for ``mix``.

    Raises:
        UsageError: the smoothing is not from 0 to below 1, or mixed labels are odd in number.
    """
    if not 0 <= smoothing < 1:
        raise UsageError(f"label smoothing {smoothing} must be at least 0 and below 1")
    rest = smoothing / num_classes
    targets = torch.full((len(labels), num_classes), rest, device=labels.device)
    targets.scatter_(1, labels[:, None], 1.0 - smoothing + rest)
    return mix(targets, weight)


def _partners(batch: torch.Tensor) -> torch.Tensor:
    """Return the batch with neighbours swapped."""
    if len(batch) % 2:
        raise UsageError(
            f"mixup pairs neighbours, but a micro-batch has {len(batch)} images: make the micro-batch and "
            "each worker's part of the global batch even"
        )
    exchanged = torch.empty_like(batch)
    exchanged[0::2] = batch[1::2]
    exchanged[1::2] = batch[0::2]
    return exchanged
