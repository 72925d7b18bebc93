"""Chooses schedule and cuts: the fastest combination that fits, by simulation with real costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from shoal.decide.cost import Link, ModelCost, StageCost, check_cuts, stage_costs
from shoal.decide.partition import (
    DoesNotFit,
    Memory,
    Optimize,
    check_num_stages,
    in_gb,
    partition,
    rank_bytes,
    refine,
)
from shoal.decide.pipeline_schedules import GREEDY, check_schedule_name, make_schedule, num_virtual_choices
from shoal.decide.pipeline_simulator import Schedule, Timeline, num_kept, rounded, simulate
from shoal.errors import UsageError

PORTFOLIO = ("1f1b", "interleaved", "backward_first", "vee", "bfs", "gpipe")
"""Schedules that are tried by default; of equally fast ones the earlier is taken."""
VIRTUAL_CHOICES = (1, 2, 4)
"""Numbers of stages per rank that are tried by default."""
NUM_REFINED = 3
_SAME = {"interleaved": "1f1b", "bfs": "gpipe"}
"""The equivalent schedule with one stage per rank."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Constraints of a choice, and the options to choose from."""

    link: Link | None = None
    """Between the ranks of a pipeline; ``None``: relays take no time."""
    memory: Memory | None = None
    """Limit of one device; ``None``: no limit."""
    names: Sequence[str] = PORTFOLIO
    virtual: Sequence[int] = VIRTUAL_CHOICES
    active_micro_batches: int | None = None
    """Limit of micro-batches in flight for the greedy schedules."""
    optimize: Optimize = "speed"
    """``speed``: the fastest that fits. ``memory``: the one whose fullest rank needs least."""
    memory_weight: float | None = None
    """See :func:`shoal.decide.partition.partition`."""


@dataclass(frozen=True, kw_only=True)
class ScheduleChoice:
    """A schedule with the cuts that suit it, and its predicted step and memory."""

    schedule: Schedule
    cuts: tuple[int, ...]
    timeline: Timeline
    rank_bytes: tuple[int, ...]
    """Memory of each rank: state, reserve, and the peak of saved activations."""

    @property
    def num_virtual(self) -> int:
        return self.schedule.num_stages // self.schedule.num_ranks

    def missing_bytes(self, memory: Memory | None) -> int:
        """Return the bytes by which the fullest rank exceeds the limit; negative: to spare."""
        return max(self.rank_bytes) - memory.limit_bytes if memory is not None else 0


def _makespan_s(choice: ScheduleChoice) -> float:
    return rounded(choice.timeline.makespan_s)


