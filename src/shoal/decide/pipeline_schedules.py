"""In which order the ranks of a pipeline compute: the schedules by name.

    gpipe           all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965)
    1f1b            forwards until the first backward is there, then by turns (PipeDream-Flush, Narayanan et
                    al. 2021, arXiv 2006.09503)
    interleaved     1F1B over several stages a rank (Narayanan et al. 2021, arXiv 2104.04473, section 2.2)
    bfs             GPipe over several stages a rank, breadth first (Lamy-Poirier 2022, arXiv 2211.05953)
    vee             backward first, two stages a rank placed there and back, so that first and last share one
    backward_first  a backward whenever one is possible, as SageMaker's model parallelism ran it
    zbv             like vee, with the weight gradients put off into the idle time (Qi et al. 2024, arXiv
                    2405.15362). Only on request: autograd must be able to split the model's backward

R ranks with v stages each and M micro-batches are idle for (R - 1) / (M + R - 1) of the step under gpipe and
1f1b and for (R - 1) / (vM + R - 1) under interleaved and bfs, where stages are equal and relays take no time.
Rank r keeps min(M, R - r) micro-batches for its backwards under 1f1b, and M under gpipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from shoal.decide.actions import Action, Schedule, loop_placement
from shoal.decide.cost import Link, StageCost
from shoal.decide.schedule_greedy import best_greedy
from shoal.errors import UsageError, did_you_mean

__all__ = [
    "GREEDY",
    "NAMES",
    "Action",
    "Schedule",
    "check_schedule_name",
    "make_schedule",
    "num_virtual_choices",
]

NAMES = ("gpipe", "1f1b", "interleaved", "bfs", "vee", "backward_first", "zbv")
GREEDY = ("vee", "backward_first", "zbv")
_VIRTUAL = {"gpipe": (1, 1), "1f1b": (1, 1), "vee": (2, 2), "zbv": (2, 2)}
"""Fewest and most stages a rank; the others take any number."""


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
    """Return the schedule called ``name`` for ``num_ranks * num_virtual`` stages.

    Args:
        costs: one a stage; the greedy schedules (vee, backward_first, zbv) fit their order to them. Default:
            equal stages whose backward takes twice the time of the forward.
        link: what relays between ranks take, for the greedy schedules.
        active_micro_batches: how many micro-batches may be under way at once, from the first stage's forward
            to its backward; the bound on memory of the greedy schedules. Default: the fastest of three, up to
            twice the ranks.

    Raises:
        UsageError: an unknown name, a number of stages a rank or of micro-batches that the schedule cannot
            have, or a number of costs that is not that of the stages.
    """
    check_schedule_name(name)
    _check_sizes(name, num_ranks, num_virtual, num_micro_batches, active_micro_batches)
    if costs is not None and len(costs) != num_ranks * num_virtual:
        raise UsageError(
            f"{len(costs)} costs for {num_ranks} ranks of {num_virtual} stages; "
            f"give one for each of the {num_ranks * num_virtual} stages"
        )
    if name in GREEDY:
        return best_greedy(
            name,
            num_ranks=num_ranks,
            num_virtual=num_virtual,
            num_micro_batches=num_micro_batches,
            costs=costs or [StageCost(forward_s=1.0, backward_s=2.0)] * (num_ranks * num_virtual),
            link=link,
            active_micro_batches=active_micro_batches,
        )
    if name == "interleaved":
        _check_groups(num_ranks, num_micro_batches)
    make = {"gpipe": _looped, "bfs": _looped, "1f1b": _one_by_one, "interleaved": _interleaved}[name]
    return Schedule(
        name=name,
        placement=loop_placement(num_ranks, num_virtual),
        num_micro_batches=num_micro_batches,
        actions=tuple(
            tuple(make(rank, num_ranks, num_virtual, num_micro_batches)) for rank in range(num_ranks)
        ),
    )


def check_schedule_name(name: str) -> None:
    """Raise UsageError unless there is a schedule of this name."""
    if name not in NAMES:
        raise UsageError(
            f"no schedule is called {name!r}.{did_you_mean(name, NAMES)} There are {', '.join(NAMES)}"
        )


def num_virtual_choices(name: str, wanted: Sequence[int]) -> list[int]:
    """Return those of the wanted numbers of stages a rank that the schedule can have."""
    least, most = _VIRTUAL.get(name, (1, max(wanted, default=1)))
    return [number for number in wanted if least <= number <= most]


def _check_sizes(
    name: str, num_ranks: int, num_virtual: int, num_micro_batches: int, active_micro_batches: int | None
) -> None:
    for what, value in (
        ("the number of ranks", num_ranks),
        ("the number of stages a rank", num_virtual),
        ("the number of micro-batches", num_micro_batches),
        ("active_micro_batches", 1 if active_micro_batches is None else active_micro_batches),
    ):
        if value < 1:
            raise UsageError(f"{what} is {value}; a schedule needs at least 1")
    least, most = _VIRTUAL.get(name, (1, num_virtual))
    if not least <= num_virtual <= most:
        others = "'interleaved' or 'bfs'" if num_virtual > 1 else "'1f1b' or 'backward_first'"
        raise UsageError(
            f"schedule {name!r} has {least} stage{'s' * (least > 1)} a rank, not {num_virtual}; "
            f"{others} can have {num_virtual}"
        )


def _check_groups(num_ranks: int, num_micro_batches: int) -> None:
    """Refuse what interleaving cannot group: it takes micro-batches in equal rounds of at least R."""
    if num_micro_batches < num_ranks:
        raise UsageError(
            f"schedule 'interleaved' needs at least as many micro-batches as ranks, and there are "
            f"{num_micro_batches} for {num_ranks}: take {num_ranks} or more, or 'backward_first'"
        )
    num_rounds = num_micro_batches // num_ranks
    if num_micro_batches % num_rounds:
        below, above = (
            next(n for n in count(num_micro_batches, step) if n % (n // num_ranks) == 0) for step in (-1, 1)
        )
        raise UsageError(
            f"schedule 'interleaved' cannot divide {num_micro_batches} micro-batches over {num_ranks} ranks "
            f"into {num_rounds} equal rounds; the nearest numbers that it can are {below} and {above}"
        )


def _looped(rank: int, num_ranks: int, num_virtual: int, num_micro_batches: int) -> list[Action]:
    """All micro-batches through one stage after the other, and the whole way back."""
    stages = range(rank, num_ranks * num_virtual, num_ranks)
    forward = [Action("F", stage, batch) for stage in stages for batch in range(num_micro_batches)]
    return forward + [Action("B", s, batch) for s in reversed(stages) for batch in range(num_micro_batches)]


def _one_by_one(rank: int, num_ranks: int, num_virtual: int, num_micro_batches: int) -> list[Action]:
    batches = range(num_micro_batches)
    forward = [Action("F", rank, batch) for batch in batches]
    backward = [Action("B", rank, batch) for batch in batches]
    return _by_turns(forward, backward, num_ahead=num_ranks - 1 - rank)


def _interleaved(rank: int, num_ranks: int, num_virtual: int, num_micro_batches: int) -> list[Action]:
    """Rounds of micro-batches go through the rank's stages in turn, the next round behind the last stage.

    The first backward reaches the rank when a whole round has been through its earlier stages and two
    forwards have been done for each rank behind it.
    """
    if num_virtual == 1:
        return _one_by_one(rank, num_ranks, num_virtual, num_micro_batches)
    num_rounds = num_micro_batches // num_ranks
    size = num_micro_batches // num_rounds
    stages = range(rank, num_ranks * num_virtual, num_ranks)
    rounds = [range(i * size, (i + 1) * size) for i in range(num_rounds)]
    forward = [Action("F", stage, batch) for group in rounds for stage in stages for batch in group]
    backward = [Action("B", s, batch) for group in rounds for s in reversed(stages) for batch in group]
    return _by_turns(forward, backward, num_ahead=(num_virtual - 1) * size + 2 * (num_ranks - 1 - rank))


def _by_turns(forward: list[Action], backward: list[Action], *, num_ahead: int) -> list[Action]:
    """``num_ahead`` forwards, then a forward and a backward by turns, then the backwards that are left."""
    num_ahead = min(num_ahead, len(forward))
    actions = forward[:num_ahead]
    for pair in zip(forward[num_ahead:], backward, strict=False):
        actions += pair
    return actions + backward[len(forward) - num_ahead :]
