"""The owners of shards: the same everywhere, in proportion, and as few moves as there can be."""

from collections import Counter

from shoal.decide.shard_owners import ranked_owners

SHARDS = [f"train-{number:05d}" for number in range(4_000)]


def owners(weights):
    return {shard: ranked_owners(shard, weights)[0] for shard in SHARDS}


def test_a_host_that_leaves_moves_its_own_shards_only():
    hosts = {f"host-{number}": 1.0 for number in range(8)}
    before = owners(hosts)
    del hosts["host-3"]
    after = owners(hosts)
    moved = {shard for shard in SHARDS if before[shard] != after[shard]}
    assert moved == {shard for shard in SHARDS if before[shard] == "host-3"}
    assert all(after[shard] == ranked_owners(shard, {**hosts, "host-3": 1.0})[1] for shard in moved)
    assert set(Counter(after[shard] for shard in moved)) == set(hosts)  # shared by all others


def test_shards_are_in_proportion_to_weights():
    counts = Counter(owners({"small": 1.0, "large": 3.0, "none": 0.0}).values())
    assert counts == {"large": 3_051, "small": 949}  # 3,000 and 1,000 on average


def test_the_order_of_hosts_does_not_matter():
    assert ranked_owners("x", {"a": 1, "b": 2, "c": 3}) == ranked_owners("x", {"c": 3, "b": 2, "a": 1})
    assert ranked_owners("x", {}) == []
