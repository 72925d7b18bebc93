"""Reads what the fuzzer once failed on, and inputs as it makes them: each is read, or refused by name."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fuzz.mutations import change
from fuzz.readers import CORPUS, TARGETS, check, made_seeds
from shoal.env.settings import test_data_dir as data_dir

REPORTS = data_dir() / "reports"
KEPT = sorted(path for path in CORPUS.rglob("*") if path.is_file() and path.parent.name != "core")


@pytest.mark.parametrize("path", [pytest.param(path, id=f"{path.parent.name}-{path.name}") for path in KEPT])
def test_what_once_failed_is_refused(path: Path) -> None:
    assert check(path.parent.name, path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_a_right_input_is_read_and_changed_ones_are_read_or_refused(name: str) -> None:
    rng = random.Random(1)
    for data in made_seeds(name):
        error = check(name, data)
        assert not error or "is missing" in error or "cannot be read" in error  # files beside a manifest
        for _ in range(20):
            check(name, change(data, TARGETS[name].form, rng))


@pytest.mark.skipif(not REPORTS.is_dir(), reason="SHOAL_TEST_DATA has no reports")
@pytest.mark.parametrize("name", TARGETS)
def test_reported_files_are_read_or_refused(name: str) -> None:
    for path in sorted(REPORTS.rglob(f"*{Path(TARGETS[name].file).suffix}")):
        check(name, path.read_bytes())
