"""The order of samples: a permutation an epoch, at any place, shared by any number of workers."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.decide.order import ShuffledOrder, micro_batches, shuffled, worker_part


@pytest.mark.parametrize("num_examples", [1, 2, 3, 4, 5, 7, 16, 17, 1000, 4095, 4096, 4097, 65_537, 300_007])
def test_each_epoch_is_a_permutation(num_examples):
    for seed, epoch in ((0, 0), (1, 5), (-7, 2**33)):
        order = shuffled(np.arange(num_examples), num_examples, seed, epoch)
        assert (np.sort(order) == np.arange(num_examples)).all()


@given(num_examples=st.integers(1, 5000), seed=st.integers(), epoch=st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_any_size_seed_and_epoch_is_a_permutation(num_examples, seed, epoch):
    order = shuffled(np.arange(num_examples), num_examples, seed, epoch)
    assert (np.sort(order) == np.arange(num_examples)).all()


def test_positions_can_be_asked_in_any_company():
    n = 10_007
    whole = np.stack([shuffled(np.arange(n), n, 3, epoch) for epoch in range(3)])
    rng = np.random.default_rng(0)
    epochs, positions = rng.integers(0, 3, 500), rng.integers(0, n, 500)
    assert (shuffled(positions, n, 3, epochs) == whole[epochs, positions]).all()
    assert shuffled(5, n, 3, 1).tolist() == [whole[1, 5]]


def test_a_huge_data_set_costs_no_memory():
    n = 10**12
    order = shuffled(np.arange(n - 1000, n), n, 0, 0)
    assert len(set(order.tolist())) == 1000
    assert order.min() >= 0 and order.max() < n


def test_all_orders_of_few_examples_are_equally_likely():
    num_epochs = 12_000
    orders = shuffled(np.tile(np.arange(5), (num_epochs, 1)), 5, 0, np.arange(num_epochs)[:, None])
    found = dict.fromkeys(permutations(range(5)), 0)
    for row in orders.tolist():
        found[tuple(row)] += 1
    expected = num_epochs / len(found)
    chi_square = sum((count - expected) ** 2 / expected for count in found.values())
    assert chi_square < 119 + 5 * (2 * 119) ** 0.5


@pytest.mark.parametrize("num_examples", [300, 5000, 100_003])
def test_orders_look_random(num_examples):
    """Neighbours, places and epochs are uncorrelated: each coefficient is about N(0, 1/n)."""
    n = num_examples
    first, second = (shuffled(np.arange(n), n, 11, epoch) for epoch in (0, 1))
    pairs = {
        "place": (np.arange(n), first),
        "neighbour": (first[:-1], first[1:]),
        "epoch": (first, second),
        "seed": (first, shuffled(np.arange(n), n, 12, 0)),
        "parity": (np.arange(n) % 2, first % 2),
    }
    for name, (a, b) in pairs.items():
        assert abs(np.corrcoef(a, b)[0, 1]) < 4.5 / n**0.5, name
    # A random permutation has one fixed point on average (Poisson).
    assert (first == np.arange(n)).sum() <= 8


def test_samples_run_through_each_epoch_once():
    n = 17
    epochs, indices = ShuffledOrder(num_examples=n, seed=1).examples_of(np.arange(5 * n))
    assert epochs.tolist() == np.repeat(np.arange(5), n).tolist()
    for epoch in range(5):
        assert sorted(indices[epochs == epoch]) == list(range(n))
    assert len({tuple(indices[epochs == epoch]) for epoch in range(5)}) == 5


@given(first=st.integers(0, 10_000), count=st.integers(0, 100), n=st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_samples_can_start_anywhere(first, count, n):
    order = ShuffledOrder(num_examples=n, seed=4)
    epochs, indices = order.examples_of(np.arange(first, first + count))
    assert len(epochs) == len(indices) == count
    for i in range(count):
        epoch, index = order.examples_of([first + i])
        assert (epochs[i], indices[i]) == (epoch[0], index[0])


def test_no_examples_is_an_error():
    with pytest.raises(ValueError, match="num_examples=0"):
        ShuffledOrder(num_examples=0, seed=0).examples_of([0])


@given(size=st.integers(0, 500), num_workers=st.integers(1, 40))
def test_parts_are_contiguous_and_even(size, num_workers):
    parts = [worker_part(size, rank, num_workers) for rank in range(num_workers)]
    assert [i for part in parts for i in part] == list(range(size))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(start=st.integers(0, 50), size=st.integers(0, 50), micro_batch_size=st.integers(1, 60))
def test_micro_batches_cut_in_order(start, size, micro_batch_size):
    cuts = micro_batches(range(start, start + size), micro_batch_size)
    assert [i for cut in cuts for i in cut] == list(range(start, start + size))
    assert all(len(cut) == micro_batch_size for cut in cuts[:-1])
    assert all(0 < len(cut) <= micro_batch_size for cut in cuts)
