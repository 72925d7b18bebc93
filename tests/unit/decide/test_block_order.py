"""The order for slow storage: blocks in random order, mixed within windows; still any position by itself."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.decide.order import BlockShuffle, ShuffledOrder, block_shuffled
from shoal.errors import UsageError


def epoch_of(n, seed, epoch, blocks):
    return block_shuffled(np.arange(n), n, seed, epoch, blocks)


@given(
    n=st.integers(1, 3000),
    block_size=st.integers(1, 400),
    blocks_in_window=st.integers(1, 9),
    seed=st.integers(),
    epoch=st.integers(0, 2**40),
)
@settings(max_examples=60, deadline=None)
def test_any_epoch_is_a_permutation(n, block_size, blocks_in_window, seed, epoch):
    blocks = BlockShuffle(block_size=block_size, blocks_in_window=blocks_in_window)
    assert (np.sort(epoch_of(n, seed, epoch, blocks)) == np.arange(n)).all()


def test_positions_can_be_asked_in_any_company():
    n, blocks = 1013, BlockShuffle(block_size=20, blocks_in_window=3)
    whole = np.stack([epoch_of(n, 3, epoch, blocks) for epoch in range(3)])
    rng = np.random.default_rng(0)
    epochs, positions = rng.integers(0, 3, 500), rng.integers(0, n, 500)
    assert (block_shuffled(positions, n, 3, epochs, blocks) == whole[epochs, positions]).all()
    assert block_shuffled(5, n, 3, 1, blocks).tolist() == [whole[1, 5]]
    order = ShuffledOrder(num_examples=n, seed=3, blocks=blocks)
    found_epochs, found = order.examples_of(epochs * n + positions)
    assert (found_epochs == epochs).all() and (found == whole[epochs, positions]).all()


@pytest.mark.parametrize(("n", "block_size", "blocks_in_window"), [(1000, 10, 4), (1007, 10, 4), (997, 7, 1)])
def test_a_window_holds_whole_blocks_and_nothing_else(n, block_size, blocks_in_window):
    blocks = BlockShuffle(block_size=block_size, blocks_in_window=blocks_in_window)
    size = block_size * blocks_in_window
    borders, orders_of_blocks = set(), set()
    for epoch in range(5):
        order = epoch_of(n, 1, epoch, blocks)
        windows = [order[i : i + size] for i in range(0, n, size)]
        # What fills no block comes last: the examples before the first block, around the ring.
        left = n % block_size
        begins = [b for b in range(n) if blocks_at(windows, n, block_size, b, left)]
        assert begins, "no rotation makes each window a union of blocks"
        borders.add(begins[0])
        orders_of_blocks.add(tuple(windows[0] // block_size))
        if size > 10:
            assert not (np.diff(windows[0]) == 1).all(), "examples of a window keep their order"
    assert len(borders) > 1, "blocks begin at the same examples in each epoch"
    assert len(orders_of_blocks) == 5


def blocks_at(windows, n, block_size, begin, left):
    """Return whether every window is made of whole blocks, if the first block begins at ``begin``."""
    for number, window in enumerate(windows):
        logical = np.sort((window - begin) % n)
        is_last = number == len(windows) - 1
        whole = logical[: len(logical) - left] if is_last else logical
        if is_last and logical[len(whole) :].tolist() != list(range(n - left, n)):
            return False
        rows = whole.reshape(-1, block_size)
        if (rows[:, 0] % block_size).any() or (np.diff(rows, axis=1) != 1).any():
            return False
    return True


def test_blocks_and_epochs_look_random():
    n, blocks = 100_000, BlockShuffle(block_size=10, blocks_in_window=10)
    first, second = epoch_of(n, 1, 0, blocks), epoch_of(n, 1, 1, blocks)
    means = first.reshape(-1, 100).mean(axis=1)
    inside = first[:100].argsort()
    for a, b in ((np.arange(n), first), (first, second), (first, epoch_of(n, 2, 0, blocks))):
        # Examples of one block move together, so there are n / 10 independent draws.
        assert abs(np.corrcoef(a, b)[0, 1]) < 4.5 / (n / 10) ** 0.5
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 4.5 / len(means) ** 0.5
    assert abs(np.corrcoef(np.arange(100), inside)[0, 1]) < 0.45


def test_each_window_is_mixed_in_its_own_way():
    order = epoch_of(4000, 1, 0, BlockShuffle(block_size=100, blocks_in_window=1)).reshape(-1, 100)
    ranks = {tuple(window.argsort().tolist()) for window in order if np.ptp(window) == 99}
    assert len(ranks) >= 39  # one block may lie around the end, where numbers begin again


def test_one_block_that_holds_all_is_a_full_shuffle():
    blocks = BlockShuffle(block_size=1000, blocks_in_window=1)
    order = epoch_of(500, 0, 0, blocks)
    assert sorted(order.tolist()) == list(range(500))
    assert abs(np.corrcoef(np.arange(500), (order - order.min()))[0, 1]) < 0.25


@pytest.mark.parametrize("field", ["block_size", "blocks_in_window"])
def test_wrong_sizes_are_refused(field):
    with pytest.raises(UsageError, match=f"{field} 0 must be at least 1"):
        BlockShuffle(**{"block_size": 4, "blocks_in_window": 4, field: 0})
