"""Refuses the invalid entries of a file of annotations or results, or counts them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from shoal.errors import UsageError

OnBad = Literal["refuse", "skip"]

_SHOWN = 3
"""Number of places that a message names."""


class BadEntries:
    """Collects the invalid entries of one file by the rule that they break."""

    def __init__(self, path: Path, on_bad: OnBad) -> None:
        self.path = path
        self._on_bad = on_bad
        self._places: dict[str, list[str]] = {}
        self._counts: dict[str, int] = {}

    def add(self, rule: str, place: str, what: str = "") -> None:
        """Refuse or count an entry.

        Args:
            rule: a description of such entries ("with a box of no area"), by which they are counted.
            place: its position, as ``annotations[7] (id 12)``.
            what: the invalid value, for the error.

        Raises:
            UsageError: bad entries are refused.
        """
        if self._on_bad == "refuse":
            raise UsageError(
                f"{self.path}: {place} is {rule}{f': {what}' if what else ''}; correct the file, or let such "
                "entries be skipped (--on-bad skip)"
            )
        self.note(rule, place)

    def note(self, rule: str, place: str) -> None:
        """Count an entry without refusing it."""
        self._counts[rule] = self._counts.get(rule, 0) + 1
        places = self._places.setdefault(rule, [])
        if len(places) < _SHOWN:
            places.append(place)

    @property
    def counts(self) -> dict[str, int]:
        """Number of entries by the rule that they break."""
        return dict(self._counts)

    def lines(self) -> list[str]:
        """Return one line per rule."""
        return [
            f"{self.path}: {count} {rule} ({', '.join(self._places[rule])}"
            f"{f' and {count - _SHOWN} more' if count > _SHOWN else ''})"
            for rule, count in self._counts.items()
        ]
