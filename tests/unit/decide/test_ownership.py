"""Owners of parameters are balanced, the same everywhere, and go on from what is owned already."""

from __future__ import annotations

import random

import pytest

from shoal.decide.ownership import assign_owners, largest_share


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5, 64])
def test_the_fullest_worker_has_at_most_the_mean_and_one_parameter(num_workers: int) -> None:
    sizes = [random.Random(7 + index).randrange(1, 1000) for index in range(200)]
    owned = [0] * num_workers
    for size, owner in zip(sizes, assign_owners(sizes, owned), strict=True):
        owned[owner] += size
    assert sum(owned) == sum(sizes)
    assert max(owned) <= sum(sizes) / num_workers + max(sizes)
    assert largest_share(sizes, num_workers) == max(owned) / sum(sizes)


def test_parameters_that_come_later_go_to_the_least_loaded() -> None:
    assert assign_owners([5, 5], [0, 10, 1]) == [0, 2]


def test_no_parameters() -> None:
    assert assign_owners([], [0, 0]) == [] and largest_share([], 2) == 0
