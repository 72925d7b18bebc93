"""When everything in a pipeline's step happens: the simulator that layouts are compared by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.decide.cost import Link, StageCost
from shoal.decide.schedule import Action, Schedule


class Box(NamedTuple):
    """An action of a rank and when it ran, in seconds since the step began."""

    rank: int
    action: Action
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step of a pipeline."""

    boxes: tuple[Box, ...]
    """Rank by rank, in the order of computation."""
    makespan_s: float
    """From the first action's begin to the last one's end."""
    bubble: float
    """The share of ``num_ranks * makespan_s`` in which ranks do not compute."""
    peak_saved_bytes: tuple[int, ...]
    """Of each rank: the most bytes kept for backward at one time."""


def simulate(schedule: Schedule, costs: Sequence[StageCost], link: Link | None = None) -> Timeline:
    """Return what a step of ``schedule`` looks like; without a ``link`` relays take no time."""
    raise NotImplementedError
