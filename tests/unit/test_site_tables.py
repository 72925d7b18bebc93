"""Checks which cells of the documentation site's tables are kept on one line."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[2] / "docs" / "_build" / "short_cells.py"


def short_cells() -> ModuleType:
    spec = importlib.util.spec_from_file_location("short_cells", FILE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("<td>2026-11-21</td>", '<td class="short">2026-11-21</td>'),
        ('<td style="x"><a href="bert.html">Mask R-CNN</a></td>', None),
        ("<td>6 &lt; 7 min</td>", '<td class="short">6 &lt; 7 min</td>'),
        ("<td>thirteen long</td>", "<td>thirteen long</td>"),
        ("<td></td>", "<td></td>"),
        ('<td class="other">1 s</td>', '<td class="other">1 s</td>'),
    ],
)
def test_short_cells_are_marked(cell: str, expected: str | None) -> None:
    row = f"<tr>{cell}<td>a cell that may be broken</td></tr>"
    if expected is None:
        expected = cell.replace("<td", '<td class="short"')
    assert short_cells().on_page_content(row) == row.replace(cell, expected)
