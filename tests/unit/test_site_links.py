"""Checks that broken links of the documentation site are found, and no others."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "_build"

GOOD = {
    "index.html": '<h1 id="top">a</h1><a href="b/c.html#here">b</a><a href="https://a.org/">c</a>',
    "b/c.html": '<a href="../index.html" id="here">a</a><img src="../a.svg"><a href="#here">b</a>',
    "a.svg": "<svg/>",
    "404.html": '<a href="/nowhere.html">a</a>',
}


def check_site() -> ModuleType:
    pytest.importorskip("mkdocs", reason="no mkdocs found: pip install '.[docs]' to run this")
    spec = importlib.util.spec_from_file_location("check_site", FOLDER / "check_site.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        ("", []),
        ('<a href="gone.html">x</a>', ["index.html links to gone.html, which does not exist"]),
        ('<a href="b/c.html#gone">x</a>', ["index.html links to b/c.html#gone, which has no such anchor"]),
        ('<a href="#gone">x</a>', ["index.html links to #gone, which has no such anchor"]),
        ('<img src="gone.png">', ["index.html links to gone.png, which does not exist"]),
        ('<script src="https://example.org/x.js"></script>', ["index.html loads https://example.org/x.js"]),
        ('<link rel="stylesheet" href="//example.org/x.css">', ["index.html loads //example.org/x.css"]),
    ],
)
def test_broken_links_are_named(tmp_path: Path, added: str, expected: list[str]) -> None:
    for name, text in GOOD.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text + (added if name == "index.html" else ""))
    assert check_site().broken(tmp_path) == expected
