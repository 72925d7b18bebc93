"""Puts hand-drawn pictures into the page, so that they follow its light or dark colours; widens the first page.

An SVG whose root has the class "picture" replaces the ``<img>`` that shows it. As a file of the repository it
follows the reader's system.
"""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path
from typing import Any

_IMAGE = re.compile(r'<img alt="([^"]*)" src="([^"]+\.svg)"[^>]*/?>')


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> None:
    """Hide the empty columns beside the first page."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation", "toc"]


def on_page_content(text: str, *, page: Any, config: Any, **_: Any) -> str:
    """Replace the images."""

    def inlined(match: re.Match[str]) -> str:
        alt, source = match.groups()
        folder = posixpath.dirname(page.url)
        svg = (Path(config.docs_dir) / posixpath.normpath(posixpath.join(folder, source))).read_text()
        if 'class="picture"' not in svg:
            return match[0]
        label = f'role="img" aria-label="{html.escape(html.unescape(alt))}"'
        return svg[svg.index("<svg") :].replace("<svg", f"<svg {label}", 1)

    return _IMAGE.sub(inlined, text)
