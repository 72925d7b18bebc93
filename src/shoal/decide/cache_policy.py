"""Decides what the cache of a host keeps of the training data, and in which order it is copied there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
import numpy.typing as npt

CachePolicy = Literal["all", "own", "window"]
"""Data that a host keeps: all; its own part surely, for the other hosts, and others in what is left; or the
data that it needs next, or first."""

_AHEAD = 4
"""The next data take a fourth of a full cache at most: the rest is for what is in use."""


def cache_policy(*, data_bytes: int, cache_bytes: int, cluster_bytes: int) -> CachePolicy:
    """Return the policy of each host.

    Args:
        data_bytes: of all files.
        cache_bytes: of the host's cache.
        cluster_bytes: of the caches of all hosts that give each other their copies, this one's among them.

    Example:
        >>> [cache_policy(data_bytes=n, cache_bytes=40, cluster_bytes=160) for n in (40, 160, 161)]
        ['all', 'own', 'window']
    """
    if data_bytes <= cache_bytes:
        return "all"
    return "own" if data_bytes <= cluster_bytes else "window"


def bytes_ahead(policy: CachePolicy, *, cache_bytes: int, evicts: bool) -> int:
    """Return the bytes that may be copied before they are used.

    Args:
        policy: of the host.
        cache_bytes: of its cache.
        evicts: a full cache makes room for the next files. Else what has no room is read where it is.
    """
    return cache_bytes // _AHEAD if policy == "window" and evicts else cache_bytes


def first_uses(steps: Iterable[npt.NDArray[np.int64]], num_files: int, *, again: bool) -> Iterator[int]:
    """Yield the numbers of files in the order in which steps use them first.

    Args:
        steps: the file of each sample of each step.
        num_files: there are.
        again: repeat a file in each step that uses it; otherwise stop once every file was yielded.

    Example:
        >>> steps = [np.array([2, 0, 2]), np.array([0, 1]), np.array([2])]
        >>> list(first_uses(steps, 3, again=False)), list(first_uses(steps, 3, again=True))
        ([2, 0, 1], [2, 0, 0, 1, 2])
    """
    seen: set[int] = set()
    for files in steps:
        for file in dict.fromkeys(files.tolist()):
            if again or file not in seen:
                yield file
            seen.add(file)
        if not again and len(seen) == num_files:
            return
