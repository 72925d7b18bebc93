"""Decides how a training goes on when some workers are lost and others come."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from shoal.decide.order import worker_part
from shoal.errors import UsageError


class MemberCounts(NamedTuple):
    """The fewest and the most workers."""

    least: int
    most: int

    def require(self, num_workers: int) -> None:
        """Check the number of workers with which a training starts.

        Raises:
            UsageError: it is outside.
        """
        if not self.least <= num_workers <= self.most:
            raise UsageError(
                f"distributed.elastic {self.least}:{self.most} and {num_workers} workers: start as many as "
                "it allows, or change it"
            )


def read_counts(text: str) -> MemberCounts:
    """Return the numbers of ``LEAST:MOST``.

    Raises:
        UsageError: the text has another form.

    Example:
        >>> read_counts("4:8")
        MemberCounts(least=4, most=8)
    """
    match = re.fullmatch(r"(\d{1,6}):(\d{1,6})", text)
    counts = MemberCounts(*map(int, match.groups())) if match else MemberCounts(0, 0)
    if not 1 <= counts.least <= counts.most:
        raise UsageError(
            f"distributed.elastic {text!r} is not LEAST:MOST, two numbers of workers from 1 on such as 4:8"
        )
    return counts


def shares_of_members(global_batch_size: int, micro_batch_size: int, num_workers: int) -> tuple[int, ...]:
    """Return the samples of each worker: whole micro-batches, which are then those of any other number.

    Empty: there are not enough for all, or they do not divide the batch; then parts are of equal size.

    Example:
        >>> shares_of_members(16, 4, num_workers=3), shares_of_members(16, 4, num_workers=5)
        ((4, 4, 8), ())
    """
    count, rest = divmod(global_batch_size, micro_batch_size)
    if rest or count < num_workers:
        return ()
    parts = (worker_part(count, rank, num_workers) for rank in range(num_workers))
    return tuple(micro_batch_size * len(part) for part in parts)


def part_of(member: str, losses: Mapping[str, Collection[str]]) -> list[str]:
    """Return the members that a member reaches, itself included, in the order of ``losses``.

    Args:
        losses: by members that are there: those whose connections they have lost.

    Example:
        >>> part_of("a", {"a": ["c"], "b": [], "c": [], "d": ["a"]})
        ['a', 'b']
    """
    return [
        other for other, lost in losses.items() if other not in losses.get(member, ()) and member not in lost
    ]


def is_larger_part(present: Sequence[str], members: Sequence[str]) -> bool:
    """Return whether those that are present are more than half of the members, or the half with the first.

    Example:
        >>> is_larger_part(["a", "c"], ["a", "b", "c", "d"]), is_larger_part(["b", "d"], ["a", "b", "c", "d"])
        (True, False)
    """
    return 2 * len(present) + (members[0] in present) > len(members)
