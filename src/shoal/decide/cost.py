"""Describes the cost of a model: time, memory and relayed bytes of its units, and of stages made of them.

A *unit* is never divided by a cut: consecutive nodes of the exported graph. The units of a model are in
order, so a stage is a range of them, and all stages are given by their *cuts*: the units at which the second,
third, ... stage begins. Everything here is pure data, filled by ``pipelining.measure_cost`` or
``pipelining.roofline``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from shoal.decide.footprint import Activations
from shoal.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Consecutive nodes of a model that are never divided; times and bytes are per micro-batch."""

    name: str
    """Module that holds it, such as ``encoder.block.3``; several units may share one."""
    forward_s: float
    backward_s: float
    parameters: tuple[tuple[str, int], ...] = ()
    """(canonical name, bytes); a tied weight has one canonical name in every unit that uses it."""
    saved_bytes: int = 0
    """Kept from forward to backward."""
    fixed_bytes: int = 0
    """The part of these that does not grow with the micro-batch: 16-bit copies of weights."""


@dataclass(frozen=True, kw_only=True)
class ModelCost:
    """The units of a model in order, and the bytes that cross between them.

    Raises:
        UsageError: no unit, or not one entry of ``relay_bytes`` for each place between two units.
    """

    units: tuple[Unit, ...]
    relay_bytes: tuple[int, ...]
    """Entry i: bytes of one micro-batch that cross a cut after unit i; a value that is needed later is
    counted at every cut that it crosses. One less than units."""
    source: Literal["measured", "roofline"] = "measured"
    recomputed_bytes: int = 0
    """Most bytes that the backward pass of one layer computes again and holds, besides what units keep."""

    def __post_init__(self) -> None:
        if not self.units:
            raise UsageError("a model's cost has no units; it needs at least one")
        if len(self.relay_bytes) != len(self.units) - 1:
            raise UsageError(
                f"a model's cost has {len(self.units)} units and {len(self.relay_bytes)} relay_bytes; "
                f"it needs one for each of the {len(self.units) - 1} places between two units"
            )

    def scaled(self, factor: float) -> ModelCost:
        """Return the cost of micro-batches ``factor`` times as large: all but parameters in proportion."""
        units = tuple(
            replace(
                unit,
                forward_s=unit.forward_s * factor,
                backward_s=unit.backward_s * factor,
                saved_bytes=unit.fixed_bytes + round((unit.saved_bytes - unit.fixed_bytes) * factor),
            )
            for unit in self.units
        )
        return replace(
            self,
            units=units,
            relay_bytes=tuple(round(n * factor) for n in self.relay_bytes),
            recomputed_bytes=round(self.recomputed_bytes * factor),
        )

    def keeping(self, activations: Activations, num_samples: int) -> ModelCost:
        """Return the cost with activations that were counted for the whole model in the precision of the run.

        Units share what grows with the samples as they share what this cost has, and the rest as they share
        the parameters.

        Args:
            num_samples: of the micro-batch of this cost.
        """
        saved = sum(unit.saved_bytes for unit in self.units) or 1
        held = sum(parameter_bytes([unit]) for unit in self.units) or 1
        units = []
        for unit in self.units:
            fixed = round(activations.fixed_bytes * parameter_bytes([unit]) / held)
            grown = round(num_samples * activations.sample_bytes * unit.saved_bytes / saved)
            units.append(replace(unit, saved_bytes=fixed + grown, fixed_bytes=fixed))
        again = round(activations.once_of(num_samples))
        return replace(self, units=tuple(units), recomputed_bytes=again)


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link between two devices."""

    bytes_per_s: float
    """In each direction, both at once."""
    latency_s: float = 0.0

    def seconds(self, num_bytes: int) -> float:
        """Return the time of one message; an empty one takes none."""
        return self.latency_s + num_bytes / self.bytes_per_s if num_bytes else 0.0


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """Sums over the units of a stage; times and bytes are per micro-batch."""

    forward_s: float
    backward_s: float
    parameter_bytes: int = 0
    """Each parameter once, however many units of the stage use it."""
    saved_bytes: int = 0
    relay_bytes: int = 0
    """Bytes that cross the cut after the stage; the gradients that return are as large. 0 for the last."""


def stage_costs(cost: ModelCost, cuts: Sequence[int]) -> tuple[StageCost, ...]:
    """Return the cost of each of the ``len(cuts) + 1`` stages.

    Raises:
        UsageError: the cuts do not grow, or leave a stage without a unit.
    """
    check_cuts(cost, cuts)
    bounds = [0, *cuts, len(cost.units)]
    stages = []
    for begin, end in pairwise(bounds):
        units = cost.units[begin:end]
        stages.append(
            StageCost(
                forward_s=sum(unit.forward_s for unit in units),
                backward_s=sum(unit.backward_s for unit in units),
                parameter_bytes=parameter_bytes(units),
                saved_bytes=sum(unit.saved_bytes for unit in units),
                relay_bytes=cost.relay_bytes[end - 1] if end < len(cost.units) else 0,
            )
        )
    return tuple(stages)


def check_cuts(cost: ModelCost, cuts: Sequence[int]) -> None:
    """Raise UsageError unless the cuts grow and every stage has a unit."""
    bounds = [0, *cuts, len(cost.units)]
    if any(begin >= end for begin, end in pairwise(bounds)):
        raise UsageError(
            f"the cuts {list(cuts)} do not divide {len(cost.units)} units: "
            f"they must grow and lie between 1 and {len(cost.units) - 1}"
        )


def parameter_bytes(units: Sequence[Unit]) -> int:
    """Return the bytes of the parameters that the units use, each counted once."""
    return sum(parameter_sizes(units))


def parameter_sizes(units: Sequence[Unit]) -> list[int]:
    """Return the bytes of each parameter that the units use."""
    return list({name: num_bytes for unit in units for name, num_bytes in unit.parameters}.values())
