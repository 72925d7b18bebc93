"""Schedules: everything is done once and in an order that runs, exactly as the papers draw it, or refused."""

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.decide.cost import Link, StageCost
from shoal.decide.pipeline_schedules import NAMES, make_schedule, num_virtual_choices
from shoal.decide.pipeline_simulator import loop_placement, num_kept, simulate, vee_placement
from shoal.errors import UsageError


def words(actions):
    return " ".join(map(str, actions))


def check(schedule, num_ranks, num_virtual, num_micro_batches):
    """Assert that each stage does each micro-batch once, on its rank, in order, and that it runs."""
    kinds = "FIW" if schedule.name == "zbv" else "FB"
    wanted = {
        (k, s, m) for k in kinds for s in range(num_ranks * num_virtual) for m in range(num_micro_batches)
    }
    done = [action for actions in schedule.actions for action in actions]
    assert set(done) == wanted
    assert len(done) == len(wanted)
    for rank, actions in enumerate(schedule.actions):
        assert all(schedule.placement[action.stage] == rank for action in actions)
        place = {action: index for index, action in enumerate(actions)}
        for kind, stage, batch in actions:
            order = [place[k, stage, batch] for k in kinds]
            assert order == sorted(order)
            if batch and kind != "W":
                assert place[kind, stage, batch - 1] < place[kind, stage, batch]
    costs = [StageCost(forward_s=1, backward_s=2)] * (num_ranks * num_virtual)
    timeline = simulate(schedule, costs)
    ends = {box.action: box.end_s for box in timeline.boxes}
    begins = {box.action: box.begin_s for box in timeline.boxes}
    back = "I" if schedule.name == "zbv" else "B"
    for stage, following in pairwise(range(num_ranks * num_virtual)):
        for batch in range(num_micro_batches):
            assert ends["F", stage, batch] <= begins["F", following, batch]
            assert ends[back, following, batch] <= begins[back, stage, batch]


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_every_schedule_does_everything_once_in_an_order_that_runs(data):
    name = data.draw(st.sampled_from(NAMES))
    num_ranks = data.draw(st.integers(1, 5))
    num_virtual = data.draw(st.sampled_from(num_virtual_choices(name, [1, 2, 3])))
    if name == "interleaved":
        num_rounds = data.draw(st.integers(1, 3))
        num_micro_batches = num_rounds * data.draw(st.integers(num_ranks, num_ranks + 1))
        if num_micro_batches // num_ranks != num_rounds:  # the larger rounds made one more possible
            num_micro_batches = num_rounds * num_ranks
    else:
        num_micro_batches = data.draw(st.integers(1, 9))
    seconds = st.floats(0.1, 3)
    costs = None
    if data.draw(st.booleans()):
        costs = [
            StageCost(forward_s=data.draw(seconds), backward_s=data.draw(seconds), relay_bytes=1)
            for _ in range(num_ranks * num_virtual)
        ]
    active = data.draw(st.none() | st.integers(1, 6))
    schedule = make_schedule(
        name,
        num_ranks=num_ranks,
        num_virtual=num_virtual,
        num_micro_batches=num_micro_batches,
        costs=costs,
        link=Link(bytes_per_s=1.0),
        active_micro_batches=active,
    )
    check(schedule, num_ranks, num_virtual, num_micro_batches)
    if active is not None and name in {"backward_first", "vee"}:
        assert max(num_kept(schedule)) <= active
    if (
        active is not None and name == "zbv"
    ):  # the put-off weight gradients of a rank's two stages count as well
        assert max(num_kept(schedule)) <= 2 * active


