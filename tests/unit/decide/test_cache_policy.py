"""The policy of a cache of shards, and the order in which it is filled."""

import numpy as np

from shoal.decide.cache_policy import bytes_ahead, cache_policy, first_uses
from shoal.decide.order import BlockShuffle, ShuffledOrder


def test_what_fits_is_kept():
    policies = {}
    for data in range(12):
        for cache in range(1, 6):
            for hosts in range(1, 4):
                policy = cache_policy(data_bytes=data, cache_bytes=cache, cluster_bytes=hosts * cache)
                policies.setdefault(policy, set()).add((data, cache, hosts))
    assert all(data <= cache for data, cache, _ in policies["all"])
    assert all(cache < data <= hosts * cache for data, cache, hosts in policies["own"])
    assert all(data > hosts * cache for data, cache, hosts in policies["window"])


def test_only_a_window_leaves_most_of_the_cache_to_what_is_in_use():
    for policy, evicts, expected in [
        ("all", True, 40),
        ("own", True, 40),
        ("window", False, 40),
        ("window", True, 10),
    ]:
        assert bytes_ahead(policy, cache_bytes=40, evicts=evicts) == expected


def test_files_come_in_the_order_of_their_first_use():
    order = ShuffledOrder(num_examples=100, seed=3, blocks=BlockShuffle(block_size=10, blocks_in_window=2))
    steps = [order.examples_of(np.arange(first, first + 8))[1] // 10 for first in range(0, 104, 8)]
    stream = [file for step in steps for file in step.tolist()]
    expected = sorted(range(10), key=stream.index)
    assert list(first_uses(steps, 10, again=False)) == expected
    assert list(first_uses(steps[:4], 10, again=False)) == sorted(set(stream[:32]), key=stream.index)


def test_no_step_is_computed_after_all_files_were_seen():
    steps = iter([np.array([1]), np.array([0, 1]), np.array([0])])
    assert list(first_uses(steps, 2, again=False)) == [1, 0]
    assert next(steps).tolist() == [0]


def test_with_eviction_files_come_again():
    steps = [np.array([1, 1, 0]), np.array([0]), np.array([1, 0])]
    assert list(first_uses(steps, 2, again=True)) == [1, 0, 0, 1, 0]
