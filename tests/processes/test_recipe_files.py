"""Counts the files that two steps, an evaluation and a checkpoint of ALBERT run, and those behind it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pretrain_jobs as jobs

import shoal
from forked import fork_process, wait_for
from shoal.errors import EXIT_OK
from shoal.recipes.albert import AlbertConfig, main

PACKAGE = Path(shoal.__file__).parent
OPEN_TO_ALL = ("models/", "data/", "comm/", "optim/", "dropout.py")
"""Layers, readers, hooks and optimizers: a recipe calls them, and their insides are not its story."""


def _profiled(config: AlbertConfig, out: Path) -> None:
    seen: set[str] = set()
    recording = False
    opened = tuple(f"{PACKAGE}/{name}" for name in OPEN_TO_ALL)

    def below_open_package(frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code.co_filename.startswith(opened):
                return True
            frame = frame.f_back
        return False

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal recording
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(PACKAGE)):
            return
        if code.co_qualname == "Step.__init__":
            recording = frame.f_locals["number"] in (5, 6)  # up to the step after, scores and checkpoint at 6
        if recording and not below_open_package(frame.f_back):
            seen.add(str(Path(code.co_filename).relative_to(PACKAGE)))

    sys.setprofile(note)
    try:
        assert main(config) == EXIT_OK
    finally:
        sys.setprofile(None)
    out.write_text(json.dumps(sorted(seen)))


def test_few_files_tell_how_albert_trains(tmp_path: Path) -> None:
    config = jobs.small_config(jobs.prepare_small(tmp_path), tmp_path / "run")
    assert wait_for([fork_process(_profiled, config, tmp_path / "seen.json")], 120) == [EXIT_OK]
    seen = json.loads((tmp_path / "seen.json").read_text())
    own = [name for name in seen if not name.startswith(OPEN_TO_ALL)]
    print("\n".join(own))
    assert "recipes/albert.py" in own and "train/checkpoint.py" in own
    assert len(own) <= 8, own