def test_gpipe_and_1f1b_of_three_ranks():
    gpipe = make_schedule("gpipe", num_ranks=3, num_virtual=1, num_micro_batches=4)
    assert words(gpipe.actions[1]) == "1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3"
    by_turns = make_schedule("1f1b", num_ranks=3, num_virtual=1, num_micro_batches=4)
    assert list(map(words, by_turns.actions)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_interleaved_1f1b_of_two_ranks_with_two_stages():
    schedule = make_schedule("interleaved", num_ranks=2, num_virtual=2, num_micro_batches=4)
    assert schedule.placement == (0, 1, 0, 1)
    assert list(map(words, schedule.actions)) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


def test_looped_breadth_first_of_two_ranks_with_two_stages():
    schedule = make_schedule("bfs", num_ranks=2, num_virtual=2, num_micro_batches=2)
    assert words(schedule.actions[1]) == "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"


def test_one_stage_a_rank_makes_interleaved_1f1b_and_bfs_gpipe():
    for name, same in (("interleaved", "1f1b"), ("bfs", "gpipe")):
        sizes = {"num_ranks": 4, "num_virtual": 1, "num_micro_batches": 8}
        assert make_schedule(name, **sizes).actions == make_schedule(same, **sizes).actions


def test_backward_first_of_equal_stages_is_1f1b():
    """With equal stages the rule finds 1F1B's order by itself, and keeps no more."""
    for num_ranks, num_micro_batches in ((2, 5), (4, 8), (3, 2)):
        sizes = {"num_ranks": num_ranks, "num_virtual": 1, "num_micro_batches": num_micro_batches}
        assert num_kept(make_schedule("backward_first", **sizes)) == num_kept(make_schedule("1f1b", **sizes))


def test_active_micro_batches_bounds_what_is_kept():
    for active in (1, 2, 3, 5):
        schedule = make_schedule(
            "backward_first", num_ranks=4, num_virtual=2, num_micro_batches=8, active_micro_batches=active
        )
        assert num_kept(schedule)[0] == active
        assert max(num_kept(schedule)) <= active


def test_placements():
    assert loop_placement(3, 2) == (0, 1, 2, 0, 1, 2)
    assert vee_placement(3) == (0, 1, 2, 2, 1, 0)
    vee = make_schedule("vee", num_ranks=3, num_virtual=2, num_micro_batches=3)
    assert vee.placement == (0, 1, 2, 2, 1, 0)
    assert (vee.num_stages, vee.num_ranks) == (6, 3)


def test_numbers_of_stages_a_rank_that_a_schedule_can_have():
    assert num_virtual_choices("1f1b", [1, 2, 4]) == [1]
    assert num_virtual_choices("vee", [1, 2, 4]) == [2]
    assert num_virtual_choices("interleaved", [1, 2, 4]) == [1, 2, 4]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("1f1", {}, "no schedule is called '1f1'. Did you mean '1f1b'? There are gpipe, 1f1b,"),
        ("1f1b", {"num_virtual": 2}, "'1f1b' has 1 stage per rank, not 2; 'interleaved' or 'bfs' can have 2"),
        ("vee", {}, "'vee' has 2 stages per rank, not 1; '1f1b' or 'backward_first' can have 1"),
        ("gpipe", {"num_micro_batches": 0}, "the number of micro-batches is 0; a schedule needs at least 1"),
        ("gpipe", {"num_ranks": 0}, "the number of ranks is 0; a schedule needs at least 1"),
        ("backward_first", {"active_micro_batches": 0}, "active_micro_batches is 0; a schedule needs"),
        (
            "interleaved",
            {"num_virtual": 2, "num_micro_batches": 3},
            "needs at least as many micro-batches as ranks, and there are 3 for 4: take 4 or more",
        ),
        (
            "interleaved",
            {"num_virtual": 2, "num_micro_batches": 13},
            "cannot divide 13 micro-batches over 4 ranks into 3 equal rounds; the nearest numbers that it "
            "can are 12 and 15",
        ),
    ],
)
def test_what_a_schedule_cannot_be_is_refused(name, changes, message):
    sizes = {"num_ranks": 4, "num_virtual": 1, "num_micro_batches": 8, **changes}
    with pytest.raises(UsageError, match=re.escape(message)):
        make_schedule(name, **sizes)


def test_the_numbers_named_for_interleaving_are_the_nearest():
    for num_ranks in range(2, 7):
        for number in range(num_ranks, 40):
            try:
                make_schedule("interleaved", num_ranks=num_ranks, num_virtual=2, num_micro_batches=number)
            except UsageError as error:
                below, above = map(int, re.findall(r"are (\d+) and (\d+)", str(error))[0])
                assert below < number < above
                for named in (below, above):
                    make_schedule("interleaved", num_ranks=num_ranks, num_virtual=2, num_micro_batches=named)
                for between in range(below + 1, above):
                    assert between % (between // num_ranks)
