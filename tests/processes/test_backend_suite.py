"""Runs all of PyTorch's own distributed tests of its wheel; ``tests/real`` runs those of collectives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_pytorchs_own_suite_passes_where_gloo_does(tmp_path: Path) -> None:
    out = tmp_path / "suite.json"
    command = [sys.executable, "-m", "benchmarks.backend_suite", "--json", str(out)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=2300, check=False)
    assert child.returncode == 0, child.stdout + child.stderr
    rows = {row["case"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["tests that pass with gloo"]["ours"] >= 94
    assert "FAILS" not in child.stdout
