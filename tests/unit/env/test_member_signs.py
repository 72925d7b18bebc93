"""Tests the signs of workers for their launcher."""

from __future__ import annotations

from pathlib import Path

from shoal.env.member_signs import have_begun, name_begin, name_standstill, take_standstills


def test_each_worker_is_taken_once(tmp_path: Path) -> None:
    (tmp_path / "error-1.json").touch()
    for _ in range(2):  # by two others
        name_standstill(tmp_path, 1, "4711")
    name_standstill(tmp_path, 12, "13")
    assert sorted(take_standstills(tmp_path)) == [(1, 4711), (12, 13)]
    assert take_standstills(tmp_path) == []


def test_the_begin_is_told_once_by_all(tmp_path: Path) -> None:
    assert not have_begun(tmp_path)
    for _ in range(2):
        name_begin(tmp_path)
        assert have_begun(tmp_path)
