"""Converts epochs to optimizer steps, which need not align with them.

In vision's recipes the stream of samples is endless (``order``), so a global batch may hold the last images
of one epoch and the first of the next. Epoch ``e`` ends with the step whose last sample is nearest to its
own: step ``round(e · examples / global batch)``, a half rounded up. The rounding does not add up: the run has
as many samples as its epochs have, to within half a batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def covering_steps(epochs: float, *, num_examples: int, global_batch_size: int) -> int:
    """Return the steps in which every example of ``epochs`` epochs is seen, as finetunings count them."""
    return math.ceil(epochs * num_examples / global_batch_size)


@dataclass(frozen=True, kw_only=True)
class Epochs:
    """The steps at which the epochs of a run end."""

    num_examples: int
    """Examples in an epoch."""
    global_batch_size: int

    def steps(self, epochs: float) -> int:
        """Return the number of steps after which ``epochs`` epochs are over."""
        return math.floor(epochs * self.num_examples / self.global_batch_size + 0.5)

    def ends(self, every: int, total_steps: int) -> list[int]:
        """Return the steps at which epochs ``every``, ``2 · every``, … end, and the last; 0: only that."""
        ends = {total_steps}
        epoch = every
        while every and self.steps(epoch) < total_steps:
            ends.add(self.steps(epoch))
            epoch += every
        return sorted(ends - {0})
