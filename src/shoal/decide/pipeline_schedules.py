"""Constructs the schedules of a pipeline: the order in which each rank computes.

    gpipe           all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965)
    1f1b            forwards until the first backward can start, then alternating (PipeDream-Flush, Narayanan
                    et al. 2021, arXiv 2006.09503)
    interleaved     1F1B over several stages per rank (Narayanan et al. 2021, arXiv 2104.04473, section 2.2)
    bfs             GPipe over several stages per rank, breadth first (Lamy-Poirier 2022, arXiv 2211.05953)
    vee             backward first, two stages per rank in a V, so that the first and the last share one
    backward_first  a backward whenever one is possible, as SageMaker's model parallelism ran it
    zbv             like vee, with weight gradients delayed into idle time (Qi et al. 2024, arXiv 2405.15362).
                    Only on request: autograd must be able to split the model's backward

With R ranks of v stages and M micro-batches, equal stages and free relays, gpipe and 1f1b are idle for
(R - 1) / (M + R - 1) of the step, interleaved and bfs for (R - 1) / (vM + R - 1). Rank r keeps
min(M, R - r) micro-batches for its backwards under 1f1b, and M under gpipe.

The greedy schedules (vee, backward_first, zbv) follow a rule instead of a formula, that of SageMaker's model
parallelism ("prioritizes backward passes whenever possible", with at most ``active_microbatches`` in
flight). It runs on a clock of predicted times, once; the ranks get a fixed list. A few settings of the rule
are tried on the simulator: the limit in flight, which of several forwards is taken, whether later ranks keep
less than the first, and whether a rank waits for a backward that is about to arrive. With one stage per rank
it was 2 to 6 % faster than 1F1B where relays take time, and as fast where they do not; with several,
interleaved 1F1B mostly was faster, by up to 11 % (40 random pipelines).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, product

from shoal.decide.cost import Link, StageCost
from shoal.decide.pipeline_simulator import (
    Action,
    Schedule,
    Simulator,
    loop_placement,
    peak_bytes,
    rounded,
    vee_placement,
)
from shoal.errors import UsageError, did_you_mean

NAMES = ("gpipe", "1f1b", "interleaved", "bfs", "vee", "backward_first", "zbv")
GREEDY = ("vee", "backward_first", "zbv")
_VIRTUAL = {"gpipe": (1, 1), "1f1b": (1, 1), "vee": (2, 2), "zbv": (2, 2)}
"""Fewest and most stages per rank; the others take any number."""


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
    """Return the schedule ``name`` for ``num_ranks * num_virtual`` stages.

    Args:
        costs: one per stage; the greedy schedules fit their order to them. Default: equal stages whose
            backward takes twice the time of the forward.
        link: time of relays between ranks, for the greedy schedules.
        active_micro_batches: limit of micro-batches in flight, from the first stage's forward to its
            backward; it bounds the memory of the greedy schedules. Default: the fastest of three, up to twice
            the ranks.

    Raises:
        UsageError: the name is unknown, the schedule does not support the number of stages per rank or of
            micro-batches, or the number of costs is wrong.
    """
    check_schedule_name(name)
    _check_sizes(name, num_ranks, num_virtual, num_micro_batches, active_micro_batches)
    if name in GREEDY:
        costs = costs or [StageCost(forward_s=1.0, backward_s=2.0)] * (num_ranks * num_virtual)
        return _best_greedy(name, num_ranks, num_micro_batches, costs, link, active_micro_batches)
    if name == "interleaved":
        _check_groups(num_ranks, num_micro_batches)
    make = _looped if name in ("gpipe", "bfs") else _interleaved
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


def num_virtual_choices(name: str, counts: Sequence[int]) -> list[int]:
    """Return those of these numbers of stages per rank that the schedule supports."""
    least, most = _VIRTUAL.get(name, (1, max(counts, default=1)))
    return [number for number in counts if least <= number <= most]


def _check_sizes(
    name: str, num_ranks: int, num_virtual: int, num_micro_batches: int, active_micro_batches: int | None
) -> None:
    for quantity, value in (
        ("the number of ranks", num_ranks),
        ("the number of stages per rank", num_virtual),
        ("the number of micro-batches", num_micro_batches),
        ("active_micro_batches", 1 if active_micro_batches is None else active_micro_batches),
    ):
        if value < 1:
            raise UsageError(f"{quantity} is {value}; a schedule needs at least 1")
    least, most = _VIRTUAL.get(name, (1, num_virtual))
    if not least <= num_virtual <= most:
        others = "'interleaved' or 'bfs'" if num_virtual > 1 else "'1f1b' or 'backward_first'"
        raise UsageError(
            f"schedule {name!r} has {least} stage{'s' * (least > 1)} per rank, not {num_virtual}; "
            f"{others} can have {num_virtual}"
        )


def _check_groups(num_ranks: int, num_micro_batches: int) -> None:
    """Refuse numbers that interleaving cannot group: it needs equal rounds of at least R micro-batches."""
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
    """Return all micro-batches through one stage after the other, and the whole way back."""
    stages = range(rank, num_ranks * num_virtual, num_ranks)
    forward = [Action("F", stage, batch) for stage in stages for batch in range(num_micro_batches)]
    return forward + [Action("B", s, batch) for s in reversed(stages) for batch in range(num_micro_batches)]


def _interleaved(rank: int, num_ranks: int, num_virtual: int, num_micro_batches: int) -> list[Action]:
    """Return rounds of micro-batches through the rank's stages in turn, each behind the one before.

    The first backward arrives at the rank when a whole round has been through its earlier stages and two
    forwards have been done for each rank behind it. With one stage per rank, one forward is enough (1F1B).
    """
    num_rounds = num_micro_batches // num_ranks if num_virtual > 1 else 1
    size = num_micro_batches // num_rounds
    stages = range(rank, num_ranks * num_virtual, num_ranks)
    rounds = [range(i * size, (i + 1) * size) for i in range(num_rounds)]
    forward = [Action("F", stage, batch) for group in rounds for stage in stages for batch in group]
    backward = [Action("B", s, batch) for group in rounds for s in reversed(stages) for batch in group]
    for_each_rank = 2 if num_virtual > 1 else 1
    num_ahead = min((num_virtual - 1) * size + for_each_rank * (num_ranks - 1 - rank), len(forward))
    actions = forward[:num_ahead]
    for pair in zip(forward[num_ahead:], backward, strict=False):
        actions += pair
    return actions + backward[len(forward) - num_ahead :]


# ---- greedy schedules: a backward pass whenever one is possible --------------------------------------------

# Longest wait for a backward pass while a forward is ready, in mean backward times. Longer waits than a
# quarter were never better.
_PATIENCE = (0.0, 0.25)
_MAX_ACTIONS = 20_000
"""Limit of all settings together; of a large schedule only the first settings are tried, mostly the best."""

_Key = tuple[float, int, int, int]
"""Order of preference: earliest begin, kind, and two preferences of the rule."""


def _best_greedy(
    name: str,
    num_ranks: int,
    num_micro_batches: int,
    costs: Sequence[StageCost],
    link: Link | None,
    active_micro_batches: int | None,
) -> Schedule:
    """Return the fastest of the rule's settings; among equally fast ones the one that keeps least.

    Without ``active_micro_batches``, limits of the ranks, two more (SageMaker's default) and twice as many
    are tried.
    """
    looped = name == "backward_first"
    placement = loop_placement(num_ranks, len(costs) // num_ranks) if looped else vee_placement(num_ranks)
    limits = [2 * num_ranks, num_ranks + 2, num_ranks]
    if active_micro_batches is not None:
        limits = [active_micro_batches]
    mean_backward_s = sum(cost.backward_s for cost in costs) / len(costs)
    settings = list(product(_PATIENCE, (True, False), limits))
    most = _MAX_ACTIONS // (2 * len(placement) * num_micro_batches)
    orders: dict[tuple[tuple[Action, ...], ...], None] = {}
    for patience, preference, active in settings[: max(1, most)]:
        rule = _Greedy(placement, num_micro_batches, costs, link, split=name == "zbv")
        orders[rule.actions(active, preference, patience * mean_backward_s)] = None
    schedules = (
        Schedule(name=name, placement=placement, num_micro_batches=num_micro_batches, actions=actions)
        for actions in orders
    )
    return min(schedules, key=lambda schedule: _value(schedule, costs, link))


def _value(schedule: Schedule, costs: Sequence[StageCost], link: Link | None) -> tuple[float, int, int]:
    """Return the key to minimise: time, then bytes; unknown bytes count as one per stage."""
    known = any(cost.saved_bytes for cost in costs)
    kept = peak_bytes(schedule, [cost.saved_bytes if known else 1 for cost in costs])
    return rounded(Simulator(schedule).makespan_s(costs, link)), max(kept), sum(kept)


class _Greedy:
    """The rule: a clock per rank, and the values that have arrived at each stage."""

    def __init__(
        self,
        placement: Sequence[int],
        num_micro_batches: int,
        costs: Sequence[StageCost],
        link: Link | None,
        *,
        split: bool,
    ) -> None:
        num_ranks = max(placement) + 1
        self._placement = placement
        self._stages = [[s for s, r in enumerate(placement) if r == rank] for rank in range(num_ranks)]
        self._costs = costs
        self._relay_s = [link.seconds(cost.relay_bytes) if link else 0.0 for cost in costs]
        self._backward, self._share = ("I", 0.5) if split else ("B", 1.0)
        self._clock = [0.0] * num_ranks
        self._kept = [0] * num_ranks
        # Arrival times of the inputs of forwards and backwards, one entry per micro-batch that has arrived.
        self._inputs: list[list[float]] = [[] for _ in placement]
        self._inputs[0] = [0.0] * num_micro_batches
        self._gradients: list[list[float]] = [[] for _ in placement]
        self._num_done = {kind: [0] * len(placement) for kind in "FBW"}
        self._lists: list[list[Action]] = [[] for _ in range(num_ranks)]

    def actions(self, active: int, preference: bool, patience_s: float) -> tuple[tuple[Action, ...], ...]:
        """Take the action that can begin first, over all ranks, until none is left.

        Args:
            active: limit of micro-batches in flight.
            preference: with several stages per rank, forwards in rounds instead of the deepest first; with
                one, tapered.
            patience_s: longest wait for a backward pass while a forward is ready.
        """
        several = len(self._placement) > len(self._clock)
        self._active, self._patience_s = active, patience_s
        self._rounds, self._tapered = several and preference, not several and preference
        best = [self._choose(rank) for rank in range(len(self._clock))]
        while True:
            ready = [(choice[0], rank) for rank, choice in enumerate(best) if choice is not None]
            if not ready:
                return tuple(map(tuple, self._lists))
            rank = min(ready)[1]
            choice = best[rank]
            assert choice is not None
            for changed in {rank, self._take(rank, choice[1])}:
                best[changed] = self._choose(changed)

    def _choose(self, rank: int) -> tuple[_Key, Action] | None:
        """Return the rank's next action with its key; None where none can begin yet."""
        options: list[tuple[_Key, Action]] = []
        now = self._clock[rank]
        num_ranks = len(self._clock)
        for stage in self._stages[rank]:
            batch = self._num_done["B"][stage]
            if batch < len(self._gradients[stage]):
                begin = max(now, self._gradients[stage][batch])
                key = (begin - self._patience_s, 0, batch, -stage)
                options.append((key, Action(self._backward, stage, batch)))
            batch = self._num_done["F"][stage]
            if batch < len(self._inputs[stage]) and self._admits(rank, stage):
                begin = max(now, self._inputs[stage][batch])
                first, second = (batch // num_ranks, stage) if self._rounds else (-stage, batch)
                options.append(((begin, 1, first, second), Action("F", stage, batch)))
            batch = self._num_done["W"][stage]
            if self._backward == "I" and batch < self._num_done["B"][stage]:
                options.append(((now, 2, batch, -stage), Action("W", stage, batch)))
        return min(options, default=None)

    def _admits(self, rank: int, stage: int) -> bool:
        """Return whether a forward may begin: the first stage limits the number of micro-batches in flight.

        A micro-batch in flight always gets through. Tapered ranks keep one less than the rank before them, as
        in 1F1B. Where weight gradients are delayed, a rank that keeps too much does some first.
        """
        if stage == 0 and self._num_done["F"][0] - self._num_done["B"][0] >= self._active:
            return False
        if self._tapered:
            return self._kept[rank] < max(1, self._active - rank)
        return self._backward == "B" or self._kept[rank] < self._active * len(self._stages[rank])

    def _take(self, rank: int, action: Action) -> int:
        """Take an action; return the rank that receives its value (its own where no other does)."""
        kind, stage, batch = action
        cost, last = self._costs[stage], len(self._placement) - 1
        counted = "B" if kind == "I" else kind
        begin = self._clock[rank]
        if kind != "W":
            begin = max(begin, (self._inputs if kind == "F" else self._gradients)[stage][batch])
        end = begin + (cost.forward_s if kind == "F" else cost.backward_s * self._share)
        self._clock[rank] = end
        self._num_done[counted][stage] += 1
        self._kept[rank] += {"F": 1, "I": 0}.get(kind, -1)
        self._lists[rank].append(action)
        if kind == "F":
            if stage == last:
                self._gradients[last].append(end)
                return rank
            to, arrived = stage + 1, self._inputs
        elif counted == "B" and stage > 0:
            to, arrived = stage - 1, self._gradients
        else:
            return rank
        crosses = self._placement[to] != rank
        arrived[to].append(end + self._relay_s[min(stage, to)] if crosses else end)
        return self._placement[to]