@dataclass(frozen=True, kw_only=True)
class ScheduleSearch:
    """The schedules and cuts to choose from."""

    cost: ModelCost
    num_ranks: int
    num_micro_batches: int
    conditions: Conditions = Conditions()
    cuts: Sequence[int] | None = None
    """Fixed by the user, for all schedules; they decide the number of stages."""

    def choose(self, num_refined: int = NUM_REFINED) -> list[ScheduleChoice]:
        """Return the schedules that fit, each with its own cuts, the best first.

        Every schedule is simulated with the cuts that minimise its slowest stage; the cuts of the fastest
        ones are then moved to minimise their simulated step. Where nothing fits, ``backward_first`` is tried
        with ever fewer micro-batches in flight.

        Args:
            num_refined: number of the fastest schedules whose cuts are moved.

        Raises:
            UsageError: a schedule is unknown, or none supports this number of ranks, stages and
                micro-batches; the message is that of the first.
            DoesNotFit: no schedule keeps every rank within its memory; the message has the missing bytes.
        """
        choices, refused = [], []
        for name, num_virtual in self.pairs():
            try:
                choices.append(self.best_cuts(name, num_virtual))
            except UsageError as error:
                refused.append(error)
        if not choices:
            raise refused[0]
        fitting = [choice for choice in choices if choice.missing_bytes(self.conditions.memory) <= 0]
        if not fitting:
            fitting = [self.tightest(choices)]
        if self.conditions.optimize == "memory":
            return sorted(fitting, key=lambda choice: (max(choice.rank_bytes), choice.timeline.makespan_s))
        fitting.sort(key=_makespan_s)  # stable: of equally fast ones the first of the portfolio
        if self.cuts is None:
            fitting[:num_refined] = [self.refined(choice) for choice in fitting[:num_refined]]
            fitting.sort(key=_makespan_s)
        return fitting

    def pairs(self) -> list[tuple[str, int]]:
        """Return (schedule, stages per rank) to try."""
        names, num_ranks, num_units = self.conditions.names, self.num_ranks, len(self.cost.units)
        for name in names:
            check_schedule_name(name)
        virtual = list(self.conditions.virtual)
        if self.cuts is not None:
            check_cuts(self.cost, self.cuts)
            num_stages = len(self.cuts) + 1
            if num_stages % num_ranks:
                raise UsageError(
                    f"{num_stages - 1} cuts make {num_stages} stages, which {num_ranks} ranks cannot share "
                    f"equally; give {num_ranks - 1} cuts, or one less than another multiple of {num_ranks}"
                )
            virtual = [num_stages // num_ranks]
        check_num_stages(self.cost, num_ranks * min(virtual))
        pairs = [
            (name, number)
            for name in names
            for number in num_virtual_choices(name, virtual)
            if num_ranks * number <= num_units
            and (num_ranks > 1 or number == min(virtual))
            and not (number == 1 and _SAME.get(name) in names)
        ]
        if not pairs:
            raise UsageError(
                f"{' and '.join(names)} cannot run {num_ranks} ranks of {' or '.join(map(str, virtual))} "
                f"stages cut from {num_units} units; "
                "take another schedule or another number of stages per rank"
            )
        return pairs

    def best_cuts(self, name: str, num_virtual: int) -> ScheduleChoice:
        """Return the schedule with the fastest cuts that fit, or the cuts that need least."""
        if self.cuts is not None:
            return self._choice(name, num_virtual, self.cuts)
        best: ScheduleChoice | None = None
        for cuts in self._proposals(name, num_virtual):
            choice = self._choice(name, num_virtual, cuts)
            if choice.missing_bytes(self.conditions.memory) <= 0:
                return choice
            if best is None or max(choice.rank_bytes) < max(best.rank_bytes):
                best = choice
        assert best is not None
        return best

    def refined(self, choice: ScheduleChoice) -> ScheduleChoice:
        """Return the choice with its cuts moved, and the greedy rule applied to the result."""
        conditions, schedule = self.conditions, choice.schedule
        cuts = refine(self.cost, choice.cuts, schedule, link=conditions.link, memory=conditions.memory)
        if cuts == choice.cuts:
            return choice
        moved = [self._judged(schedule, cuts)]
        if schedule.name in GREEDY:
            moved.append(self._choice(schedule.name, choice.num_virtual, cuts))
        fitting = [new for new in moved if new.missing_bytes(conditions.memory) <= 0]
        return min([choice, *fitting], key=_makespan_s)

    def tightest(self, choices: Sequence[ScheduleChoice]) -> ScheduleChoice:
        """Return the fastest that fits with fewer micro-batches in flight than fill the pipeline.

        Raises:
            DoesNotFit: even one in flight does not fit.
        """
        memory, tried = self.conditions.memory, list(choices)
        assert memory is not None
        num_virtual = 1 if self.cuts is None else (len(self.cuts) + 1) // self.num_ranks
        if "backward_first" in self.conditions.names and self.num_ranks * num_virtual <= len(self.cost.units):
            most = min(self.num_micro_batches, self.conditions.active_micro_batches or self.num_ranks) - 1
            for active in range(most, 0, -1):
                less = replace(self, conditions=replace(self.conditions, active_micro_batches=active))
                tried.append(less.best_cuts("backward_first", num_virtual))
                if tried[-1].missing_bytes(memory) <= 0:
                    return tried[-1]
        best = min(tried, key=lambda choice: max(choice.rank_bytes))
        missing = best.missing_bytes(memory)
        raise DoesNotFit(
            f"no schedule of {self.num_ranks} ranks fits {in_gb(memory.limit_bytes)} a device: the best, "
            f"{best.schedule.name!r}, needs {in_gb(missing)} more on rank "
            f"{best.rank_bytes.index(max(best.rank_bytes))}; take more ranks, smaller "
            "micro-batches, sharded state or a device with more memory",
            missing,
        )

    def _schedule(self, name: str, num_virtual: int, costs: Sequence[StageCost] | None = None) -> Schedule:
        return make_schedule(
            name,
            num_ranks=self.num_ranks,
            num_virtual=num_virtual,
            num_micro_batches=self.num_micro_batches,
            costs=costs,
            link=self.conditions.link,
            active_micro_batches=self.conditions.active_micro_batches,
        )

    def _choice(self, name: str, num_virtual: int, cuts: Sequence[int]) -> ScheduleChoice:
        return self._judged(self._schedule(name, num_virtual, stage_costs(self.cost, cuts)), cuts)

    def _judged(self, schedule: Schedule, cuts: Sequence[int]) -> ScheduleChoice:
        return ScheduleChoice(
            schedule=schedule,
            cuts=tuple(cuts),
            timeline=simulate(schedule, stage_costs(self.cost, cuts), self.conditions.link),
            rank_bytes=rank_bytes(self.cost, cuts, schedule, self.conditions.memory),
        )

    def _proposals(self, name: str, num_virtual: int) -> Iterator[tuple[int, ...]]:
        """Yield cuts, the fastest first, then ones that need ever less memory.

        A cut only accounts for the memory of one stage, while the need of several stages of a rank together
        depends on the whole schedule: so each stage is given less and less of the rank's memory, down to an
        equal part.
        """
        conditions, num_stages = self.conditions, self.num_ranks * num_virtual
        if name in GREEDY:  # a guess: it depends on the costs
            active = min(self.num_micro_batches, conditions.active_micro_batches or self.num_ranks)
            kept = (active,) * num_stages
        else:
            kept = num_kept(self._schedule(name, num_virtual))
        fastest = partial(
            partition, self.cost, num_stages, link=conditions.link, num_kept=kept,
            optimize=conditions.optimize, memory_weight=conditions.memory_weight,
        )  # fmt: skip
        if (memory := conditions.memory) is None:
            yield fastest()
            return
        room = memory.limit_bytes - memory.reserved_bytes
        for part in dict.fromkeys((1.0, (1 + 1 / num_virtual) / 2, 1 / num_virtual)):
            try:
                limit_bytes = memory.reserved_bytes + int(room * part)
                yield fastest(memory=replace(memory, limit_bytes=limit_bytes))
            except DoesNotFit:
                break
        yield partition(self.cost, num_stages, memory=memory, limited=False, num_kept=kept, memory_weight=1.0)
