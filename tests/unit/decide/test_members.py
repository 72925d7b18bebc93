"""Tests the numbers of workers of a training whose workers come and go."""

from __future__ import annotations

import pytest

from shoal.decide.members import is_larger_part, part_of, read_counts, shares_of_members
from shoal.errors import UsageError


@pytest.mark.parametrize("text", ["", "4", "4:", "0:3", "8:4", "a:b", "-1:3", "1:2:3", " 1:2"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not LEAST:MOST"):
        read_counts(text)


def test_a_number_of_workers_outside_is_refused() -> None:
    counts = read_counts("2:4")
    for inside in (2, 3, 4):
        counts.require(inside)
    for outside in (1, 5):
        with pytest.raises(UsageError, match=f"elastic 2:4 and {outside} workers"):
            counts.require(outside)


def test_the_parts_of_a_cut_network() -> None:
    losses = {"a": ["c", "d"], "b": ["c", "d"], "c": ["a", "b"], "d": ["a"]}
    assert [part_of(member, losses) for member in "abcd"] == [["a", "b"], ["a", "b"], ["c", "d"], ["c", "d"]]
    members = ["a", "b", "c", "d"]
    assert [is_larger_part(part, members) for part in (["a", "b"], ["c", "d"], ["b", "c", "d"])] == [
        True, False, True,
    ]  # fmt: skip
    assert part_of("a", {"a": ["b"]}) == ["a"], "one that has ended is not there"


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5, 6])
def test_members_have_whole_micro_batches(num_workers: int) -> None:
    shares = shares_of_members(24, 4, num_workers)
    assert len(shares) == num_workers and sum(shares) == 24
    assert not any(share % 4 for share in shares)
    assert shares_of_members(24, 4, 7) == () == shares_of_members(24, 5, 2)
