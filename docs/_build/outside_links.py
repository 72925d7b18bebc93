"""Adds to the site what pages link to outside of docs/: examples, results of benchmarks, CONTRIBUTING.md.

``../examples/ddp.py`` in a page leads to that file in the repository. In the site it leads to a page below
``source/`` with the file's text, a folder to a list of its files.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

_LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")
_SHOWN = {".py": "python", ".toml": "toml", ".cc": "c++", ".h": "c++", ".txt": "text", ".yml": "yaml"}

_pages: dict[str, str] = {}
"""Path in the repository -> path in the site."""


def on_files(files: Any, *, config: Any) -> Any:
    """Add a page for each file that a page links to, and for those that they link to in turn."""
    root, docs = Path(config.config_file_path).parent, Path(config.docs_dir)
    _pages.clear()
    for file in files:
        if file.abs_src_path:
            _pages[(docs / file.src_uri).relative_to(root).as_posix()] = file.src_uri
    queue = [(path, uri) for path, uri in _pages.items() if uri.endswith(".md")]
    while queue:
        path, uri = queue.pop()
        for target in _targets(path, files.get_file_from_path(uri).content_string):
            if target in _pages or not (root / target).exists() or target.startswith(("..", "docs/")):
                continue
            page = _page(root / target, target, config)
            _pages[target] = page.src_uri
            files.append(page)
            if page.src_uri.endswith(".md"):
                queue.append((_place(target, root), page.src_uri))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Point the links of a page at those pages, which need the whole width for long lines and wide tables."""
    root = Path(config.config_file_path).parent
    uri = page.file.src_uri
    if uri.startswith("source/"):
        page.meta["hide"] = ["navigation", "toc"]
    target = next((path for path, known in _pages.items() if known == uri), f"docs/{uri}")
    here = _place(target, root)

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), match[1]))
        known = _pages.get(target) or _pages.get(f"{target}/index.md")  # a folder of docs has an index
        if known is None:
            return match[0]
        return posixpath.relpath(known, posixpath.dirname(uri) or ".") + (match[2] or "")

    return _LINK.sub(moved, markdown)


def _targets(path: str, text: str) -> list[str]:
    return [posixpath.normpath(posixpath.join(posixpath.dirname(path), m[1])) for m in _LINK.finditer(text)]


def _place(target: str, root: Path) -> str:
    """Return the path that links of the page of ``target`` are relative to."""
    return f"{target}/index.md" if (root / target).is_dir() else target


def _page(file: Path, target: str, config: Any) -> File:
    if file.is_dir():
        names = sorted(
            f.name for f in file.iterdir() if f.suffix in {".md", *_SHOWN} and f.name[0] not in "._"
        )
        text = f"# {target}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)
        return File.generated(config, f"source/{target}/index.md", content=text)
    if file.suffix == ".md":
        return File.generated(config, f"source/{target}", content=file.read_text())
    if file.suffix in _SHOWN:
        text = f"# {target}\n\n````{_SHOWN[file.suffix]}\n{file.read_text()}````\n"
        return File.generated(config, f"source/{target}.md", content=text)
    return File.generated(config, f"source/{target}", abs_src_path=str(file))
