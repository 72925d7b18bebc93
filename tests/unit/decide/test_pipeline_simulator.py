"""The simulator: bubbles are the formulas' exactly, times those of an independent solver, bytes theory's."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.decide.cost import Link, StageCost
from shoal.decide.pipeline_schedules import NAMES, make_schedule, num_virtual_choices
from shoal.decide.pipeline_simulator import Action, Schedule, num_kept, peak_bytes, simulate
from shoal.errors import UsageError


def equal(num_stages, forward=Fraction(1), backward=Fraction(2), saved=7):
    return [StageCost(forward_s=forward, backward_s=backward, saved_bytes=saved)] * num_stages


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("ratio", [Fraction(1), Fraction(2), Fraction(7, 3)])
def test_bubble_of_gpipe_and_1f1b_is_the_formula(name, ratio):
    for num_ranks in range(1, 9):
        for num_micro_batches in range(1, 18):
            schedule = make_schedule(
                name, num_ranks=num_ranks, num_virtual=1, num_micro_batches=num_micro_batches
            )
            timeline = simulate(schedule, equal(num_ranks, backward=ratio))
            assert timeline.bubble == Fraction(num_ranks - 1, num_micro_batches + num_ranks - 1)
            assert timeline.makespan_s == (num_micro_batches + num_ranks - 1) * (1 + ratio)


@pytest.mark.parametrize("name", ["interleaved", "bfs"])
@pytest.mark.parametrize("ratio", [Fraction(1), Fraction(2), Fraction(7, 3)])
def test_bubble_of_several_stages_a_rank_is_the_formula(name, ratio):
    for num_ranks in range(1, 7):
        for num_virtual in (1, 2, 3, 4):
            for rounds in (1, 2, 3, 5):
                number = rounds * num_ranks
                schedule = make_schedule(
                    name, num_ranks=num_ranks, num_virtual=num_virtual, num_micro_batches=number
                )
                timeline = simulate(schedule, equal(num_ranks * num_virtual, backward=ratio))
                assert timeline.bubble == Fraction(num_ranks - 1, num_virtual * number + num_ranks - 1)


def test_split_backward_idles_less_than_any_whole_one():
    sizes = {"num_ranks": 4, "num_virtual": 2, "num_micro_batches": 8}
    costs = equal(8)
    split = simulate(make_schedule("zbv", **sizes, costs=costs), costs)
    whole = [simulate(make_schedule(name, **sizes, costs=costs), costs) for name in ("interleaved", "vee")]
    assert split.bubble < min(timeline.bubble for timeline in whole)


def test_backward_first_beats_1f1b_where_relays_take_time():
    """1F1B keeps just enough micro-batches under way for relays that take no time; the rule adds some."""
    costs = [StageCost(forward_s=1, backward_s=2, relay_bytes=1)] * 4
    link = Link(bytes_per_s=4)
    sizes = {"num_ranks": 4, "num_virtual": 1, "num_micro_batches": 16}
    ours = simulate(make_schedule("backward_first", **sizes, costs=costs, link=link), costs, link)
    assert ours.makespan_s < 0.99 * simulate(make_schedule("1f1b", **sizes), costs, link).makespan_s


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 4, 8, 11])
def test_bytes_kept_are_those_of_theory(num_micro_batches):
    """GPipe keeps all micro-batches, rank r of 1F1B min(M, R - r): 2/8 and 1/8 of it on two ranks."""
    for num_ranks in (1, 2, 4, 7):
        sizes = {"num_ranks": num_ranks, "num_virtual": 1, "num_micro_batches": num_micro_batches}
        costs = equal(num_ranks, saved=1000)
        gpipe = simulate(make_schedule("gpipe", **sizes), costs).peak_saved_bytes
        assert gpipe == (1000 * num_micro_batches,) * num_ranks
        expected = tuple(1000 * min(num_micro_batches, num_ranks - rank) for rank in range(num_ranks))
        for name in ("1f1b", "backward_first"):
            assert simulate(make_schedule(name, **sizes), costs).peak_saved_bytes == expected


def test_interleaving_keeps_a_round_and_two_for_each_rank_behind():
    sizes = {"num_ranks": 4, "num_virtual": 2, "num_micro_batches": 8}
    kept = simulate(make_schedule("interleaved", **sizes), equal(8, saved=1)).peak_saved_bytes
    assert kept == (11, 9, 7, 5)


def test_bytes_of_a_split_backward_are_kept_until_the_weight_gradient():
    order = [Action(k, 0, m) for k, m in (("F", 0), ("I", 0), ("F", 1), ("W", 0), ("I", 1), ("W", 1))]
    schedule = Schedule(name="by hand", placement=(0,), num_micro_batches=2, actions=(tuple(order),))
    assert peak_bytes(schedule, [5]) == (10,)
    assert num_kept(schedule) == (2,)


def fixed_point(schedule, costs, latency):
    """Return when each action begins: the least times that satisfy every constraint, by raising them."""
    durations = {"F": lambda c: c.forward_s, "B": lambda c: c.backward_s}
    length = {
        action: durations.get(action.kind, lambda c: c.backward_s / 2)(costs[action.stage])
        for actions in schedule.actions
        for action in actions
    }
    back = "I" if schedule.name == "zbv" else "B"
    before = []  # (action, action that must have ended, time between)
    for actions in schedule.actions:
        before += [(b, a, 0) for a, b in pairwise(actions)]
    for action in length:
        kind, stage, batch = action
        step = {"F": -1, back: 1}.get(kind)
        other = None if step is None else Action(kind, stage + step, batch)
        if other in length:
            crosses = schedule.placement[stage] != schedule.placement[other.stage]
            before.append((action, other, latency if crosses else 0))
    begins = dict.fromkeys(length, 0)
    changed = True
    while changed:
        changed = False
        for action, other, between in before:
            least = begins[other] + length[other] + between
            if begins[action] < least:
                begins[action], changed = least, True
    return begins


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_times_are_the_least_that_satisfy_every_constraint(data):
    name = data.draw(st.sampled_from(NAMES))
    num_ranks = data.draw(st.integers(1, 4))
    num_virtual = data.draw(st.sampled_from(num_virtual_choices(name, [1, 2])))
    number = num_ranks * data.draw(st.integers(1, 2))
    seconds = st.integers(1, 9)
    costs = [
        StageCost(forward_s=2 * data.draw(seconds), backward_s=2 * data.draw(seconds), relay_bytes=1)
        for _ in range(num_ranks * num_virtual)
    ]
    latency = data.draw(st.integers(0, 5))
    link = Link(bytes_per_s=float("inf"), latency_s=latency)
    schedule = make_schedule(
        name, num_ranks=num_ranks, num_virtual=num_virtual, num_micro_batches=number, costs=costs, link=link
    )
    timeline = simulate(schedule, costs, link)
    assert {box.action: box.begin_s for box in timeline.boxes} == fixed_point(schedule, costs, latency)
    # All work is done, no rank does two things at once, and the figures are those of the boxes.
    work = sum(box.end_s - box.begin_s for box in timeline.boxes)
    assert work == number * sum(cost.forward_s + cost.backward_s for cost in costs)
    for rank, actions in enumerate(schedule.actions):
        own = [box for box in timeline.boxes if box.rank == rank]
        assert [box.action for box in own] == list(actions)
        assert all(a.end_s <= b.begin_s for a, b in pairwise(own))
        assert timeline.rank_end_s[rank] == own[-1].end_s
    assert timeline.makespan_s == max(timeline.rank_end_s)
    assert timeline.bubble == pytest.approx(1 - work / (num_ranks * timeline.makespan_s))


def test_relays_take_time_between_ranks_only():
    costs = [StageCost(forward_s=1, backward_s=2, relay_bytes=r) for r in (30, 500, 40, 0)]
    link = Link(bytes_per_s=10, latency_s=Fraction(1, 2))
    schedule = make_schedule("vee", num_ranks=2, num_virtual=2, num_micro_batches=1)
    assert schedule.placement == (0, 1, 1, 0)
    # Out: 1 + 3.5 to rank 1, 1 + 1 there, 4.5 back to rank 0, 1 + 2 there; and the same way back.
    assert simulate(schedule, costs, link).makespan_s == (1 + 3.5 + 2 + 4.5 + 3) + (4.5 + 4 + 3.5 + 2)
    assert simulate(schedule, costs).makespan_s == 12


def test_messages_of_one_direction_follow_each_other():
    """The sender computes on; the second message waits for the wire, its latency does not add up."""
    costs = [StageCost(forward_s=1, backward_s=1, relay_bytes=40), StageCost(forward_s=1, backward_s=1)]
    link = Link(bytes_per_s=10, latency_s=2)
    schedule = make_schedule("gpipe", num_ranks=2, num_virtual=1, num_micro_batches=2)
    begins = {str(box.action): box.begin_s for box in simulate(schedule, costs, link).boxes}
    assert begins["0F1"] == 1
    assert begins["1F0"] == 1 + 4 + 2
    assert begins["1F1"] == 1 + 4 + 4 + 2
    # Back on the other direction: 1B0 ends at 13, 1B1 at 14.
    assert begins["0B0"] == 13 + 4 + 2
    assert begins["0B1"] == 13 + 4 + 4 + 2


def test_orders_that_wait_for_each_other_are_refused():
    first = (Action("B", 0, 0), Action("F", 0, 0))
    second = (Action("F", 1, 0), Action("B", 1, 0))
    schedule = Schedule(name="knot", placement=(0, 1), num_micro_batches=1, actions=(first, second))
    with pytest.raises(UsageError, match="'knot' stands still: rank 0 waits at 0B0"):
        simulate(schedule, equal(2))


def test_costs_of_another_number_of_stages_are_refused():
    schedule = make_schedule("1f1b", num_ranks=2, num_virtual=1, num_micro_batches=2)
    with pytest.raises(UsageError, match="3 costs for a schedule of 2 stages"):
        simulate(schedule, equal(3))
