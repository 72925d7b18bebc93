"""What is wrong in a file of annotations or results: refused at once, or counted and told at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from shoal.errors import UsageError

OnBad = Literal["refuse", "skip"]

_SHOWN = 3
"""So many places are named in a message."""


class BadEntries:
    """Collects the entries of one file that cannot be used, by what is wrong with them."""

    def __init__(self, path: Path, on_bad: OnBad) -> None:
        self.path = path
        self._on_bad = on_bad
        self._places: dict[str, list[str]] = {}
        self._counts: dict[str, int] = {}

    def add(self, rule: str, place: str, what: str = "") -> None:
        """Take note of an entry.

        Args:
            rule: what such entries have in common, as "with a box of no area"; they are counted by it.
            place: where it stands, as ``annotations[7] (id 12)``.
            what: the value that is wrong, for the refusal.

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
        """Count an entry that is used all the same, or is skipped whatever ``on_bad`` says."""
        self._counts[rule] = self._counts.get(rule, 0) + 1
        places = self._places.setdefault(rule, [])
        if len(places) < _SHOWN:
            places.append(place)

    @property
    def counts(self) -> dict[str, int]:
        """How many entries there are of each kind, by the rule that they break."""
        return dict(self._counts)

    def lines(self) -> list[str]:
        """Return one line for each kind of entry."""
        return [
            f"{self.path}: {count} {rule} ({', '.join(self._places[rule])}"
            f"{f' and {count - _SHOWN} more' if count > _SHOWN else ''})"
            for rule, count in self._counts.items()
        ]
