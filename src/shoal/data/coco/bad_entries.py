"""Refuses the invalid entries of a file of annotations or results, or counts them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from shoal.errors import UsageError

OnBad = Literal["refuse", "skip"]

_SHOWN = 3
"""Number of places that a message names."""


class BadEntry(Exception):
    """Raised for an invalid entry with the rule that it breaks ("a box of no area") and its value, or ""."""


class BadEntries:
    """Collects the invalid entries of one file by the rule that they break."""

    def __init__(self, path: Path, on_bad: OnBad) -> None:
        self.path = path
        self._on_bad = on_bad
        self._places: dict[str, list[str]] = {}

    def add(self, bad: BadEntry, place: str) -> None:
        """Refuse or count the entry at ``place``, as ``annotations[7] (id 12)``.

        Raises:
            UsageError: bad entries are refused.
        """
        rule, what = bad.args
        if self._on_bad == "refuse":
            raise UsageError(
                f"{self.path}: {place} is {rule}{f': {what}' if what else ''}; correct the file, or let such "
                "entries be skipped (--on-bad skip)"
            )
        self._places.setdefault(rule, []).append(place)

    @property
    def counts(self) -> dict[str, int]:
        """Number of entries by the rule that they break."""
        return {rule: len(places) for rule, places in self._places.items()}

    def lines(self) -> list[str]:
        """Return one line per rule."""
        return [
            f"{self.path}: {len(places)} {rule} ({', '.join(places[:_SHOWN])}"
            f"{f' and {len(places) - _SHOWN} more' if len(places) > _SHOWN else ''})"
            for rule, places in self._places.items()
        ]
