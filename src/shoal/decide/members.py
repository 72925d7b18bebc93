"""Reads how many workers a training may have that goes on when some are lost and others come."""

from __future__ import annotations

import re
from typing import NamedTuple

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
