"""Tests decisions about steps that do not wait for all workers: who is in, bounds of staleness, refusals."""

from __future__ import annotations

import random
from collections import Counter
from typing import Literal

import pytest

from shoal.decide.bounded_waiting import Contribution, Decision, StepDecider, WaitingRule, simulate


def offer(decider: StepDecider, *gradients: tuple[int, int, int]) -> list[Decision]:
    decisions = []
    for gradient in gradients:
        decider.offer(Contribution(*gradient))
        while decision := decider.decide():
            decisions.append(decision)
    return decisions


def used(decision: Decision) -> list[tuple[int, int]]:
    return [(each.rank, each.batch) for each in decision.used]


def test_a_late_gradient_is_dropped_and_named_with_the_next_step() -> None:
    decider = StepDecider(WaitingRule(3, wait_for=2))
    (first,) = offer(decider, (2, 1, 0), (0, 1, 0))
    assert used(first) == [(0, 1), (2, 1)]
    (second,) = offer(decider, (1, 1, 0), (1, 2, 1), (0, 2, 1))
    assert used(second) == [(0, 2), (1, 2)]
    assert second.dropped == (Contribution(1, 1, 0),)


def test_the_next_step_takes_a_late_gradient_and_waits_for_one_that_would_be_too_old() -> None:
    decider = StepDecider(WaitingRule(3, wait_for=2, late="next", staleness=1))
    (first,) = offer(decider, (0, 1, 0), (1, 1, 0))
    assert used(first) == [(0, 1), (1, 1)]
    assert offer(decider, (0, 2, 1), (1, 2, 1)) == []
    (second,) = offer(decider, (2, 1, 0))
    assert used(second) == [(0, 2), (1, 2), (2, 1)]
    assert offer(decider, (2, 3, 2)) == []
    (third,) = offer(decider, (1, 3, 2))
    assert used(third) == [(1, 3), (2, 3)]


def test_what_is_late_at_the_end_is_dropped() -> None:
    decider = StepDecider(WaitingRule(2, wait_for=1, late="next", staleness=2))
    assert len(offer(decider, (0, 1, 0), (1, 1, 0))) == 1
    assert decider.drop_late() == (Contribution(1, 1, 0),)
    decider.synchronize()
    assert [used(each) for each in offer(decider, (1, 2, 1))] == [[(1, 2)]]


def test_workers_run_ahead_of_steps_that_take_whole_batches() -> None:
    decider = StepDecider(WaitingRule(2, wait_for=2, staleness=2))
    assert offer(decider, (0, 1, 0), (0, 2, 0), (0, 3, 0)) == []
    assert [used(each) for each in offer(decider, (1, 1, 0), (1, 2, 1))] == [
        [(0, 1), (1, 1)],
        [(0, 2), (1, 2)],
    ]


def random_run(rule: WaitingRule, num_steps: int, seed: int) -> tuple[list[Decision], list[Contribution]]:
    """Let workers take random times; return the steps, and all gradients that were offered."""
    draw = random.Random(seed)
    decider = StepDecider(rule)
    steps: list[Decision] = []
    pushed: list[Contribution] = []
    waiting: dict[int, Contribution] = {}
    busy = {rank: (draw.expovariate(1), Contribution(rank, 1, 0)) for rank in range(rule.num_workers)}
    while decider.step < num_steps:
        rank = min(busy, key=lambda rank: busy[rank][0])
        now, gradient = busy.pop(rank)
        if decider.due is not None and decider.due < now:
            busy[rank] = now, gradient
            now = decider.due
        else:
            pushed.append(gradient)
            waiting[rank] = gradient
            decider.offer(gradient, now)
        while decision := decider.decide(now):
            steps.append(decision)
        for other, each in list(waiting.items()):
            if (batch := decider.next_batch(each)) is not None:
                del waiting[other]
                busy[other] = now + draw.expovariate(1), Contribution(other, batch, decider.step)
    return steps, pushed


@pytest.mark.parametrize(
    "rule",
    [
        WaitingRule(5, wait_for=4), WaitingRule(5, wait_for=2), WaitingRule(5, wait_for=2, grace_s=0.5),
        WaitingRule(5, wait_for=4, late="next", staleness=1),
        WaitingRule(5, wait_for=3, late="next", staleness=3),
        WaitingRule(5, wait_for=5), WaitingRule(5, wait_for=5, staleness=1),
        WaitingRule(5, wait_for=5, staleness=4),
    ],
)  # fmt: skip
def test_staleness_never_exceeds_its_bound_and_no_gradient_is_lost(rule: WaitingRule) -> None:
    stalest = 0
    for seed in range(10):
        steps, pushed = random_run(rule, 60, seed)
        assert [step.step for step in steps] == list(range(1, len(steps) + 1))
        for step in steps:
            stale = [each.staleness_in(step.step) for each in step.used]
            assert 0 <= min(stale) <= max(stale) <= rule.staleness
            assert len(step.used) >= rule.wait_for
            stalest = max(stalest, *stale)
        settled = Counter(each for step in steps for each in (*step.used, *step.dropped))
        assert max(settled.values()) == 1
        under_way = Counter(pushed) - settled
        assert len(under_way) <= rule.num_workers * (rule.staleness + 1)
        assert not settled - Counter(pushed)
    assert stalest == rule.staleness, "the bound was not reached: this test shows nothing"


