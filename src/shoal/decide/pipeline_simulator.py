"""Simulates a step of a pipeline, to compare layouts.

A rank does its actions in order, each as soon as its inputs have arrived. A forward needs the previous stage,
a backward the next stage, on the same micro-batch; values between two ranks travel while both compute, one
message after the other in each direction of each pair of ranks. The gradient of a relayed value is as large
as the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.decide.cost import Link, StageCost
from shoal.errors import UsageError
from shoal.record import PipelineBox


class Action(NamedTuple):
    """One computation of one stage on one micro-batch."""

    kind: str
    """``F`` forward, ``B`` full backward; or in two: ``I`` input gradient, ``W`` weight gradient."""
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        """Return stage, kind and micro-batch: ``2F5``, as torch.distributed.pipelining writes it."""
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The computations of each rank of a pipeline, in order."""

    name: str
    placement: tuple[int, ...]
    """The pipeline rank of each stage."""
    num_micro_batches: int
    actions: tuple[tuple[Action, ...], ...]
    """Per rank; computation only: sends and receives follow from it."""

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @property
    def num_ranks(self) -> int:
        return len(self.actions)


def loop_placement(num_ranks: int, num_virtual: int) -> tuple[int, ...]:
    """Return the rank of each stage, dealt out in turn: 0, 1, ..., R - 1, 0, 1, ..."""
    return tuple(range(num_ranks)) * num_virtual


def vee_placement(num_ranks: int) -> tuple[int, ...]:
    """Return the rank of each of two stages per rank, in a V: 0, 1, ..., R - 1, R - 1, ..., 1, 0.

    The first and the last stage share a rank, so embeddings tied to the output layer need no reduction.
    """
    return (*range(num_ranks), *reversed(range(num_ranks)))


class TimedAction(NamedTuple):
    """An action of a rank and its time, in seconds since the step began."""

    rank: int
    action: Action
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step of a pipeline."""

    boxes: tuple[TimedAction, ...]
    """Rank by rank, each rank's in the order of computation."""
    rank_end_s: tuple[float, ...]
    """End of each rank's last action."""
    makespan_s: float
    """End of the last action of all."""
    bubble: float
    """The share of ``num_ranks * makespan_s`` in which ranks do not compute."""
    peak_saved_bytes: tuple[int, ...]
    """Per rank: the most bytes kept for backward at one time."""


def simulate(schedule: Schedule, costs: Sequence[StageCost], link: Link | None = None) -> Timeline:
    """Return the timeline of a step of ``schedule``; without a ``link`` relays take no time.

    Raises:
        UsageError: the number of costs is not that of the stages, or the ranks' orders deadlock.
    """
    simulator = Simulator(schedule)
    begins, ends = simulator.times(costs, link)
    boxes = sorted(
        (
            TimedAction(event.rank, action, begin, end)
            for event, action, begin, end in zip(
                simulator.events, simulator.actions, begins, ends, strict=True
            )
        ),
        key=lambda box: box.rank,  # stable: events keep the order of each rank
    )
    rank_end: list[float] = [0] * schedule.num_ranks
    for box in boxes:
        rank_end[box.rank] = box.end_s
    makespan = max(rank_end)
    busy = sum(box.end_s - box.begin_s for box in boxes)
    return Timeline(
        boxes=tuple(boxes),
        rank_end_s=tuple(rank_end),
        makespan_s=makespan,
        bubble=1 - busy / (schedule.num_ranks * makespan) if makespan else 0.0,
        peak_saved_bytes=peak_bytes(schedule, [cost.saved_bytes for cost in costs]),
    )


def recorded(timeline: Timeline) -> list[PipelineBox]:
    """Return the boxes as the record of a run holds them."""
    return [
        PipelineBox(rank, action.stage, action.kind, action.micro_batch, begin_s, end_s)
        for rank, action, begin_s, end_s in timeline.boxes
    ]


def rounded(seconds: float) -> float:
    """Round a time for comparison: sums of the same times in another order are equal."""
    return float(f"{float(seconds):.9g}")


class _Event(NamedTuple):
    """An action with everything that does not depend on costs."""

    rank: int
    duration: int
    """Index into the durations."""
    awaited: int
    """The event whose value it needs, or -1."""
    relay: int
    """Index into the relayed bytes of the value that it sends to another rank, or -1."""
    wire: int
    """Direction of the pair of ranks that the value takes."""


_Key = tuple[str, int, int]
_KINDS = {"F": 0, "B": 1, "I": 2, "W": 2}


