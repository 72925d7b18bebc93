"""Decides which hosts keep a shard, by weighted rendezvous hashing.

Each host has a score for each shard, and those with the highest keep it. All hosts compute the same without a
message. A host that leaves gives its shards to the others in proportion to their weights, and no other shard
moves.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

_BITS = 53


def ranked_owners(shard: str, weights: Mapping[str, float]) -> list[str]:
    """Return the hosts for a shard, the owner first, and behind it those that take its place in turn.

    Args:
        shard: name of the shard, such as its checksum.
        weights: of each host by name, such as the bytes of its cache; hosts of weight 0 own nothing.

    Example:
        >>> ranked_owners("train-00000", {"a": 1.0, "b": 1.0, "c": 0.0})
        ['a', 'b']
    """
    scores = {host: _score(shard, host, weight) for host, weight in weights.items() if weight > 0}
    return sorted(scores, key=lambda host: (-scores[host], host))


def _score(shard: str, host: str, weight: float) -> float:
    digest = hashlib.sha256(f"{host}\0{shard}".encode()).digest()
    drawn = (int.from_bytes(digest[:8], "big") >> (64 - _BITS)) + 0.5
    return weight / -math.log(drawn / 2**_BITS)
