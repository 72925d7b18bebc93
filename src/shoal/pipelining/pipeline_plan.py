"""What all ranks of a pipeline agree on before they build it: cuts, schedule, and the costs to expect.

The first rank decides, by the pure functions of :mod:`shoal.decide`, and tells the others: they need not
measure, and rounding on another machine cannot lead them elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shoal.decide.autotune import Choice, Conditions, choose_schedule
from shoal.decide.cost import Link, ModelCost, StageCost, stage_costs
from shoal.decide.pipeline_simulator import Action, Schedule, Timeline, simulate
from shoal.errors import UsageError
from shoal.pipelining.process_groups import Groups


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A schedule that was considered."""

    name: str
    num_virtual: int
    makespan_s: float
    bubble: float
    largest_rank_bytes: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The decided layout of one pipeline."""

    schedule: Schedule
    cuts: tuple[int, ...]
    stages: tuple[StageCost, ...]
    link: Link | None
    rank_bytes: tuple[int, ...]
    """What each rank is expected to need."""
    source: str
    """Whether costs were measured or estimated."""
    first_units: tuple[str, ...]
    """Where each stage begins: the name of its first unit."""
    alternatives: tuple[Alternative, ...]
    """The other schedules, the best first."""

    @property
    def num_virtual(self) -> int:
        return self.schedule.num_stages // self.schedule.num_ranks

    def timeline(self) -> Timeline:
        """Return the predicted timeline of a step."""
        return simulate(self.schedule, self.stages, self.link)


def decide(
    groups: Groups,
    make_cost: Callable[[], ModelCost],
    *,
    num_micro_batches: int,
    conditions: Conditions,
    cuts: Sequence[int] | None,
) -> Plan:
    """Return the plan of the first rank, on all ranks. Only there ``make_cost`` is called.

    Raises:
        UsageError: as :func:`shoal.decide.autotune.choose_schedule`, the same on all ranks.
    """
    told: dict[str, Any] = {}
    if groups.rank == 0 and groups.replica == 0:
        try:
            cost = make_cost()
            choices = choose_schedule(
                cost,
                num_ranks=groups.num_ranks,
                num_micro_batches=num_micro_batches,
                conditions=conditions,
                cuts=cuts,
            )
            told = {"plan": _written(cost, choices, conditions.link)}
        except UsageError as error:
            told = {"error": str(error)}
    told = groups.agree(told)
    if "error" in told:
        raise UsageError(told["error"])
    return _read(told["plan"])


def _written(cost: ModelCost, choices: Sequence[Choice], link: Link | None) -> dict[str, Any]:
    best = choices[0]
    schedule = best.schedule
    return {
        "name": schedule.name,
        "placement": schedule.placement,
        "num_micro_batches": schedule.num_micro_batches,
        "actions": [[list(action) for action in actions] for actions in schedule.actions],
        "cuts": best.cuts,
        "stages": [asdict(stage) for stage in stage_costs(cost, best.cuts)],
        "link": asdict(link) if link is not None else None,
        "rank_bytes": best.rank_bytes,
        "source": cost.source,
        "first_units": [cost.units[first].name for first in (0, *best.cuts)],
        "alternatives": [
            {
                "name": choice.schedule.name,
                "num_virtual": choice.num_virtual,
                "makespan_s": choice.timeline.makespan_s,
                "bubble": choice.timeline.bubble,
                "largest_rank_bytes": max(choice.rank_bytes),
            }
            for choice in choices[1:]
        ],
    }


def _read(told: dict[str, Any]) -> Plan:
    schedule = Schedule(
        name=told["name"],
        placement=tuple(told["placement"]),
        num_micro_batches=told["num_micro_batches"],
        actions=tuple(tuple(Action(*action) for action in actions) for actions in told["actions"]),
    )
    return Plan(
        schedule=schedule,
        cuts=tuple(told["cuts"]),
        stages=tuple(StageCost(**stage) for stage in told["stages"]),
        link=Link(**told["link"]) if told["link"] is not None else None,
        rank_bytes=tuple(told["rank_bytes"]),
        source=told["source"],
        first_units=tuple(told["first_units"]),
        alternatives=tuple(Alternative(**other) for other in told["alternatives"]),
    )
