"""Checks the finished site: each link leads to a file and an anchor of it, and nothing is loaded from elsewhere.

mkdocs checks the links of Markdown. This reads the HTML, and so also sees what hooks and docstrings have put
there.
"""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from mkdocs.exceptions import Abort

_LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("object", "data")}


class _Page(HTMLParser):
    """Collects the anchors of a page, its links, and what a browser loads for it."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        self.loaded += [given[name] for known, name in _LOADED if known == tag and name in given]


def on_post_build(*, config: Any) -> None:
    """Abort the build with the list of what is wrong."""
    problems = broken(Path(config.site_dir))
    if problems:
        raise Abort("\n".join([f"{len(problems)} broken links:", *problems]))


def broken(site: Path) -> list[str]:
    """Return a line for each link that leads nowhere, and each file that is loaded from another host."""
    pages = {file: _Page(file) for file in sorted(site.rglob("*.html")) if file.name != "404.html"}
    problems = []
    for file, page in pages.items():
        name = file.relative_to(site)
        problems += [f"{name} loads {url}" for url in page.loaded if urlsplit(url).netloc]
        for link in {*page.links, *page.loaded}:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                problems.append(f"{name} links to {link}, which does not exist")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                problems.append(f"{name} links to {link}, which has no such anchor")
    return problems
