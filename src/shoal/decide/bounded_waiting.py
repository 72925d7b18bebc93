"""Decides which of the gradients that have arrived a step takes when it does not wait for all workers.

A *batch* has the number of the step for which it is meant (of asynchronous steps, that among its worker's
batches); a *version* of the weights is the number of steps they have seen. The *staleness* of a gradient is
the number of steps that its weights lack: a gradient of version v in step t has staleness t - 1 - v.

The planner simulates with the same code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal

Late = Literal["drop", "next", "partial"]

_GRACES_TO_REST = 2.0
"""A worker that is later than so many graces cannot catch up: it would be late in each of many steps."""


@dataclass(frozen=True)
class WaitingRule:
    """For whom a step waits.

    With ``wait_for`` below the number of workers a step is taken as soon as so many have their gradients;
    late ones are dropped or used in a later step. A worker whose gradient is dropped more than two graces
    after its step rests until the next one, which does not wait for it: beginning in the middle of a step, it
    would be late again. Else a step takes all gradients of its batch, and workers
    run ahead of it. Asynchronous steps take one gradient each, in the order in which they come.

    Attributes:
        num_workers: of the group.
        wait_for: gradients that a step needs.
        late: ``"drop"``: a gradient that is ready after its step is dropped. ``"next"``: the next step takes
            it. ``"partial"``, of local steps: as ``"drop"``, but once a step has enough gradients, the others
            are to hand over what they have done.
        staleness: largest staleness of a gradient.
        grace_s: seconds for which a step that has enough gradients goes on waiting for the others.
        asynchronous: each gradient is a step, whatever its staleness.
    """

    num_workers: int
    wait_for: int
    late: Late = "drop"
    staleness: int = 0
    grace_s: float = 0.0
    asynchronous: bool = False

    @property
    def text(self) -> str:
        """The options, for messages."""
        return (
            f"wait_for={self.wait_for}, late={self.late!r}, staleness={self.staleness}, "
            f"grace_s={self.grace_s:g}{', asynchronous' if self.asynchronous else ''}"
        )

    @property
    def waits_for_all(self) -> bool:
        """True if each step takes the gradients of all workers."""
        return self.wait_for == self.num_workers and not self.asynchronous


@dataclass(frozen=True)
class Share:
    """A worker's part in an exchange of local steps: after which of them, and of how many tokens."""

    step: int
    tokens: int


@dataclass(frozen=True)
class Contribution:
    """A worker's gradient: of which batch, and of which version of the weights; of local steps a share."""

    rank: int
    batch: int
    version: int
    share: Share | None = None

    def staleness_in(self, step: int) -> int:
        """Return how many steps the gradient's weights lack in a step."""
        return step - 1 - self.version


@dataclass(frozen=True)
class Decision:
    """A step: the gradients of which it takes the mean, by rank, and those dropped since the last step."""

    step: int
    used: tuple[Contribution, ...]
    dropped: tuple[Contribution, ...] = ()


