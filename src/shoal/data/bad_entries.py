"""Counts the invalid entries of a data set by their kind, and refuses a set that has too many.

Standard sets are published with flaws of known kinds (:data:`STANDARD`): such entries are left out, however
many there are. Of all other kinds a few are left out too; many of them mean that the file is damaged, or that
it is read by a wrong option. What was left out is said once, with the first places.
"""

# Annotations are types here, not texts: the command line resolves texts in the module of the subclass.

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shoal.atomic_io import TO_UTF8
from shoal.errors import UsageError

OnBad = Literal["skip", "refuse"]
"""Leave invalid entries out and count them, or refuse the first one."""

MOST_BAD = 0.01
"""Share of a set's entries that may be of kinds which are not in :data:`STANDARD`."""

NO_AREA = "an annotation whose box has no area inside its image"
NO_LABEL = "an example without a label"
OTHER_WIDTH = "a line with another number of columns than the first line"
NOT_PARSED = "a page that the parser of wikitext refuses"
NO_TEXT = "a row whose text is null"
NOT_UTF8 = "an entry with bytes that are not UTF-8"
REPEATED = "a token that is there again below, where its id is"

STANDARD = {
    NO_AREA: "COCO train2017: 2",
    NO_LABEL: "SNLI: 785 in the training set; MNLI's '-'",
    OTHER_WIDTH: "GLUE's QQP; SNLI",
    NOT_PARSED: "dumps of Wikipedia",
    NO_TEXT: "corpora on the hub",
    REPEATED: "the vocabulary of bert-base-multilingual-uncased",
}
"""Kinds that standard sets have as published, and where; they are left out at any share."""

_FEW = 20
"""Entries of other kinds that are left out whatever their share."""
_SHOWN = 3
"""Places that a message names."""
_ESCAPED = re.compile("[\udc80-\udcff]")
"""Bytes that are not UTF-8 in texts that ``surrogateescape`` decoded."""


@dataclass(frozen=True, kw_only=True)
class BadEntriesConfig:
    """Treatment of invalid entries."""

    on_bad: OnBad = "skip"
    """Leave out and count what cannot be used, or stop at the first."""
    most_bad: float = MOST_BAD
    """Largest share that may be left out, beside flaws that standard sets are known for."""

    def bad_entries(self, source: Path | str, options: str = "--") -> "BadEntries":
        """Return the counter of the invalid entries of a file; see :class:`BadEntries`.

        Raises:
            UsageError: ``most_bad`` is no share.
        """
        if not 0 <= self.most_bad <= 1:
            raise UsageError(f"{options}most-bad {self.most_bad:g} must be a share from 0 to 1")
        return BadEntries(source, self.on_bad, self.most_bad, options=options)


class BadEntry(Exception):
    """Raised for an invalid entry with its kind ("a box of no area") and its value, or ""."""


def wrong_byte(texts: Iterable[str]) -> BadEntry | None:
    """Return the flaw of an entry whose texts have a byte that is not UTF-8, ``None`` if they have none.

    Args:
        texts: parts of a text that :func:`shoal.atomic_io.read_text` read with ``keep_wrong``.
    """
    match = next(filter(None, map(_ESCAPED.search, texts)), None)
    return BadEntry(NOT_UTF8, f"{ord(match[0]) - 0xDC00:#04x}; {TO_UTF8}") if match else None


@dataclass
class _Kind:
    count: int = 0
    locations: list[str] = field(default_factory=list)
    """The first few."""


