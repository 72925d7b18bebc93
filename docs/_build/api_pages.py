"""Divides the reference of Python: each ``:::`` of a page in ``docs/reference/api`` becomes a page below it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

FOLDER = "reference/api"
_BLOCK = re.compile(r"^::: (\S+)\n((?: +.*\n?)*)", re.MULTILINE)
_MEMBERS = re.compile(r"members: \[(.*)\]")


def on_config(config: Any) -> None:
    """Put the pages below the one that has named them."""
    for entry in _entries(config.nav):
        for title, uri in entry.items():
            if isinstance(uri, str) and uri.startswith(f"{FOLDER}/"):
                blocks = _blocks((Path(config.docs_dir) / uri).read_text(encoding="utf-8"))
                entry[title] = [uri, *({_title(block): _uri(uri, block[0])} for block in blocks)]


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages."""
    for file in [file for file in files if file.src_uri.startswith(f"{FOLDER}/") and file.abs_src_path]:
        for name, options in _blocks(file.content_string):
            content = f"# {_title((name, options))}\n\n::: {name}\n{options}"
            files.append(File.generated(config, _uri(file.src_uri, name), content=content))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Put a link in place of each block of such a page."""
    uri = page.file.src_uri
    if not uri.startswith(f"{FOLDER}/") or not page.file.abs_src_path:
        return markdown

    def link(match: re.Match[str]) -> str:
        target = _uri(uri, match[1]).removeprefix(f"{FOLDER}/")
        return f"- [{_title((match[1], match[2]))}]({target}), from `{match[1]}`\n"

    return _BLOCK.sub(link, markdown)


def _blocks(text: str) -> list[tuple[str, str]]:
    return _BLOCK.findall(text)


def _uri(uri: str, name: str) -> str:
    return f"{uri.removesuffix('.md')}/{name.removeprefix('shoal.')}.md"


def _title(block: tuple[str, str]) -> str:
    """Return the names that a block documents: its members, or the module."""
    members = _MEMBERS.search(block[1])
    return members[1] if members else block[0].rpartition(".")[2]


def _entries(nav: Any) -> list[dict[str, Any]]:
    """Return all entries of the navigation that have a title."""
    found = [entry for entry in nav if isinstance(entry, dict)]
    lists = [inner for entry in found for inner in entry.values() if isinstance(inner, list)]
    return found + [entry for inner in lists for entry in _entries(inner)]
