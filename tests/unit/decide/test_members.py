"""Tests the numbers of workers of a training whose workers come and go."""

from __future__ import annotations

import pytest

from shoal.decide.members import read_counts
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
