"""Divides the results: a page a subject, and before them the rows that the README has too.

``results.md`` is one file for who reads the repository, and too long for a page of the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

SOURCE = "results.md"
FOLDER = "results"
_TABLE = re.compile(r"<!-- results -->\n(.*?)<!-- end of results -->", re.DOTALL)
_SUBJECT = re.compile(r"^## (.+)$", re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()([\w./-]*)(#[\w-]+)?(?=\))")


def on_config(config: Any) -> None:
    """Put the pages below the results."""
    pages = [{title.replace("`", ""): _uri(title)} for title in _subjects(config)[1]]
    for entry in config.nav:
        for title, inner in entry.items():
            if title == "Results":
                entry[title] = [SOURCE, *inner[1:], *pages]


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages."""
    for title, text in _subjects(config)[1].items():
        moved = _LINK.sub(lambda link: _from_below(link[1]) + (link[2] or ""), text)
        files.append(File.generated(config, _uri(title), content=f"# {title}\n{moved}"))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Leave of the results what stands before the subjects, and point links at the subjects' pages."""
    introduction, subjects = _subjects(config)
    if page.file.src_uri == SOURCE:
        readme = (Path(config.config_file_path).parent / "README.md").read_text(encoding="utf-8")
        (table,) = _TABLE.findall(readme)
        listed = "".join(f"- [{title}]({_uri(title)})\n" for title in subjects)
        markdown = f"{introduction}\n## In short\n\n{table}\n## By subject\n\n{listed}"
    slugs = {f"#{_slug(title)}": _uri(title) for title in subjects}
    folder = posixpath.dirname(page.file.src_uri)

    def pointed(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[1])) if link[1] else page.file.src_uri
        if link[2] not in slugs or not (target == SOURCE or (page.file.src_uri.startswith(FOLDER) and not link[1])):
            return link[0]
        return posixpath.relpath(slugs[link[2]], folder or ".")

    return _LINK.sub(pointed, markdown)


def _subjects(config: Any) -> tuple[str, dict[str, str]]:
    """Return the introduction, and the text of each subject."""
    introduction, *rest = _SUBJECT.split((Path(config.docs_dir) / SOURCE).read_text(encoding="utf-8"))
    return introduction, dict(zip(rest[::2], rest[1::2], strict=True))


def _slug(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _uri(title: str) -> str:
    return f"{FOLDER}/{_slug(title)}.md"


def _from_below(link: str) -> str:
    return f"../{link}" if link else link
