"""Divides parameters over workers, for an optimizer state that is sharded (ZeRO-1)."""

from __future__ import annotations

from collections.abc import Sequence


def assign_owners(sizes: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Return the worker that owns each parameter: the largest first, each to the least loaded worker.

    Parameters stay whole, since some optimizers need norms or factors of whole ones. The fullest worker then
    has at most the mean and one parameter.

    Args:
        sizes: of the parameters, such as numbers of elements.
        loads: what each worker owns already, in the same unit; one entry per worker.

    Example:
        >>> assign_owners([2, 9, 4, 3], [0, 0])
        [1, 0, 1, 1]
    """
    loads, owners = list(loads), [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]
    return owners


def shard_dimension(sizes: Sequence[int], num_parts: int, num_shards: int) -> int | None:
    """Return the dimension in which a weight is sharded whose first one ``num_parts`` workers divide.

    torch 2.15 mistakes the bounds of uneven shards of their parts, so it is the first or the second that
    divides evenly; ``None``: neither does.

    Example:
        >>> shard_dimension([8, 6], 2, 4), shard_dimension([8, 6], 2, 3), shard_dimension([8, 6], 2, 5)
        (0, 1, None)
    """
    if sizes[0] % (num_parts * num_shards) == 0:
        return 0
    return 1 if len(sizes) > 1 and sizes[1] % num_shards == 0 else None


def largest_share(sizes: Sequence[int], num_workers: int) -> float:
    """Return the part of the whole that the fullest worker owns after :func:`assign_owners`.

    Example:
        >>> largest_share([2, 9, 4, 3], 2)
        0.5
    """
    if num_workers >= len(sizes):
        return max(sizes, default=0) / max(sum(sizes), 1)
    owned = [0] * num_workers
    for size, owner in zip(sizes, assign_owners(sizes, owned), strict=True):
        owned[owner] += size
    return max(owned) / max(sum(owned), 1)
