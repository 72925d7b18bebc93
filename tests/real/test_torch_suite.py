"""Runs PyTorch's own tests of collectives, barriers and messages, of its wheel, on backend ``"shoal"``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.backend_suite import COLLECTIVES
from wheels import ROOT


@pytest.mark.timeout(600)
def test_pytorchs_collectives_and_barriers(tmp_path: Path) -> None:
    """A test that takes longer than 60 s fails. All together take about two minutes."""
    out, worker = tmp_path / "result.json", "benchmarks.backend_suite_worker"
    command = [sys.executable, "-m", worker, "shoal", str(out), "--match", COLLECTIVES]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stdout + child.stderr
    tests = json.loads(out.read_text())["tests"]
    failed = {name: test["why"] for name, test in tests.items() if test["outcome"] == "failed"}
    assert not failed, failed
    passed = [name for name, test in tests.items() if test["outcome"] == "passed"]
    assert len(passed) >= 60 and "test_monitored_barrier_gloo_rank_0_timeout" in passed
