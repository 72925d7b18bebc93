"""Checks which cells of the site's tables are kept on one line, and that each knows its column."""

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
        ("<td>2026-11-21</td>", '<td data-column="A" class="short">2026-11-21</td>'),
        (
            '<td style="x"><a href="bert.html">Mask R-CNN</a></td>',
            '<td data-column="A" class="short" style="x"><a href="bert.html">Mask R-CNN</a></td>',
        ),
        ("<td>6 &lt; 7 min</td>", '<td data-column="A" class="short">6 &lt; 7 min</td>'),
        ("<td>thirteen long</td>", '<td data-column="A">thirteen long</td>'),
        ("<td></td>", '<td data-column="A"></td>'),
        ('<td class="other">1 s</td>', '<td data-column="A" class="other">1 s</td>'),
        (
            "<td><code>init_process_group(&quot;a&quot;)</code></td>",
            '<td data-column="A"><code>init_<wbr>process_<wbr>group(&quot;a&quot;)</code></td>',
        ),
    ],
    ids=["date", "link", "reference", "long", "empty", "class", "code"],
)
def test_cells_are_marked(cell: str, expected: str) -> None:
    table = "<table><thead><tr><th>A</th><th>B &amp; <b>C</b></th></tr></thead>{}</table>"
    row = f"<tr>{cell}<td>a cell that may be broken</td></tr>"
    second = '<td data-column="B &amp; C">'
    made = f"<tr>{expected}{second}a cell that may be broken</td></tr>"
    assert short_cells().on_page_content(table.format(row)) == table.format(made)


def test_tables_of_others_stay() -> None:
    listing = '<table class="code"><tr><td>1</td></tr></table>'
    assert short_cells().on_page_content(listing) == listing
