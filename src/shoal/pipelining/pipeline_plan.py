"""Decides cuts, schedule and expected costs on the first rank, and sends them to all ranks of a pipeline.

The pure functions of :mod:`shoal.decide` take the decision. The other ranks need not measure, and rounding
on another machine cannot lead them to another plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shoal.decide.autotune import Conditions, ScheduleSearch
from shoal.decide.cost import Link, ModelCost, StageCost, stage_costs
from shoal.decide.pipeline_simulator import Action, Schedule, Timeline, simulate
from shoal.pipelining.process_groups import ProcessGroups


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A schedule that was considered."""

    name: str
    num_virtual: int
    makespan_s: float
    bubble: float
    largest_rank_bytes: int


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """The decided layout of one pipeline."""

    schedule: Schedule
    cuts: tuple[int, ...]
    stages: tuple[StageCost, ...]
    link: Link | None
    rank_bytes: tuple[int, ...]
    """Memory that each rank is expected to need."""
    source: str
    """Source of the costs: measured or estimated."""
    first_units: tuple[str, ...]
    """Name of the first unit of each stage."""
    alternatives: tuple[Alternative, ...]
    """The schedules that fit, the best first, which is the chosen one."""

    def timeline(self) -> Timeline:
        """Return the predicted timeline of a step."""
        return simulate(self.schedule, self.stages, self.link)


def decide(
    groups: ProcessGroups,
    make_cost: Callable[[], ModelCost],
    *,
    num_micro_batches: int,
    conditions: Conditions,
    cuts: Sequence[int] | None,
    given: PipelinePlan | None = None,
) -> PipelinePlan:
    """Return the plan of the first rank, on all ranks. Only there ``make_cost`` is called.

    Args:
        given: there the plan, if it was decided before.

    Raises:
        UsageError: as :meth:`shoal.decide.autotune.ScheduleSearch.choose`, the same on all ranks.
    """

    kept = groups.of_first_part(None if given is None else asdict(given))

    def decided() -> Any:
        if kept is not None:
            return kept
        cost = make_cost()
        search = ScheduleSearch(
            cost=cost,
            num_ranks=groups.num_ranks,
            num_micro_batches=num_micro_batches,
            conditions=conditions,
            cuts=cuts,
        )
        choices = search.choose()
        best = choices[0]
        plan = PipelinePlan(
            schedule=best.schedule,
            cuts=best.cuts,
            stages=stage_costs(cost, best.cuts),
            link=conditions.link,
            rank_bytes=best.rank_bytes,
            source=cost.source,
            first_units=tuple(cost.units[first].name for first in (0, *best.cuts)),
            alternatives=tuple(
                Alternative(
                    name=choice.schedule.name,
                    num_virtual=choice.num_virtual,
                    makespan_s=choice.timeline.makespan_s,
                    bubble=choice.timeline.bubble,
                    largest_rank_bytes=max(choice.rank_bytes),
                )
                for choice in choices
            ),
        )
        return asdict(plan)

    return plan_of(groups.decide_first(decided))


def plan_of(read: Mapping[str, Any]) -> PipelinePlan:
    """Return a plan from its fields as ``asdict`` returns them, or JSON of these."""
    actions = tuple(tuple(Action(*action) for action in own) for own in read["schedule"]["actions"])
    placement = tuple(read["schedule"]["placement"])
    return PipelinePlan(
        schedule=Schedule(**{**read["schedule"], "placement": placement, "actions": actions}),
        stages=tuple(StageCost(**stage) for stage in read["stages"]),
        link=None if read["link"] is None else Link(**read["link"]),
        alternatives=tuple(Alternative(**other) for other in read["alternatives"]),
        source=read["source"],
        **{name: tuple(read[name]) for name in ("cuts", "rank_bytes", "first_units")},
    )