class Simulator:
    """A schedule prepared for simulation with many costs: the search for cuts needs thousands."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.events, self.actions = _order(schedule)
        self._num_wires = 1 + max((event.wire for event in self.events), default=0)

    def makespan_s(self, costs: Sequence[StageCost], link: Link | None = None) -> float:
        return max(self.times(costs, link)[1])

    def times(self, costs: Sequence[StageCost], link: Link | None) -> tuple[list[float], list[float]]:
        """Return when each event begins and ends."""
        if len(costs) != self.schedule.num_stages:
            raise UsageError(f"{len(costs)} costs for a schedule of {self.schedule.num_stages} stages")
        durations: list[float] = []
        for cost in costs:
            durations += (cost.forward_s, cost.backward_s, cost.backward_s / 2)
        transfer = [cost.relay_bytes / link.bytes_per_s if link else 0 for cost in costs]
        latency = [link.latency_s if link and cost.relay_bytes else 0 for cost in costs]
        clock: list[float] = [0] * self.schedule.num_ranks
        wire_free: list[float] = [0] * self._num_wires
        begins: list[float] = []
        ends: list[float] = []
        arrivals: list[float] = []
        for rank, duration, awaited, relay, wire in self.events:
            begin = clock[rank]
            if awaited >= 0 and arrivals[awaited] > begin:
                begin = arrivals[awaited]
            end = begin + durations[duration]
            clock[rank] = end
            begins.append(begin)
            ends.append(end)
            if relay >= 0:
                # A rank's values leave in the order of its actions, so the wire serves them in that order.
                wire_free[wire] = max(end, wire_free[wire]) + transfer[relay]
                arrivals.append(wire_free[wire] + latency[relay])
            else:
                arrivals.append(end)
        return begins, ends


def peak_bytes(schedule: Schedule, stage_bytes: Sequence[int]) -> tuple[int, ...]:
    """Return the peak bytes of each rank, if a stage keeps ``stage_bytes`` for each micro-batch.

    From the beginning of its forward to the end of its backward, or of ``W`` where that is split.
    """
    peaks = []
    for actions in schedule.actions:
        kept = peak = 0
        for kind, stage, _ in actions:
            if kind == "F":
                kept += stage_bytes[stage]
                peak = max(peak, kept)
            elif kind != "I":
                kept -= stage_bytes[stage]
        peaks.append(peak)
    return tuple(peaks)


def num_kept(schedule: Schedule) -> tuple[int, ...]:
    """Return the most micro-batches that each stage keeps in memory at one time."""
    kept, peak = [0] * schedule.num_stages, [0] * schedule.num_stages
    for actions in schedule.actions:
        for kind, stage, _ in actions:
            kept[stage] += {"F": 1, "I": 0}.get(kind, -1)
            peak[stage] = max(peak[stage], kept[stage])
    return tuple(peak)


def _order(schedule: Schedule) -> tuple[list[_Event], list[Action]]:
    """Return the actions of all ranks in an order in which each finds its inputs.

    Each rank is followed until it has to wait; the awaited action wakes it again.
    """
    placement, last = schedule.placement, schedule.num_stages - 1
    next_action = [0] * schedule.num_ranks
    done: dict[_Key, int] = {}
    waiting: dict[_Key, int] = {}
    awake = list(range(schedule.num_ranks))
    events: list[_Event] = []
    order: list[Action] = []
    while awake:
        rank = awake.pop()
        own = schedule.actions[rank]
        while next_action[rank] < len(own):
            action = own[next_action[rank]]
            needs = _needs(action, last)
            missing = next((key for key in needs if key is not None and key not in done), None)
            if missing is not None:
                waiting[missing] = rank
                break
            kind, stage, batch = action
            to = stage + 1 if kind == "F" else stage - 1
            sends = kind != "W" and 0 <= to <= last and placement[to] != rank
            events.append(
                _Event(
                    rank=rank,
                    duration=3 * stage + _KINDS[kind],
                    awaited=-1 if needs[0] is None else done[needs[0]],
                    relay=min(stage, to) if sends else -1,
                    wire=rank * schedule.num_ranks + placement[to] if sends else 0,
                )
            )
            order.append(action)
            key = ("G" if kind in "BI" else kind, stage, batch)
            done[key] = len(events) - 1
            next_action[rank] += 1
            if key in waiting:
                awake.append(waiting.pop(key))
    for rank, actions in enumerate(schedule.actions):
        if next_action[rank] < len(actions):
            raise UsageError(
                f"schedule {schedule.name!r} stands still: rank {rank} waits at "
                f"{actions[next_action[rank]]}, whose values never come; put its actions in another order"
            )
    return events, order


def _needs(action: Action, last: int) -> tuple[_Key | None, _Key | None]:
    """Return the events of another stage and of its own that must precede an action.

    The action receives the value of the first. ``G`` is the gradient for the stage before.
    """
    kind, stage, batch = action
    if kind == "F":
        return ("F", stage - 1, batch) if stage else None, None
    if kind == "W":
        return None, ("G", stage, batch)
    return ("G", stage + 1, batch) if stage < last else None, ("F", stage, batch)
