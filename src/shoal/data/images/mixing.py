"""Mixes images and labels of a batch (mixup), on the device of the model.

Mixup (Zhang et al., "mixup: Beyond empirical risk minimization", 2018) replaces an image by
λ · image + (1 - λ) · its partner, and its target likewise. λ ~ Beta(α, α) is one number for an optimizer
step, a pure function of (seed, step). Partners are neighbours in the stream of samples: 0 and 1, 2 and 3,
and so on; the stream is shuffled, so they are random pairs. Workers and micro-batches are contiguous parts
of the global batch: all have even sizes, so the pairs are those of the global batch, and neither the number
of workers nor the micro-batch changes them.
"""

from __future__ import annotations

from itertools import count

import torch

from shoal.decide.rng import Stream, draw, random_keys, uniform


def mixup_weight(alpha: float, seed: int, step: int) -> float:
    """Return λ of an optimizer step, from Beta(``alpha``, ``alpha``); 1 (no mixing) for an alpha of 0.

    Jöhnk's method (1964): of two uniform numbers to the power of 1 / alpha, the first's part of their sum,
    once the sum is at most 1.
    """
    if not alpha:
        return 1.0
    key = random_keys(seed, Stream.MIXUP, step)
    x = y = 0.0
    for at in count(0, 2):
        x, y = (uniform(draw(key, [at, at + 1])) ** (1.0 / alpha)).tolist()
        if 0 < x + y <= 1:
            break
    return x / (x + y)


def mix(batch: torch.Tensor, weight: float) -> torch.Tensor:
    """Return ``weight`` · batch + (1 - ``weight``) · partners, floats ``[B, …]`` in the same memory format.

    Args:
        batch: images, or their labels as probabilities; an even number.
        weight: λ.
    """
    if weight == 1:
        return batch
    partners = torch.empty_like(batch)
    partners[0::2] = batch[1::2]
    partners[1::2] = batch[0::2]
    return torch.lerp(partners, batch, weight)
