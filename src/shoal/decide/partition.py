"""Cuts a model into stages so that the slowest stage is as fast as possible and memory suffices.

Stages are ranges of units, so the best cuts follow from the best cuts of every prefix of the model:

    best(k, j) = min over i < j of max(best(k - 1, i), cost of units i ... j - 1 as stage k)

which is exact for any cost of a stage that does not depend on the others (dynamic programming, as in
PipeDream, Narayanan et al. 2019). A stage's cost is its time with its relays, or its share of memory, or a
mixture. The slowest stage alone does not decide: with several stages per rank, or uneven stages, the step of
the real schedule counts, and :func:`refine` moves cuts as long as its simulation gets faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from shoal.decide.cost import Link, ModelCost, parameter_bytes, stage_costs
from shoal.decide.pipeline_simulator import Schedule, Simulator, peak_bytes
from shoal.errors import UsageError

Matrix = npt.NDArray[np.float64]
Optimize = Literal["speed", "memory"]

MEMORY_WEIGHT: dict[str, float] = {"speed": 0.0, "memory": 0.8}
"""Weight of a stage's share of memory against its share of time. SageMaker's defaults were 0.2 and 0.8; here
the limit on memory is a constraint of its own, so ``speed`` means speed."""

_STEPS = (8, 4, 2, 1)
"""Distances in units by which the search moves cuts, from coarse to fine."""
MAX_TRIALS, MIN_TRIALS, MAX_TRIAL_ACTIONS = 400, 20, 400_000
"""Limits of :func:`refine`: most and fewest simulations, and their actions together."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory of one device, and the bytes of state per byte of parameters."""

    limit_bytes: int
    gradient_ratio: float = 1.0
    """Bytes of gradients per byte of parameters."""
    optimizer_ratio: float = 2.0
    """Bytes of optimizer state per byte of parameters: Adam in the parameters' precision has 2; bf16
    parameters with fp32 masters and moments have 6."""
    shards: int = 1
    """Number of replicas that share the state. During a step a rank still holds whole parameters and
    gradients beside its shard: gradients of all micro-batches are added up before they are averaged."""
    reserved_bytes: int = 0
    """For the device's library, workspaces and fragmentation."""

    def state_bytes(self, num_bytes: float) -> float:
        """Return the bytes of parameters, gradients and optimizer state for ``num_bytes`` of parameters."""
        whole = 1 + self.gradient_ratio
        if self.shards == 1:
            return num_bytes * (whole + self.optimizer_ratio)
        return num_bytes * (whole + (whole + self.optimizer_ratio) / self.shards)


class DoesNotFit(UsageError):
    """No cuts keep every rank within its memory."""

    def __init__(self, message: str, missing_bytes: int) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes
        """Bytes that the best cuts lack on their fullest rank."""


def partition(
    cost: ModelCost,
    num_stages: int,
    *,
    link: Link | None = None,
    memory: Memory | None = None,
    limited: bool = True,
    num_kept: Sequence[int] | None = None,
    optimize: Optimize = "speed",
    memory_weight: float | None = None,
) -> tuple[int, ...]:
    """Return the cuts: the units at which the second, third, ... stage begins.

    Args:
        link: between stages; a stage's time includes its relays, forward and back. Default: none.
        memory: of the device of each stage. Default: no limit, and parameters count for themselves.
        limited: enforce its limit; otherwise it only gives the bytes of state per byte of parameters.
        num_kept: micro-batches that each stage keeps in memory. Default: as 1F1B, ``num_stages`` for the
            first stage and one less for each further one.
        optimize: ``speed`` minimises the slowest stage; ``memory`` the fullest.
        memory_weight: between them, 0 (time alone) to 1 (memory alone). Default: 0 or 0.8.

    Raises:
        UsageError: more stages than units, or a weight outside of 0 ... 1.
        DoesNotFit: no cuts keep each stage within the limit; the message has the missing bytes.
    """
    weight = MEMORY_WEIGHT[optimize] if memory_weight is None else memory_weight
    if not 0 <= weight <= 1:
        raise UsageError(f"memory_weight is {weight}; it must be between 0 and 1")
    check_num_stages(cost, num_stages)
    kept = list(range(num_stages, 0, -1)) if num_kept is None else list(num_kept)
    seconds = _ranges(unit.forward_s + unit.backward_s for unit in cost.units)
    relayed = [0, *cost.relay_bytes, 0]
    relay_s = np.array([2 * link.seconds(num_bytes) if link else 0.0 for num_bytes in relayed])
    time = (seconds + relay_s) / (float(seconds[0, -1]) or 1.0)
    kept_bytes = _ranges(unit.saved_bytes for unit in cost.units) + np.array(relayed, dtype=float)
    state = (1.0 if memory is None else memory.state_bytes(1.0)) * parameter_ranges(cost)
    whole = float(state[0, -1] + kept[0] * kept_bytes[0, -1]) or 1.0
    room = np.inf
    if memory is not None and limited:
        room = memory.limit_bytes - memory.reserved_bytes - cost.recomputed_bytes

    @cache  # most stages keep as many as some other one
    def share(number: int) -> Matrix:
        held = state + number * kept_bytes
        return np.where(held > room, np.inf, (1 - weight) * time + weight * held / whole)

    worst, cuts = minimax(share(number) for number in kept)
    if np.isinf(worst):
        needed, _ = minimax(state + number * kept_bytes for number in kept)
        missing = int(np.ceil(needed - room))
        raise DoesNotFit(
            f"no cuts into {num_stages} stages fit {in_gb(room)} a device: the best need {in_gb(missing)} "
            "more; take more stages, smaller micro-batches or fewer at one time",
            missing,
        )
    return cuts


