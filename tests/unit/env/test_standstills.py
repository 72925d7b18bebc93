"""Tests that a worker is named to its launcher once."""

from __future__ import annotations

from pathlib import Path

from shoal.env.standstills import name_standstill, take_standstills


def test_each_worker_is_taken_once(tmp_path: Path) -> None:
    (tmp_path / "error-1.json").touch()
    for _ in range(2):  # by two others
        name_standstill(tmp_path, 1, "4711")
    name_standstill(tmp_path, 12, "13")
    assert sorted(take_standstills(tmp_path)) == [(1, 4711), (12, 13)]
    assert take_standstills(tmp_path) == []
