"""Runs every script of ``examples/`` as a reader would."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from forked import fork_process, wait_for

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def _script(path: str, arguments: list[str], output: str) -> None:
    sys.argv = [path, *arguments]
    with Path(output).open("w", encoding="utf-8") as file:
        sys.stdout = sys.stderr = file
        runpy.run_path(path, run_name="__main__")


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [("plan_my_model", ["--helpers", "4xc5n.18xlarge"], "the best layouts")],
)
def test_example(name: str, arguments: list[str], expected: str, tmp_path: Path) -> None:
    path = EXAMPLES / f"{name}.py"
    source = path.read_text(encoding="utf-8")
    assert source.count("\n") <= 80, "an example fits a screen or two"
    output = tmp_path / "output"
    process = fork_process(_script, str(path), arguments, str(output))
    assert wait_for([process]) == [0], output.read_text(encoding="utf-8")
    assert expected in output.read_text(encoding="utf-8")