class StepDecider:
    """Decides step after step, in the order in which gradients become ready.

    Example:
        >>> decider = StepDecider(WaitingRule(num_workers=3, wait_for=2))
        >>> for rank in (2, 0, 1):
        ...     decider.offer(Contribution(rank, batch=1, version=0))
        ...     if decision := decider.decide():
        ...         print(decision.step, [each.rank for each in decision.used])
        1 [0, 2]
        >>> [each.rank for each in decider.take_dropped()]
        [1]

    Args:
        rule: for whom a step waits.
        after: steps that the weights have seen.

    Attributes:
        step: the last one decided.
        due: when to ask for the next step though nothing comes; ``None``: only then.
    """

    def __init__(self, rule: WaitingRule, *, after: int = 0) -> None:
        self.rule = rule
        self.step = after
        self.due: float | None = None
        self._ready: list[deque[Contribution]] = [deque() for _ in range(rule.num_workers)]
        self._num_ready = 0
        self._last = [after] * rule.num_workers
        """by rank: a version that the worker's next gradient has at least"""
        self._dropped: list[Contribution] = []
        self._resting: list[Contribution] = []  # dropped, of workers that wait for the next step
        self._away: set[int] = set()  # workers that no step waits for
        self._taken_at = 0.0

    def offer(self, gradient: Contribution, now: float = 0.0) -> None:
        """Take note of a gradient that is ready; ``now`` is the time, as in :meth:`decide`.

        Raises:
            ValueError: the worker cannot have it.
        """
        rule, queue = self.rule, self._ready[gradient.rank]
        if rule.waits_for_all:
            next_batch = (queue[-1].batch if queue else self.step) + 1
            fits = gradient.batch == next_batch and gradient.staleness_in(next_batch) <= rule.staleness
        else:
            fits = not queue and (rule.asynchronous or gradient.batch == gradient.version + 1)
        if not fits or not 0 <= gradient.version <= self.step:
            raise ValueError(
                f"worker {gradient.rank} has a gradient of batch {gradient.batch} and version "
                f"{gradient.version} after step {self.step}"
            )
        if rule.late != "next" and gradient.batch <= self.step:
            rests = (
                rule.late == "drop" and rule.grace_s and now - self._taken_at > _GRACES_TO_REST * rule.grace_s
            )
            (self._resting if rests else self._dropped).append(gradient)
            return
        self._num_ready += not queue
        queue.append(gradient)

    def decide(self, now: float = 0.0) -> Decision | None:
        """Return the next step if its gradients are there; ``now`` is any clock's time in seconds."""
        rule, step = self.rule, self.step + 1
        if self._num_ready < rule.wait_for:
            return None
        heads = [queue[0] for queue in self._ready if queue]
        if rule.asynchronous:
            heads = heads[:1]  # it is asked after each offer, so there is one
        elif not rule.waits_for_all:
            if not any(each.batch == step for each in heads):
                return None
            if rule.late == "next" and any(
                self._last[rank] < step - rule.staleness for rank in self._missing()
            ):
                return None  # a gradient that this step does not take would be too old in the next one
            if rule.grace_s and self._missing():
                self.due = now + rule.grace_s if self.due is None else self.due
                if now < self.due:
                    return None
        for each in heads:
            queue = self._ready[each.rank]
            queue.popleft()
            self._num_ready -= not queue
            self._last[each.rank] = step
        dropped = (*self.take_dropped(), *self._resting)
        self.step, self.due, self._taken_at, self._resting = step, None, now, []
        return Decision(step, tuple(heads), dropped)

    def _missing(self) -> list[int]:
        """Return the workers that compute the gradient which the next step lacks."""
        others = self._away | {each.rank for each in self._resting}
        return [rank for rank, queue in enumerate(self._ready) if not queue and rank not in others]

    def leave(self, rank: int) -> None:
        """Take note that steps do not wait for a worker; the gradient that it has is used."""
        self._away.add(rank)

    def come_back(self, rank: int) -> None:
        """Take note that a worker that was away goes on with the weights of the last step."""
        self._away.discard(rank)
        self._last[rank] = self.step

    def next_batch(self, gradient: Contribution) -> int | None:
        """Return the batch that a worker begins after it has offered a gradient; ``None``: it waits."""
        if self.rule.waits_for_all:
            return gradient.batch + 1 if self.step >= gradient.batch - self.rule.staleness else None
        if any(each.rank == gradient.rank for each in self._resting):
            return None
        settled = self.step if self.rule.late != "next" else self._last[gradient.rank]
        return self.step + 1 if settled >= gradient.batch else None

    def drop_late(self) -> tuple[Contribution, ...]:
        """Drop the gradients of steps that have been taken, and return them; at the end of training."""
        late = tuple(queue.popleft() for queue in self._ready if queue and queue[0].batch <= self.step)
        self._num_ready -= len(late)
        resting, self._resting = tuple(self._resting), []
        return late + resting

    def synchronize(self) -> None:
        """Take note that all workers have the weights of the last step."""
        self._last = [self.step] * self.rule.num_workers

    def take_dropped(self) -> tuple[Contribution, ...]:
        """Return the gradients that have been dropped since the last call."""
        dropped, self._dropped = tuple(self._dropped), []
        return dropped


def simulate(rule: WaitingRule, seconds: Sequence[Sequence[float]], num_steps: int) -> tuple[float, float]:
    """Return the seconds of a step, and the gradients that it takes, where only computing takes time.

    Args:
        rule: for whom steps wait.
        seconds: of each worker's gradients, one after the other, and again from the first.
        num_steps: that are taken.

    Example:
        >>> slow = [[1.0], [1.0], [3.0]]
        >>> simulate(WaitingRule(3, wait_for=3), slow, 100), simulate(WaitingRule(3, wait_for=2), slow, 100)
        ((3.0, 3.0), (1.0, 2.0))
    """
    decider = StepDecider(rule)
    drawn = [0] * rule.num_workers
    busy: list[tuple[float, int, Contribution | None]] = []
    held: dict[int, Contribution] = {}

    def begin(rank: int, batch: int, now: float) -> None:
        took = seconds[rank][drawn[rank] % len(seconds[rank])]
        drawn[rank] += 1
        heappush(busy, (now + took, rank, Contribution(rank, batch, decider.step)))

    for rank in range(rule.num_workers):
        begin(rank, 1, 0.0)
    now, num_used = 0.0, 0
    while decider.step < num_steps:
        now, rank, gradient = heappop(busy)
        if gradient is not None:
            decider.offer(gradient, now)
            held[rank] = gradient
        going_on = [rank]
        while decider.step < num_steps and (decision := decider.decide(now)):
            num_used += len(decision.used)
            going_on = list(held)
        if decider.due is not None:
            heappush(busy, (decider.due, -1, None))
        for each in going_on:
            if each in held and (batch := decider.next_batch(held[each])) is not None:
                del held[each]
                begin(each, batch, now)
    return now / num_steps, num_used / num_steps
