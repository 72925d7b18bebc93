"""Makes ``docs/results.md`` and the README's table from ``results_page.toml`` and the files of results.

    python -m benchmarks.results_page

A figure is written once, by the benchmark that measured it, and read from there.
"""

from __future__ import annotations

import json
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROWS = Path(__file__).with_suffix(".toml")
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"
README = ROOT / "README.md"
COLUMNS = ("setup", "peer", "target", "reached", "date", "command")
_UNITS = {"us": "µs", "1/s": "questions/s"}
README_COLUMNS = ("what", "against", "wanted", "reached", "date")
_TABLE = re.compile(r"(?<=<!-- results -->\n\n).*?(?=\n\n<!-- end of results -->)", re.DOTALL)


def read_rows(path: Path = ROWS) -> dict[str, Any]:
    """Return the intro and the subjects; each row has the defaults of its subject."""
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    for subject in content["subject"]:
        defaults = {key: subject[key] for key in ("peer", "source", "command", "date") if key in subject}
        subject["rows"] = [{**defaults, **row} for row in subject["rows"]]
    return content


@cache
def _result(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return result


def measured(row: dict[str, Any]) -> dict[str, Any]:
    """Return the one row of a JSON result that a row of the page refers to.

    Raises:
        ValueError: none or several.
    """
    found = [
        one
        for one in _result(row["file"])["rows"]
        if one["case"] == row["case"] and row.get("against", one["peer_name"]) == one["peer_name"]
    ]
    if len(found) != 1:
        raise ValueError(f"{row['file']}.json has {len(found)} rows for {row['case']!r}; say `against` which")
    the_row: dict[str, Any] = found[0]
    return the_row


def cells(row: dict[str, Any]) -> dict[str, str]:
    """Return the cells of a row by column, and ``detail``, what both sides of a ratio measured."""
    made = (
        {name: row[name] for name in COLUMNS} | {"detail": ""} if "reached" in row else _measured_cells(row)
    )
    return {name: re.sub(r"(?<=\d)%", " %", cell) for name, cell in made.items()}


def is_missed(row: dict[str, Any]) -> bool:
    """Return whether a row misses its target."""
    if "reached" in row:
        return bool(row.get("missed", False))
    one = measured(row)
    return not one["holds"] or ("limit" in row and one["ours"] > row["limit"])


def _measured_cells(row: dict[str, Any]) -> dict[str, str]:
    one, result = measured(row), _result(row["file"])
    stated = re.search(r": ([\d.]+)", one["case"])
    fields = {
        **{name: one[name] for name in ("ours", "peer", "ratio", "target")},
        "minutes": one["ours"] / 60,
        "peer_minutes": one["peer"] / 60,
        "stated": stated and stated[1],
    }
    if "show" in row:
        target, reached, detail = "–", row["show"].format(**fields), ""
    else:
        target = "–" if one["target"] is None else f"{one['target']:g}×"
        reached = f"{_ratio(one['ratio'])}×"
        detail = (
            f"{_figure(one['ours'])} against {_figure(one['peer'])} {_UNITS.get(one['unit'], one['unit'])}"
        )
    return {
        "setup": row["setup"],
        "peer": row["peer"].format(**fields),
        "target": row["target"].format(**fields) if "target" in row else target,
        "reached": reached,
        "date": result["date"][:10],
        "command": result["command"],
        "detail": detail,
    }


def _ratio(ratio: float) -> str:
    return f"{ratio:.{2 if ratio < 10 else 1 if ratio < 100 else 0}f}"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def page(content: dict[str, Any]) -> str:
    """Return ``docs/results.md``; missed targets are bold."""
    lines = [content["intro"].strip()]
    for subject in content["subject"]:
        lines += ["", f"## {subject['title']}"]
        if "note" in subject:
            lines += ["", subject["note"].strip()]
        if subject["rows"]:
            lines += ["", *_table(COLUMNS, [_page_row(row) for row in subject["rows"]])]
    return "\n".join(lines) + "\n"


def _page_row(row: dict[str, Any]) -> dict[str, str]:
    made = cells(row)
    details = "; ".join(filter(None, (made["detail"], row.get("note"))))
    made["reached"] = _reached(row, made) + (f" ({details})" if details else "")
    made["command"] = f"`{made['command']}`"
    if "file" in row:
        made["date"] = f"[{made['date']}](../benchmarks/results/{row['file']}.json)"
    return made


def _reached(row: dict[str, Any], made: dict[str, str]) -> str:
    return f"**{made['reached']}**" if is_missed(row) else made["reached"]


def readme(content: dict[str, Any], text: str) -> str:
    """Return the README's text with its table renewed.

    Raises:
        ValueError: the text has no place for the table, or several.
    """
    rows = []
    for subject in content["subject"]:
        for row in subject["rows"]:
            if "readme" in row:
                made = cells(row)
                words = {"what": row["readme"], "against": made["peer"], "wanted": made["target"]}
                rows.append({**made, **words, "reached": _reached(row, made)})
    table = "\n".join(_table(README_COLUMNS, rows))
    renewed, count = _TABLE.subn(lambda _: table, text)
    if count != 1:
        raise ValueError(f"the README has {count} places for the table, between the comments about results")
    return renewed


def _table(columns: tuple[str, ...], rows: list[dict[str, str]]) -> list[str]:
    lines = [list(columns), *([row[name] for name in columns] for row in rows)]
    first, *rest = (f"| {' | '.join(line)} |" for line in lines)
    return [first, "|" + "---|" * len(columns), *rest]


def main() -> None:
    content = read_rows()
    PAGE.write_text(page(content), encoding="utf-8")
    README.write_text(readme(content, README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
