"""Chooses schedule and cuts: the fastest combination that fits, by simulation with real costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

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
class Choice:
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


def choose_schedule(
    cost: ModelCost,
    *,
    num_ranks: int,
    num_micro_batches: int,
    conditions: Conditions | None = None,
    cuts: Sequence[int] | None = None,
    num_refined: int = NUM_REFINED,
) -> list[Choice]:
    """Return the schedules that fit, each with its own cuts, the best first.

    Every schedule is simulated with the cuts that minimise its slowest stage; the cuts of the fastest ones
    are then moved to minimise their simulated step. Where nothing fits, ``backward_first`` is tried with ever
    fewer micro-batches in flight.

    Args:
        cuts: fixed by the user, for all schedules; they decide the number of stages.
        num_refined: number of the fastest schedules whose cuts are moved.

    Raises:
        UsageError: a schedule is unknown, or none supports this number of ranks, stages and micro-batches;
        the
            message is that of the first.
        DoesNotFit: no schedule keeps every rank within its memory; the message has the missing bytes.
    """
    given = conditions or Conditions()
    found, refused = [], []
    for name, num_virtual in _pairs(given, cost, num_ranks, cuts):
        case = _Case(name, num_ranks, num_virtual, num_micro_batches, given.active_micro_batches)
        try:
            found.append(_place(cost, case, given, cuts))
        except UsageError as error:
            refused.append(error)
    if not found:
        raise refused[0]
    fitting = [choice for choice in found if choice.missing_bytes(given.memory) <= 0]
    if not fitting:
        fitting = [_tightest(cost, num_ranks, num_micro_batches, given, cuts, found)]
    if given.optimize == "memory":
        return sorted(fitting, key=lambda choice: (max(choice.rank_bytes), choice.timeline.makespan_s))
    fitting.sort(key=_makespan_s)  # stable: of equally fast ones the first of the portfolio
    if cuts is None:
        fitting[:num_refined] = [_refined(cost, choice, given) for choice in fitting[:num_refined]]
        fitting.sort(key=_makespan_s)
    return fitting


def _makespan_s(choice: Choice) -> float:
    return rounded(choice.timeline.makespan_s)


def _pairs(
    conditions: Conditions, cost: ModelCost, num_ranks: int, cuts: Sequence[int] | None
) -> list[tuple[str, int]]:
    """Return (schedule, stages per rank) to try."""
    for name in conditions.names:
        check_schedule_name(name)
    virtual = list(conditions.virtual)
    if cuts is not None:
        check_cuts(cost, cuts)
        if (len(cuts) + 1) % num_ranks:
            raise UsageError(
                f"{len(cuts)} cuts make {len(cuts) + 1} stages, which {num_ranks} ranks cannot share "
                f"equally; give {num_ranks - 1} cuts, or one less than another multiple of {num_ranks}"
            )
        virtual = [(len(cuts) + 1) // num_ranks]
    check_num_stages(cost, num_ranks * min(virtual))
    pairs = [
        (name, number)
        for name in conditions.names
        for number in num_virtual_choices(name, virtual)
        if num_ranks * number <= len(cost.units)
        and (num_ranks > 1 or number == min(virtual))
        and not (number == 1 and _SAME.get(name) in conditions.names)
    ]
    if not pairs:
        raise UsageError(
            f"{' and '.join(conditions.names)} cannot run {num_ranks} ranks of "
            f"{' or '.join(map(str, virtual))} stages cut from {len(cost.units)} units; "
            "take another schedule or another number of stages per rank"
        )
    return pairs


@dataclass(frozen=True)
class _Case:
    """A schedule without costs."""

    name: str
    num_ranks: int
    num_virtual: int
    num_micro_batches: int
    active_micro_batches: int | None

    def schedule(self, costs: Sequence[StageCost] | None = None, link: Link | None = None) -> Schedule:
        return make_schedule(
            self.name,
            num_ranks=self.num_ranks,
            num_virtual=self.num_virtual,
            num_micro_batches=self.num_micro_batches,
            costs=costs,
            link=link,
            active_micro_batches=self.active_micro_batches,
        )

    def choice(self, cost: ModelCost, cuts: Sequence[int], given: Conditions) -> Choice:
        return _judged(cost, cuts, self.schedule(stage_costs(cost, cuts), given.link), given)

    def num_kept(self) -> tuple[int, ...]:
        """Return the micro-batches that each stage keeps in memory; a guess where that depends on costs."""
        if self.name in GREEDY:
            active = min(self.num_micro_batches, self.active_micro_batches or self.num_ranks)
            return (active,) * (self.num_ranks * self.num_virtual)
        return num_kept(self.schedule())


def _place(cost: ModelCost, case: _Case, given: Conditions, cuts: Sequence[int] | None) -> Choice:
    """Return the case with the fastest cuts that fit, or the cuts that need least."""
    if cuts is not None:
        return case.choice(cost, cuts, given)
    best: Choice | None = None
    for proposal in _proposals(cost, case, given):
        choice = case.choice(cost, proposal, given)
        if choice.missing_bytes(given.memory) <= 0:
            return choice
        if best is None or max(choice.rank_bytes) < max(best.rank_bytes):
            best = choice
    assert best is not None
    return best


def _proposals(cost: ModelCost, case: _Case, given: Conditions) -> Iterator[tuple[int, ...]]:
    """Yield cuts, the fastest first, then ones that need ever less memory.

    A cut only accounts for the memory of one stage, while the need of several stages of a rank together
    depends on the whole schedule: so each stage is given less and less of the rank's memory, down to an equal
    part.
    """
    num_stages, kept = case.num_ranks * case.num_virtual, case.num_kept()

    def fastest(memory: Memory | None) -> tuple[int, ...]:
        return partition(
            cost, num_stages, link=given.link, memory=memory, num_kept=kept,
            optimize=given.optimize, memory_weight=given.memory_weight,
        )  # fmt: skip

    if (memory := given.memory) is None:
        yield fastest(None)
        return
    room = memory.limit_bytes - memory.reserved_bytes
    for part in dict.fromkeys((1.0, (1 + 1 / case.num_virtual) / 2, 1 / case.num_virtual)):
        try:
            yield fastest(replace(memory, limit_bytes=memory.reserved_bytes + int(room * part)))
        except DoesNotFit:
            break
    yield partition(cost, num_stages, memory=memory, limited=False, num_kept=kept, memory_weight=1.0)


def _refined(cost: ModelCost, choice: Choice, given: Conditions) -> Choice:
    """Return the choice with its cuts moved, and the greedy rule applied to the result."""
    cuts = refine(cost, choice.cuts, choice.schedule, link=given.link, memory=given.memory)
    if cuts == choice.cuts:
        return choice
    moved = [_judged(cost, cuts, choice.schedule, given)]
    if choice.schedule.name in GREEDY:
        case = _Case(
            choice.schedule.name,
            choice.schedule.num_ranks,
            choice.num_virtual,
            choice.schedule.num_micro_batches,
            given.active_micro_batches,
        )
        moved.append(case.choice(cost, cuts, given))
    fitting = [new for new in moved if new.missing_bytes(given.memory) <= 0]
    return min([choice, *fitting], key=_makespan_s)


def _judged(cost: ModelCost, cuts: Sequence[int], schedule: Schedule, given: Conditions) -> Choice:
    return Choice(
        schedule=schedule,
        cuts=tuple(cuts),
        timeline=simulate(schedule, stage_costs(cost, cuts), given.link),
        rank_bytes=rank_bytes(cost, cuts, schedule, given.memory),
    )


def _tightest(
    cost: ModelCost,
    num_ranks: int,
    num_micro_batches: int,
    given: Conditions,
    cuts: Sequence[int] | None,
    found: Sequence[Choice],
) -> Choice:
    """Return the fastest that fits with fewer micro-batches in flight than fill the pipeline.

    Raises:
        DoesNotFit: even one in flight does not fit.
    """
    assert given.memory is not None
    tried = list(found)
    num_virtual = 1 if cuts is None else (len(cuts) + 1) // num_ranks
    if "backward_first" in given.names and num_ranks * num_virtual <= len(cost.units):
        most = min(num_micro_batches, given.active_micro_batches or num_ranks) - 1
        for active in range(most, 0, -1):
            case = _Case("backward_first", num_ranks, num_virtual, num_micro_batches, active)
            choice = _place(cost, case, given, cuts)
            if choice.missing_bytes(given.memory) <= 0:
                return choice
            tried.append(choice)
    best = min(tried, key=lambda choice: max(choice.rank_bytes))
    missing = best.missing_bytes(given.memory)
    fullest = max(range(num_ranks), key=lambda rank: best.rank_bytes[rank])
    raise DoesNotFit(
        f"no schedule of {num_ranks} ranks fits {in_gb(given.memory.limit_bytes)} a device: the best, "
        f"{best.schedule.name!r}, needs {in_gb(missing)} more on rank {fullest}; take more ranks, smaller "
        "micro-batches, sharded state or a device with more memory",
        missing,
    )
