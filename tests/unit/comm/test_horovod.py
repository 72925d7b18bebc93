from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from shoal.comm import horovod

PAGE = (Path(__file__).parents[3] / "docs/from-horovod.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("package", ["shoal.tensorflow", "shoal.keras"])
def test_names_that_the_page_calls_the_same_exist(package: str) -> None:
    table = PAGE.split(f"## {package}\n")[1].split("\n## ")[0]
    rows = [row.split(" | ") for row in table.splitlines() if row.startswith("| `") and row.count(" | ") > 1]
    names = [
        name
        for left, right, *_ in rows
        if right.startswith("the same")
        for name in re.findall(r"`([a-zA-Z_]\w*)[^`]*`", left)
        if name != "callbacks"
    ]
    assert len(names) > 12
    known = importlib.import_module(package).__all__
    assert [name for name in names if name not in known] == []
    for name in names:  # the file for type checkers names it too
        stub = Path(importlib.import_module(package).__file__ or "").with_suffix(".pyi").read_text()
        assert f" as {name}\n" in stub


def test_formats() -> None:
    assert (horovod.Compression.none, horovod.Compression.fp16) == (None, "float16")
    assert (horovod.Average, horovod.Sum) == ("mean", "sum")
