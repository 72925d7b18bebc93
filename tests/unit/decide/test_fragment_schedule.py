"""Tests when fragments are exchanged: against a count of each local step."""

from __future__ import annotations

import pytest

from shoal.decide.fragments import FragmentSchedule


@pytest.mark.parametrize(("every", "fragments"), [(1, 1), (6, 3), (7, 3), (5, 5)])
def test_each_fragment_is_exchanged_once_a_round_in_turn(every: int, fragments: int) -> None:
    schedule = FragmentSchedule(every, fragments)
    ends = [every * turn + every * (k + 1) // fragments for turn in range(3) for k in range(fragments)]
    numbers = range(1, 3 * fragments + 1)
    assert [schedule.end_of(number) for number in numbers] == ends
    assert [schedule.fragment_of(number) for number in numbers] == [*range(fragments)] * 3
    assert schedule.end_of(0) == 0
    for until in numbers:
        for after in range(until + 1):
            last = {schedule.fragment_of(number): number for number in range(after + 1, until + 1)}
            assert schedule.changed(after, until) == sorted(last.values())


def test_what_is_left_at_a_step_is_every_fragment_but_the_one_sent_after_it() -> None:
    schedule = FragmentSchedule(every=4, fragments=2)
    assert [schedule.left_at(step // 2, step) for step in range(1, 5)] == [[0, 1], [1], [0, 1], [0]]
    assert FragmentSchedule(every=4).left_at(1, 4) == []
    assert FragmentSchedule(every=4).left_at(1, 5) == [0]
