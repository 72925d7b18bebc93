"""Schedules made by a rule instead of a formula: a backward whenever one is possible.

That is how the schedule of SageMaker's model parallelism is described ("prioritizes backward passes whenever
possible", with at most ``active_microbatches`` under way). It is applied to the costs of the real stages, on
a clock of predicted times, once and for all: what the ranks get is a list.

The rule leaves some things open, and a handful of answers are tried on the simulator: how many micro-batches
are admitted, which of several forwards is taken, whether the ranks behind keep less than the first, and
whether a rank waits for a backward that is about to come. With one stage a rank it was 2 to 6 % faster than
1F1B where relays take time, and as fast where they do not; with several, interleaved 1F1B mostly was faster,
by up to 11 % (40 random pipelines). Waiting for longer than a quarter of a backward was never better.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from shoal.decide.actions import Action, Schedule, loop_placement, vee_placement
from shoal.decide.cost import Link, StageCost
from shoal.decide.pipeline_simulator import Simulator, peak_bytes, rounded

_PATIENCE = (0.0, 0.25)
"""How long a rank waits for a backward while it could do a forward, in mean backward times."""
_MAX_ACTIONS = 20_000
"""Of all settings together; of a large schedule only the first settings are tried, which mostly are best."""

_Key = tuple[float, int, int, int]
"""What is taken first: earliest begin, kind, and two of the rule's preferences."""


def best_greedy(
    name: str,
    *,
    num_ranks: int,
    num_virtual: int,
    num_micro_batches: int,
    costs: Sequence[StageCost],
    link: Link | None,
    active_micro_batches: int | None,
) -> Schedule:
    """Return the fastest of the rule's settings, the one that keeps least among equally fast ones.

    Without ``active_micro_batches``, as many as ranks, two more (SageMaker's default) and twice as many are
    tried.
    """
    vee = name != "backward_first"
    placement = vee_placement(num_ranks) if vee else loop_placement(num_ranks, num_virtual)
    if active_micro_batches is None:
        limits: tuple[int, ...] = (2 * num_ranks, num_ranks + 2, num_ranks)
    else:
        limits = (active_micro_batches,)
    mean_backward_s = sum(cost.backward_s for cost in costs) / len(costs)
    settings = list(product(_PATIENCE, (True, False), limits))
    most = _MAX_ACTIONS // (2 * len(placement) * num_micro_batches)
    schedules = {
        _Greedy(
            placement,
            num_micro_batches,
            costs,
            link,
            active=active,
            preference=preference,
            patience_s=patience * mean_backward_s,
            split=name == "zbv",
        ).actions(): None
        for patience, preference, active in settings[: max(1, most)]
    }
    return min(
        (
            Schedule(name=name, placement=placement, num_micro_batches=num_micro_batches, actions=actions)
            for actions in schedules
        ),
        key=lambda schedule: _value(schedule, costs, link),
    )


def _value(schedule: Schedule, costs: Sequence[StageCost], link: Link | None) -> tuple[float, int, int]:
    """Return what the best has least of: time, then bytes; unknown bytes count one a stage."""
    known = any(cost.saved_bytes for cost in costs)
    kept = peak_bytes(schedule, [cost.saved_bytes if known else 1 for cost in costs])
    return rounded(Simulator(schedule).makespan_s(costs, link)), max(kept), sum(kept)


class _Greedy:
    """The rule at work: a clock for each rank, and what has arrived at each stage."""

    def __init__(
        self,
        placement: Sequence[int],
        num_micro_batches: int,
        costs: Sequence[StageCost],
        link: Link | None,
        *,
        active: int,
        preference: bool,
        patience_s: float,
        split: bool,
    ) -> None:
        num_ranks = max(placement) + 1
        self._placement = placement
        self._stages = [[s for s, r in enumerate(placement) if r == rank] for rank in range(num_ranks)]
        self._costs = costs
        self._relay_s = [link.seconds(cost.relay_bytes) if link else 0.0 for cost in costs]
        several = len(placement) > num_ranks
        self._active, self._patience_s = active, patience_s
        # With several stages a rank: forwards in rounds, or the deepest first. With one: less and less kept.
        self._rounds, self._tapered = several and preference, not several and preference
        self._backward, self._share = ("I", 0.5) if split else ("B", 1.0)
        self._clock = [0.0] * num_ranks
        self._kept = [0] * num_ranks
        # When the forward's and the backward's values came, one entry for each micro-batch that has come.
        self._inputs: list[list[float]] = [[] for _ in placement]
        self._inputs[0] = [0.0] * num_micro_batches
        self._gradients: list[list[float]] = [[] for _ in placement]
        self._num_done = {kind: [0] * len(placement) for kind in "FBW"}
        self._lists: list[list[Action]] = [[] for _ in range(num_ranks)]

    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """Take the action that can begin first, over all ranks, until none is left."""
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
        """Return what the rank does next, with its key; None where it can do nothing yet."""
        options: list[tuple[_Key, Action]] = []
        now = self._clock[rank]
        num_ranks = len(self._clock)
        for stage in self._stages[rank]:
            batch = self._num_done["B"][stage]
            if batch < len(self._gradients[stage]):
                begin = max(now, self._gradients[stage][batch])
                options.append(
                    ((begin - self._patience_s, 0, batch, -stage), self._action("B", stage, batch))
                )
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
        """Whether a forward may begin: the first stage keeps the number of micro-batches that are under way.

        A micro-batch that is under way always gets through. Tapered ranks keep one less than the rank before
        them, as in 1F1B. Where weight gradients are put off, a rank that keeps too much does some first.
        """
        if stage == 0 and self._num_done["F"][0] - self._num_done["B"][0] >= self._active:
            return False
        if self._tapered:
            return self._kept[rank] < max(1, self._active - rank)
        return self._backward == "B" or self._kept[rank] < self._active * len(self._stages[rank])

    def _action(self, kind: str, stage: int, batch: int) -> Action:
        return Action(self._backward if kind == "B" else kind, stage, batch)

    def _take(self, rank: int, action: Action) -> int:
        """Do an action; return the rank that receives its value (the same one where nobody else does)."""
        kind, stage, batch = action
        cost, last = self._costs[stage], len(self._placement) - 1
        counted = "B" if kind == "I" else kind
        if counted == "B":
            begin = max(self._clock[rank], self._gradients[stage][batch])
            end = begin + cost.backward_s * self._share
        elif kind == "F":
            begin = max(self._clock[rank], self._inputs[stage][batch])
            end = begin + cost.forward_s
        else:
            end = self._clock[rank] + cost.backward_s * self._share
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
