"""Tests the choice of a command's output: one JSON document, nothing, or its text."""

from __future__ import annotations

import json
from pathlib import Path

from forked import shoal

PLAN = ("plan", "bert-large", "--cluster", "8xp3dn.24xlarge")


def test_the_document_alone_is_printed(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    text = shoal(*PLAN, "--json", str(file))
    result = shoal(*PLAN, "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == json.loads(file.read_text())
    assert text.stdout.splitlines()[:3] == result.stderr.splitlines()[:3]  # the text goes to stderr


def test_a_dash_is_the_output_and_quiet_leaves_the_document() -> None:
    result = shoal("--quiet", "plan", "bert-large", "--json", "-", "--cluster", "8xp3dn.24xlarge")
    assert json.loads(result.stdout) and result.stderr == ""


def test_quiet_prints_errors_only() -> None:
    words = ("emulate", "--hosts", "2", "--dry-run", "--quiet", "--", "true")
    result = shoal(*words)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    result = shoal("plan", "bert-lage", "--cluster", "8xp3dn.24xlarge", "--json", "--quiet")
    assert (result.returncode, result.stdout) == (2, "")
    assert "bert-lage" in result.stderr


def test_words_after_two_dashes_belong_to_the_command() -> None:
    result = shoal("emulate", "--hosts", "2", "--dry-run", "--", "program", "--quiet", "--json")
    assert result.returncode == 0, result.stderr
    assert result.stdout
