"""Converts epochs to optimizer steps: vision's recipes count epochs, and steps need not align with them.

The stream of samples is endless (``order``), so a global batch may hold the last images of one epoch and the
first of the next. Epoch ``e`` ends with the step whose last sample is nearest to its own: step
``round(e · examples / global batch)``, a half rounded up. The rounding does not add up: the run has as many
samples as its epochs have, to within half a batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Epochs:
    """The steps at which the epochs of a run end."""

    num_examples: int
    """Examples in an epoch."""
    global_batch_size: int

    def steps(self, epochs: float) -> int:
        """Return the number of steps after which ``epochs`` epochs are over."""
        return math.floor(epochs * self.num_examples / self.global_batch_size + 0.5)

    def finished(self, step: int) -> int:
        """Return the number of epochs that are over after ``step``: the largest whose ``steps`` are at most
        that."""
        return (self.global_batch_size * (2 * step + 1) - 1) // (2 * self.num_examples)

    def ends_multiple(self, step: int, every: int) -> bool:
        """Return whether an epoch whose number is a multiple of ``every`` ends with ``step``; never for 0."""
        return every > 0 and self.finished(step) // every > self.finished(step - 1) // every

    def at(self, samples: int) -> float:
        """Return the epochs that ``samples`` samples are."""
        return samples / self.num_examples
