"""Runs PyTorch's own tests of collectives, barriers and messages, of its wheel, on backend ``"shoal"``."""

from __future__ import annotations

import pytest
from benchmarks.backend_suite import COLLECTIVES, run_suite
from wheels import ROOT


@pytest.mark.timeout(600)
def test_pytorchs_collectives_and_barriers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that takes longer than 60 s fails. All together take about two minutes."""
    monkeypatch.chdir(ROOT)
    tests = run_suite("shoal", COLLECTIVES)["tests"]
    failed = {name: test["why"] for name, test in tests.items() if test["outcome"] == "failed"}
    assert not failed, failed
    passed = [name for name, test in tests.items() if test["outcome"] == "passed"]
    assert len(passed) >= 60 and "test_monitored_barrier_gloo_rank_0_timeout" in passed