def check_num_stages(cost: ModelCost, num_stages: int) -> None:
    """Raise UsageError unless the model can be cut into this number of stages."""
    if num_stages < 1:
        raise UsageError(f"the number of stages is {num_stages}; a pipeline has at least 1")
    if num_stages > len(cost.units):
        raise UsageError(
            f"{num_stages} stages need {num_stages - 1} cut points, and the model has "
            f"{len(cost.units) - 1}: take at most {len(cost.units)} stages (ranks × stages per rank)"
        )


def _ranges(values: Iterable[float]) -> Matrix:
    """Return the sums over all ranges of units: entry [i, j] is that of units i ... j - 1, for i < j."""
    sums = np.array([0.0, *values]).cumsum()
    ranges: Matrix = sums[None, :] - sums[:, None]
    return ranges


def parameter_ranges(cost: ModelCost) -> Matrix:
    """Return the parameter bytes of each range, each parameter once.

    Unit u adds a parameter to the ranges that begin behind the last unit before u that uses it too.
    """
    num_units = len(cost.units)
    added = np.zeros((num_units + 1, num_units + 1))  # [begin, unit + 1]
    last_use: dict[str, int] = {}
    for index, unit in enumerate(cost.units):
        for name, num_bytes in dict(unit.parameters).items():
            added[last_use.get(name, -1) + 1 : index + 1, index + 1] += num_bytes
            last_use[name] = index
    return added.cumsum(axis=1)


def minimax(tables: Iterable[Matrix]) -> tuple[float, tuple[int, ...]]:
    """Return the least possible largest cost of a stage, and cuts that have it.

    Args:
        tables: one per stage; entry [i, j] is the cost of units i ... j - 1 as that stage, for i < j.
    """
    remaining = iter(tables)
    first = next(remaining)
    empty = np.tril(np.ones_like(first, dtype=bool))
    best = np.where(empty[0], np.inf, first[0])
    choices: list[npt.NDArray[np.intp]] = []
    for table in remaining:
        worst = np.where(empty, np.inf, np.maximum(best[:, None], table))
        choices.append(worst.argmin(axis=0))
        best = worst.min(axis=0)
    cuts = [len(best) - 1]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return float(best[-1]), tuple(reversed(cuts[1:]))


def rank_bytes(
    cost: ModelCost, cuts: Sequence[int], schedule: Schedule, memory: Memory | None = None
) -> tuple[int, ...]:
    """Return the memory of each rank: state, reserve, the peak that its schedule keeps, a recomputed layer.

    A parameter that several stages of one rank use counts once. Without ``memory`` the parameters count
    alone.
    """
    stages = stage_costs(cost, cuts)
    bounds = [0, *cuts, len(cost.units)]
    kept = peak_bytes(schedule, [stage.saved_bytes + stage.relay_bytes for stage in stages])
    needed = []
    for rank in range(schedule.num_ranks):
        own = [
            unit
            for stage, placed in enumerate(schedule.placement)
            if placed == rank
            for unit in cost.units[bounds[stage] : bounds[stage + 1]]
        ]
        state = float(parameter_bytes(own))
        if memory is not None:
            state = memory.state_bytes(state) + memory.reserved_bytes
        needed.append(int(np.ceil(state)) + kept[rank] + cost.recomputed_bytes)
    return tuple(needed)


def refine(
    cost: ModelCost,
    cuts: Sequence[int],
    schedule: Schedule,
    *,
    link: Link | None = None,
    memory: Memory | None = None,
) -> tuple[int, ...]:
    """Move cuts as long as a step of ``schedule`` gets faster; return the result.

    A move shifts one cut, or several neighbouring ones together, by a few units. Cuts that exceed the limit
    on memory by less are better than any faster ones. The search ends in cuts that no single move improves,
    or after :data:`MAX_TRIALS` simulations, fewer of a large schedule.
    """
    simulator = Simulator(schedule)
    num_actions = sum(map(len, schedule.actions))
    max_trials = min(MAX_TRIALS, max(MIN_TRIALS, MAX_TRIAL_ACTIONS // num_actions))

    def value(trial: Sequence[int]) -> tuple[int, float]:
        stages = stage_costs(cost, trial)
        beyond = 0
        if memory is not None:
            needed = rank_bytes(cost, trial, schedule, memory)
            beyond = sum(max(0, num_bytes - memory.limit_bytes) for num_bytes in needed)
        return beyond, simulator.makespan_s(stages, link)

    current, best = tuple(cuts), value(cuts)
    tried = {current}
    improved = True
    while improved:
        improved = False
        for first, last, shift in _moves(len(current)):
            trial = tuple(cut + shift if first <= i < last else cut for i, cut in enumerate(current))
            bounds = [0, *trial, len(cost.units)]
            if trial in tried or any(a >= b for a, b in pairwise(bounds)):
                continue
            if len(tried) >= max_trials:
                return current
            tried.add(trial)
            trial_value = value(trial)
            if trial_value < best:
                current, best, improved = trial, trial_value, True
    return current


def _moves(num_cuts: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first, last, shift) of the cuts to shift, first ... last - 1: few cuts before many."""
    for length in range(1, num_cuts + 1):
        for step in _STEPS:
            for first in range(num_cuts - length + 1):
                yield first, first + length, step
                yield first, first + length, -step


def in_gb(num_bytes: float) -> str:
    """Format bytes in decimal units, as device makers do: 40 GB, 3.21 GB, 120 MB."""
    for limit, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if num_bytes >= limit:
            return f"{num_bytes / limit:.3g} {unit}"
    return f"{num_bytes} B"
