"""Runs the examples in the docstrings of the package."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest
import torch

SOURCES = Path(__file__).resolve().parents[2] / "src"
MODULES = [
    ".".join(path.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(SOURCES.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings(module: str) -> None:
    try:
        failed, attempted = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert attempted and not failed, f"{failed} of {attempted} examples failed; see the output"
