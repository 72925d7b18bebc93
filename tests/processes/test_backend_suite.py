"""Runs a part of PyTorch's own distributed tests; the benchmark of the same name runs all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_part_of_pytorchs_own_suite(tmp_path: Path) -> None:
    out = tmp_path / "suite.json"
    command = [sys.executable, "-m", "benchmarks.backend_suite", "--quick", "--json", str(out)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert child.returncode == 0, child.stdout + child.stderr
    rows = {row["case"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["tests that pass with gloo"]["ours"] >= 15
    assert "FAILS" not in child.stdout
