"""Checks that the fork server preloads modules and freezes its heap; a failure would only slow tests down."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

from forked import PRELOADED, fork_process, wait_for


def _look(path: Path) -> None:
    missing = [name for name in PRELOADED if name not in sys.modules]
    path.write_text(f"{missing} {gc.get_freeze_count() > 100_000} {os.environ.get('PYTHONPATH')}")


def test_what_all_need_is_loaded_and_left_alone_by_the_collector(tmp_path: Path) -> None:
    before = os.environ.get("PYTHONPATH")
    assert wait_for([fork_process(_look, tmp_path / "found")]) == [0]
    assert (tmp_path / "found").read_text() == f"[] True {before}"
