"""What a schedule is: actions in order for each rank, and the placement of stages on ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Action(NamedTuple):
    """One computation of one stage on one micro-batch."""

    kind: str
    """``F`` forward, ``B`` full backward; or in two: ``I`` input gradient, ``W`` weight gradient."""
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        """Stage, kind, micro-batch: ``2F5``, as torch.distributed.pipelining writes it."""
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What each rank of a pipeline computes, in order."""

    name: str
    placement: tuple[int, ...]
    """The pipeline rank of each stage."""
    num_micro_batches: int
    actions: tuple[tuple[Action, ...], ...]
    """Of each rank; computation only: who sends what to whom follows from it."""

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @property
    def num_ranks(self) -> int:
        return len(self.actions)


def loop_placement(num_ranks: int, num_virtual: int) -> tuple[int, ...]:
    """Return the ranks of the stages dealt out in turn: 0, 1, ..., R - 1, 0, 1, ..."""
    return tuple(range(num_ranks)) * num_virtual


def vee_placement(num_ranks: int) -> tuple[int, ...]:
    """Return the ranks of two stages each, there and back: 0, 1, ..., R - 1, R - 1, ..., 1, 0.

    The first and the last stage share a rank, so embeddings tied to the output layer need no reduction.
    """
    return (*range(num_ranks), *reversed(range(num_ranks)))
