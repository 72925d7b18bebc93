"""The order by groups: whole runs of one group, every example in every epoch, each sample by itself."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.decide.bucketing import GroupedOrder, aspect_groups
from shoal.errors import UsageError


def an_order(num_examples: int = 203, run_size: int = 4, seed: int = 3) -> GroupedOrder:
    groups = np.random.default_rng(1).choice([0, 2, 5], size=num_examples, p=[0.7, 0.25, 0.05])
    return GroupedOrder(groups.astype(np.int64), run_size, seed)


@pytest.mark.parametrize("run_size", [1, 2, 4, 32])
def test_runs_of_one_group_cover_every_epoch(run_size: int) -> None:
    order = an_order(run_size=run_size)
    size = order.samples_an_epoch
    sizes = np.bincount(order.groups)
    assert size == sum(-(-int(n) // run_size) for n in sizes) * run_size
    epochs, indices = order.examples_of(np.arange(3 * size))
    assert epochs.tolist() == np.repeat([0, 1, 2], size).tolist()
    runs = order.groups[indices].reshape(-1, run_size)
    assert (runs == runs[:, :1]).all()
    for epoch in indices.reshape(3, size):
        assert set(epoch.tolist()) == set(range(203))
    assert not np.array_equal(indices[:size], indices[size : 2 * size])


def test_examples_come_twice_only_to_fill_a_run() -> None:
    order = an_order(run_size=8)
    _, indices = order.examples_of(np.arange(order.samples_an_epoch))
    for group in (0, 2, 5):
        times = np.bincount(indices[order.groups[indices] == group], minlength=203)
        missing = -int((order.groups == group).sum()) % 8
        assert (times == 2).sum() == missing
        assert times.max() <= 2


def test_a_sample_is_computed_by_itself() -> None:
    order = an_order()
    whole = order.examples_of(np.arange(1000))
    some = np.random.default_rng(5).permutation(1000)[:77]
    for all_values, values in zip(whole, order.examples_of(some), strict=True):
        assert np.array_equal(all_values[some], values)


def test_seed_matters_and_runs_are_mixed() -> None:
    first = an_order(seed=3).examples_of(np.arange(200))[1]
    assert not np.array_equal(first, an_order(seed=4).examples_of(np.arange(200))[1])
    groups = an_order().groups[first].reshape(-1, 4)[:, 0]
    assert (np.diff(groups) != 0).sum() > 10


def test_aspect_groups() -> None:
    sizes = [(640, 480), (480, 640), (500, 500), (100, 400)]
    assert aspect_groups(sizes).tolist() == [1, 0, 1, 0]
    assert aspect_groups(sizes, (0.5, 1.0, 1.3)).tolist() == [3, 1, 2, 0]


def test_refusals() -> None:
    with pytest.raises(UsageError, match="0 examples"):
        GroupedOrder(np.empty(0, dtype=np.int64), 2, 0)
    with pytest.raises(UsageError, match="runs of 0"):
        GroupedOrder(np.zeros(3, dtype=np.int64), 0, 0)