class BadEntries:
    """Counts the invalid entries of one file, or of one source.

    Args:
        source: its name, for messages.
        on_bad: whether the first invalid entry is an error.
        most_bad: share of the entries that may be invalid in kinds that no standard set has.
        options: beginning of the two options' names, such as ``--data.``.

    Example:
        >>> bad = BadEntries(Path("pairs.tsv"))
        >>> bad.add(BadEntry("a row that is no object", "7"), "line 13")
        >>> bad.check(num_good=19)
        >>> bad.lines()
        ['pairs.tsv: left out 1: row that is no object: 1 (line 13: 7)']
    """

    def __init__(
        self,
        source: Path | str,
        on_bad: OnBad = "skip",
        most_bad: float = MOST_BAD,
        *,
        options: str = "--",
    ) -> None:
        self.source = source
        self._options = options
        self._on_bad = on_bad
        self._most_bad = most_bad
        self._kinds: dict[str, _Kind] = {}

    def add(self, bad: BadEntry, location: str | Callable[[], str]) -> None:
        """Count the entry at ``location``, such as ``annotations[7] (id 12)``.

        Args:
            bad: its kind and value.
            location: or a function that looks for it, called only if a message names the location.

        Raises:
            UsageError: invalid entries are refused.
        """
        kind, value = bad.args
        if self._on_bad == "skip" and kind in self._kinds and self._kinds[kind].count >= _SHOWN:
            self._kinds[kind].count += 1
            return
        location = location if isinstance(location, str) else location()
        if self._on_bad == "refuse":
            raise UsageError(
                f"{self.source}: {location} is {kind}{f': {value}' if value else ''}; correct it, or let "
                f"such entries be left out ({self._options}on-bad skip)"
            )
        first = kind not in self._kinds
        self._count(kind, 1, [f"{location}: {value}" if first and value else location])

    def add_counts(self, counts: Mapping[str, tuple[int, Sequence[str]]]) -> None:
        """Add what another process counted, as its ``as_counts`` returned it."""
        for kind, (count, locations) in counts.items():
            self._count(kind, count, locations)

    def as_counts(self) -> dict[str, tuple[int, Sequence[str]]]:
        """Return the number and the first places of each kind, for JSON."""
        return {kind: (counted.count, counted.locations) for kind, counted in self._kinds.items()}

    def _count(self, kind: str, count: int, locations: Sequence[str]) -> None:
        counted = self._kinds.setdefault(kind, _Kind())
        counted.count += count
        counted.locations += locations[: _SHOWN - len(counted.locations)]

    @property
    def total(self) -> int:
        """Number of entries of all kinds."""
        return sum(self.counts.values())

    @property
    def counts(self) -> dict[str, int]:
        """Number of entries by kind."""
        return {kind: counted.count for kind, counted in self._kinds.items()}

    def check(self, num_good: int) -> None:
        """Check at the end of the source that not too many entries were left out.

        Args:
            num_good: entries that are used.

        Raises:
            UsageError: nothing is left, or more than ``most_bad`` and more than a few are of other kinds.
        """
        num_bad = self.total
        num_other = sum(count for kind, count in self.counts.items() if kind not in STANDARD)
        share = num_other / max(num_good + num_bad, 1)
        if num_bad and not num_good:
            raise UsageError(f"{self.source}: nothing can be used; {self.summary()}; correct the file")
        if num_other > _FEW and share > self._most_bad:
            raise UsageError(
                f"{self.source}: {num_other:,} of {num_good + num_bad:,} entries are invalid, more than "
                f"{self._most_bad:.0%}: {self._by_kind()}; correct the file, or let so many be left out "
                f"({self._options}most-bad {min(1.0, round(share + 0.005, 2)):g})"
            )

    def lines(self) -> list[str]:
        """Return a line with the counts of left-out entries; none if there are none."""
        return [f"{self.source}: {self.summary()}"] if self._kinds else []

    def summary(self) -> str:
        """Return the counts of left-out entries, without the name of the source; empty if there are none."""
        return f"left out {self.total:,}: {self._by_kind()}" if self._kinds else ""

    def _by_kind(self) -> str:
        return "; ".join(
            f"{kind.removeprefix('an ').removeprefix('a ')}: {counted.count:,} ("
            f"{', '.join(counted.locations)}"
            f"{f' and {counted.count - len(counted.locations):,} more' * (counted.count > _SHOWN)})"
            for kind, counted in self._kinds.items()
        )
