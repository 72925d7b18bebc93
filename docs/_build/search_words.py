"""Says to the search what pages are for: words that readers type for them, how much they count, which are left out.

``search.toml`` beside this file has the words. They are searched, and shown nowhere.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from mkdocs.exceptions import Abort

FILE = Path(__file__).with_name("search.toml")
_NAME = "e=e+s+o.id"


def on_files(files: Any, **_: Any) -> None:
    """Abort if the file names a page that does not exist."""
    gone = sorted(set(_read()["words"]) - {file.src_uri for file in files})
    if gone:
        raise Abort(f"{FILE.name} has words of pages that do not exist: {', '.join(gone)}")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> None:
    """Give a page its place in the search."""
    settings, uri = _read(), page.file.src_uri
    if words := settings["words"].get(uri):
        page.meta["tags"] = words
        page.meta["search"] = {"boost": settings["boost_of_guides"]}
    elif uri.startswith(tuple(settings["left_out"])):
        page.meta["search"] = {"exclude": True}


def on_post_build(*, config: Any) -> None:
    """Mend the search's library (lunr 2.3.9), which lost words of an index that has words with digits.

    It names a node of its tree of words by the letters and numbers of the nodes below, with nothing between:
    ``a`` to node 12, and ``a`` to node 1 beside ``2`` to another, could have one name, and be taken for one.
    """
    folder = Path(config["site_dir"]) / "assets" / "javascripts" / "workers"
    scripts = list(folder.glob("search.*.min.js"))
    for script in scripts:
        text = script.read_text(encoding="utf-8")
        if text.count(_NAME) != 1:
            raise Abort(f"{script.name} has not {_NAME} once: look whether lunr is mended there")
        script.write_text(text.replace(_NAME, f'{_NAME}+","'), encoding="utf-8")
    if not scripts:
        raise Abort(f"there is no script of the search in {folder}")


def _read() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))
