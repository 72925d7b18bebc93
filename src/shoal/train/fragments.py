"""Divides the exchanges of local steps into fragments of the model, spread over the steps (Streaming DiLoCo).

Fragment k of K is sent after step (k + 1) H / K of every H, and merged ``delay`` steps later; until then the
worker does not wait:

    w = mix * own + (1 - mix) * servers'

Source: Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch"
(arXiv 2501.18512), algorithm 2; its fragments are of transformer blocks, these of any layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from shoal.errors import UsageError
from shoal.formatting import plural
from shoal.train.served_tensors import Table


@dataclass(frozen=True)
class Streaming:
    """Divides an exchange into fragments and spreads it over local steps (Streaming DiLoCo).

    Attributes:
        fragments: parts of the model, each exchanged at its own time within the H steps.
        delay: local steps that a worker takes while a fragment's exchange is under way.
        mix: part of the worker's own weights in those after the merge, if there is a delay.
    """

    fragments: int = 1
    delay: int = 0
    mix: float = 0.5

    @property
    def is_on(self) -> bool:
        """Is true unless all weights are exchanged at once while all workers wait."""
        return self.fragments > 1 or self.delay > 0

    @property
    def kept(self) -> float:
        """Part of a worker's own weights that a merge keeps; 0 without delay."""
        return self.mix if self.delay else 0.0

    @property
    def text(self) -> str:
        """Empty, or words that follow "exchange every 50 steps"."""
        if not self.is_on:
            return ""
        mixed = f" ({self.kept:g} of the own weights kept)" if self.delay else ""
        return f" in {self.fragments} fragments, each merged {plural(self.delay, 'step')} later{mixed}"

    def check(self, every: int) -> None:
        """Check the numbers against that of the steps between exchanges.

        Raises:
            UsageError: a number is out of its range, or another fragment would begin before the merge.
        """
        if not 1 <= self.fragments <= every:
            raise UsageError(
                f"local steps: fragments {self.fragments} in every {every} steps: each is sent after a step "
                f"of its own; give 1 to {every}"
            )
        most = every // self.fragments
        if not 0 <= self.delay <= most:
            raise UsageError(
                f"local steps: delay {self.delay}: of {self.fragments} fragments in every {every} steps, one "
                f"is sent {most} steps after the other; give 0 to {most}"
            )
        if not 0 <= self.mix < 1:
            raise UsageError(
                f"local steps: mix {self.mix} is the part of its own weights that a worker keeps in a merge; "
                "it must be at least 0 and below 1"
            )


AT_ONCE = Streaming()
"""All weights are exchanged at once, and all workers wait."""


def fragments_of(model: nn.Module, tables: Sequence[Table], count: int) -> list[list[int]]:
    """Divide tensors into fragments of whole layers, in the order of the model, of about equal size.

    Args:
        model: the module that DDP has wrapped. The parameters of one of its modules are a layer.
        tables: of its parameters.
        count: number of fragments. The sum of their squared sizes is as small as possible.

    Returns:
        Indices of the tensors of each fragment.

    Raises:
        UsageError: there are fewer layers.
    """
    if count == 1:
        return [list(range(len(tables)))]
    index_of = {id(table.parameter): table.index for table in tables}
    found = [(name, index_of[id(p)]) for name, p in model.named_parameters() if id(p) in index_of]
    grouped = itertools.groupby(found, key=lambda each: each[0].rpartition(".")[0])
    layers = [[index for _, index in group] for _, group in grouped]
    if count > len(layers):
        raise UsageError(
            f"local steps in {count} fragments: a fragment has whole layers, and the model has "
            f"{len(layers)}; take at most {len(layers)} fragments"
        )
    sizes = [sum(tables[index].parameter.numel() for index in layer) for layer in layers]
    ranges = itertools.pairwise(_even_cuts(sizes, count))
    return [[index for layer in layers[begin:end] for index in layer] for begin, end in ranges]


def _even_cuts(sizes: Sequence[int], count: int) -> list[int]:
    """Return the bounds of ``count`` ranges, of which the sum of squared sizes is the least (by dynamic
    programming)."""
    sums = np.array([0.0, *sizes]).cumsum()
    squares = (sums[None, :] - sums[:, None]) ** 2
    squares[np.tril_indices(len(sums))] = np.inf  # of ranges that are empty
    best, choices = squares[0], []
    for _ in range(count - 1):
        totals = best[:, None] + squares
        choices.append(totals.argmin(axis=0))
        best = totals.min(axis=0)
    cuts = [len(sizes)]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return [0, *reversed(cuts)]
