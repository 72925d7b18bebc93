"""Checks the threat model in docs/security.md: each letter is explained, each test it names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_no_names_tests_that_exist() -> None:
    page = (ROOT / "docs/security.md").read_text()
    section = page.split("## Threat model")[1].split("\n## ")[0]
    table, tests = section.split("\nTests: ")
    rows = [row.split("|")[2:5] for row in table.splitlines() if row.startswith("| ") and "---" not in row]
    cells = [cell.strip() for row in rows[1:] for cell in row]
    assert len(cells) >= 45
    for cell in cells:
        assert re.match(
            r"no\b.*\([a-u]|not yet\b|yes\b|has it$|its own only$|the same$|.*: (no|not yet)\b", cell
        ), cell
    used = {letter for group in re.findall(r"\(([a-u](?:, [a-u])*)\)", table) for letter in group.split(", ")}
    explained = set(re.findall(r"\(([a-u])\)", tests))
    assert used == explained == set("abcdefghijklmnopqrstu")
    sources = "\n".join(
        path.read_text() for path in [*ROOT.glob("tests/**/*.py"), *ROOT.glob("tests/core/*.cc")]
    )
    names = re.findall(r"`(\w+(?:\.py)?)`", tests)
    assert len(names) >= 15
    for name in names:
        found = (
            list(ROOT.glob(f"tests/**/{name}"))
            if name.endswith(".py")
            else re.search(rf"\b{name}[()]", sources)
        )
        assert found, f"docs/security.md names the test {name}, which does not exist"
