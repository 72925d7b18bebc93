"""In which order the ranks of a pipeline compute: for each rank a list of actions.

A schedule says what is computed, where and in which order; who sends what to whom follows from it. Every
stage of the model is placed on one rank, and each rank works through its own list, waiting where a value has
not come yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.decide.cost import Link, StageCost


class Action(NamedTuple):
    """One computation of one stage on one micro-batch."""

    kind: str
    """``F`` forward, ``B`` full backward, ``I`` input gradient, ``W`` weight gradient (``I`` + ``W`` = ``B``)."""
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        """Stage, kind, micro-batch: ``2F5``, as the schedules of torch.distributed.pipelining write it."""
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What each rank of a pipeline computes, in order."""

    name: str
    placement: tuple[int, ...]
    """The pipeline rank of each stage."""
    num_micro_batches: int
    actions: tuple[tuple[Action, ...], ...]
    """Of each rank; computation only."""

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @property
    def num_ranks(self) -> int:
        return len(self.actions)


def make_schedule(
    name: str,
    *,
    num_ranks: int,
    num_virtual: int,
    num_micro_batches: int,
    costs: Sequence[StageCost] | None = None,
    link: Link | None = None,
    active_micro_batches: int | None = None,
) -> Schedule:
    """Return the schedule called ``name`` for ``num_ranks * num_virtual`` stages."""
    raise NotImplementedError
