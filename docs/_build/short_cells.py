"""Prepares tables: dates, figures with their units and short names stay on one line, cells know their column.

A phone shows each row as a card, whose lines begin with the names of the columns.
"""

from __future__ import annotations

import html
import re
from typing import Any

LONGEST = 12
"""Characters of a cell that is not broken: a date has 10, "12.4 days" 9, "Mask R-CNN" 10."""
WIDE = 10
"""Columns of a table that needs the width of two columns of the page."""

_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_HEADING = re.compile(r"<th(?: [^>]*)?>(.*?)</th>", re.DOTALL)
_ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
_CELL = re.compile(r"<td([^>]*)>(.*?)</td>", re.DOTALL)
_CODE = re.compile(r"(<code>)([^<]{13,})(</code>)")
_SEAM = re.compile(r"&\w+;|[_./(,=:](?=\w)")
"""Matches the characters after which long code in a cell may break."""
_TAG = re.compile(r"<[^>]+>")


def on_page_content(text: str, *, page: Any = None, **_: Any) -> str:
    """Mark the cells for the style sheet; a page with a wide table has no table of contents beside it."""
    if page is not None and any(len(_HEADING.findall(table)) >= WIDE for table in _TABLE.findall(text)):
        page.meta.setdefault("hide", ["toc"])
    return _TABLE.sub(_prepared, text)


def _prepared(table: re.Match[str]) -> str:
    names = [_TAG.sub("", heading).strip() for heading in _HEADING.findall(table[0])]

    def row(match: re.Match[str]) -> str:
        columns = iter(names)
        return _CELL.sub(lambda cell: _marked(cell, next(columns, "")), match[0])

    return _ROW.sub(row, table[0])


def _marked(cell: re.Match[str], column: str) -> str:
    attributes, content = cell.groups()
    shown = html.unescape(_TAG.sub("", content)).strip()
    if "class=" not in attributes and 0 < len(shown) <= LONGEST:
        attributes = f' class="short"{attributes}'
    content = _CODE.sub(lambda code: code[1] + _SEAM.sub(_with_seam, code[2]) + code[3], content)
    label = html.escape(html.unescape(column))
    return f'<td data-column="{label}"{attributes}>{content}</td>'


def _with_seam(match: re.Match[str]) -> str:
    """Return a character after which a line may end; a character reference stays whole."""
    return match[0] if match[0].startswith("&") else f"{match[0]}<wbr>"
