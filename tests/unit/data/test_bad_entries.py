"""The rule for invalid entries: left out and counted, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.data.bad_entries import OTHER_WIDTH, STANDARD, BadEntries, BadEntry
from shoal.errors import UsageError

OTHER = "a row that is no object"


def some(kind: str, count: int, most_bad: float = 0.01) -> BadEntries:
    bad = BadEntries(Path("a.tsv"), most_bad=most_bad)
    for number in range(count):
        bad.add(BadEntry(kind, ""), f"line {number + 2}")
    return bad


def test_one_line_counts_kinds_and_names_the_first_places() -> None:
    bad = some(OTHER_WIDTH, 5)
    bad.add(BadEntry(OTHER, "[]"), "line 9")
    bad.check(1000)
    assert bad.lines() == [
        "a.tsv: left out 6: line with another number of columns than the first line: 5 (line 2, line 3, "
        "line 4 and 2 more); row that is no object: 1 (line 9: [])"
    ]
    assert BadEntries(Path("a.tsv")).lines() == []


def test_a_place_is_looked_for_only_if_it_is_named() -> None:
    bad, asked = BadEntries("a.txt"), list[int]()
    for number in range(5):

        def place(number: int = number) -> str:
            asked.append(number)
            return f"line {number}"

        bad.add(BadEntry(OTHER, ""), place)
    assert bad.lines() == ["a.txt: left out 5: row that is no object: 5 (line 0, line 1, line 2 and 2 more)"]
    assert asked == [0, 1, 2]
    with pytest.raises(UsageError, match="line 9 is a row"):
        BadEntries("a.txt", "refuse").add(BadEntry(OTHER, ""), lambda: "line 9")


@pytest.mark.parametrize("kind", STANDARD)
def test_flaws_of_standard_sets_are_left_out_at_any_share(kind: str) -> None:
    some(kind, 900).check(100)


@pytest.mark.parametrize(
    ("count", "num_good", "is_refused"),
    [(20, 1, False), (21, 1, True), (21, 2078, True), (21, 2079, False), (3, 0, True), (0, 0, False)],
)
def test_many_others_are_refused(count: int, num_good: int, is_refused: bool) -> None:
    bad = some(OTHER, count)
    if not is_refused:
        return bad.check(num_good)
    with pytest.raises(UsageError, match=r"^a\.tsv: .*row that is no object: \d+ \(line 2, ") as error:
        bad.check(num_good)
    if num_good:
        share = str(error.value).rpartition("--most-bad ")[2].rstrip(")")
        some(OTHER, count, float(share)).check(num_good)  # the remedy is one
    return None


def test_nothing_left_is_refused_even_if_standard() -> None:
    with pytest.raises(
        UsageError, match=r"a\.tsv: nothing can be used; left out 2: line with another number"
    ):
        some(OTHER_WIDTH, 2, most_bad=1.0).check(0)


def test_the_first_is_refused_on_demand() -> None:
    with pytest.raises(UsageError) as error:
        BadEntries(Path("a.tsv"), "refuse").add(BadEntry(OTHER_WIDTH, "3 for 6"), "line 13")
    assert str(error.value) == (
        f"a.tsv: line 13 is {OTHER_WIDTH}: 3 for 6; correct it, or let such entries be left out "
        "(--on-bad skip)"
    )


def test_counts_of_other_processes_add_up() -> None:
    bad = some(OTHER, 2)
    bad.add_counts(some(OTHER, 7).as_counts())
    assert bad.counts == {OTHER: 9}
    assert bad.lines() == ["a.tsv: left out 9: row that is no object: 9 (line 2, line 3, line 2 and 6 more)"]


def test_the_page_lists_the_kinds_of_standard_sets() -> None:
    page = (Path(__file__).parents[3] / "docs" / "text.md").read_text(encoding="utf-8")
    assert [line for line in page.splitlines() if line.removeprefix("| ").split(" | ")[0] in STANDARD] == [
        f"| {kind} | {sets} |" for kind, sets in STANDARD.items()
    ]