def test_workers_ahead_take_the_time_of_their_own_steps() -> None:
    """Two workers that pause by turns: each step waits for one of them, or none does."""
    seconds = [[1.0, 3.0, 1.0, 1.0], [1.0, 1.0, 1.0, 3.0]]
    assert simulate(WaitingRule(2, wait_for=2), seconds, 400)[0] == pytest.approx(2.0, abs=0.01)
    assert simulate(WaitingRule(2, wait_for=2, staleness=2), seconds, 400)[0] == pytest.approx(1.5, abs=0.02)


def test_a_step_with_enough_gradients_waits_for_its_grace() -> None:
    decider = StepDecider(WaitingRule(3, wait_for=1, grace_s=2.0))
    decider.offer(Contribution(1, 1, 0))
    assert decider.decide(10.0) is None
    assert decider.due == 12.0
    decider.offer(Contribution(0, 1, 0))
    assert decider.decide(11.0) is None
    first = decider.decide(12.0)
    assert first is not None
    assert used(first) == [(0, 1), (1, 1)]
    assert offer(decider, (2, 1, 0), (0, 2, 1), (1, 2, 1)) == []
    (second,) = offer(decider, (2, 2, 1))
    assert used(second) == [(0, 2), (1, 2), (2, 2)], "all are there: nothing to wait for"


@pytest.mark.parametrize(("late_at", "rests"), [(12.9, False), (13.1, True)])
def test_a_worker_far_behind_rests_until_the_next_step_which_does_not_wait_for_it(
    late_at: float, rests: bool
) -> None:
    decider = StepDecider(WaitingRule(3, wait_for=2, grace_s=1.0))
    for rank in (0, 1):
        decider.offer(Contribution(rank, 1, 0), 10.0)
    assert decider.decide(10.0) is None and decider.decide(11.0) is not None
    late = Contribution(2, 1, 0)
    decider.offer(late, late_at)
    assert decider.next_batch(late) == (None if rests else 2)
    for rank in (0, 1):
        decider.offer(Contribution(rank, 2, 1), 14.0)
    second = decider.decide(14.0)
    assert (second is not None) == rests, "a step waits for one that may come within the grace"
    second = second or decider.decide(15.0)
    assert second is not None and second.dropped == (late,)
    assert decider.next_batch(late) == 3
    late = Contribution(2, 3, 2) if rests else Contribution(2, 2, 1)
    decider.offer(late, 30.0)
    assert decider.drop_late() == (() if rests else (late,)), "at the end, it waits for no other step"


@pytest.mark.parametrize("late", ["drop", "next"])
def test_a_step_does_not_wait_for_a_worker_that_is_away(late: Literal["drop", "next"]) -> None:
    decider = StepDecider(WaitingRule(3, wait_for=1, grace_s=1.0, late=late, staleness=int(late == "next")))
    decider.offer(Contribution(0, 1, 0), 1.0)
    decider.offer(Contribution(2, 1, 0), 1.0)
    assert decider.decide(1.0) is None
    decider.leave(1)
    first = decider.decide(1.0)
    assert first is not None and used(first) == [(0, 1), (2, 1)]
    for step in range(2, 5):
        decider.offer(Contribution(0, step, step - 1), 2.0)
        assert decider.decide(2.0) is None, "worker 2 is there"
        decider.offer(Contribution(2, step, step - 1), 2.0)
        assert decider.decide(2.0) is not None
    decider.come_back(1)
    for rank in (0, 2):
        decider.offer(Contribution(rank, 5, 4), 3.0)
    assert decider.decide(3.0) is None
    decider.offer(Contribution(1, 5, 4), 3.5)
    last = decider.decide(3.5)
    assert last is not None and [rank for rank, _ in used(last)] == [0, 1, 2]


@pytest.mark.parametrize("gradient", [(0, 2, 0), (0, 1, 1), (0, 1, -1), (0, 0, -1)])
def test_a_gradient_that_a_worker_cannot_have_is_named(gradient: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="worker 0 has a gradient of batch"):
        StepDecider(WaitingRule(2, wait_for=1)).offer(Contribution(*gradient))


def test_each_gradient_is_an_asynchronous_step() -> None:
    decider = StepDecider(WaitingRule(3, wait_for=1, late="next", asynchronous=True))
    decisions = offer(decider, (2, 1, 0), (0, 1, 0), (2, 2, 1), (1, 1, 0))
    assert [used(each) for each in decisions] == [[(2, 1)], [(0, 1)], [(2, 2)], [(1, 1)]]
    assert [each.used[0].staleness_in(each.step) for each in decisions] == [0, 1, 1, 3]
    assert not decider.take_dropped()
