"""Tries the wheel for Python 3.12 and newer with Debian 13's Python 3.13, in the chroot that built it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from wheels import ROOT, check_file, find_wheel, output_of

CHROOT = ROOT / "build" / "trixie"
SUM = """
import numpy as np, sys
from shoal import _core, native
out = np.empty(5, np.float32)
native.sum_in_rank_order(out, [np.arange(5, dtype=np.float32)] * 3)
print(sys.version_info[:2], _core.__file__.rpartition("/")[2], out.tolist())
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel() -> Path:
    return find_wheel("make wheels-all", "abi3")


def in_chroot(*command: str, exit_code: int = 0) -> str:
    """Run a command in the chroot and return what it printed to both streams."""
    return output_of(["chroot", CHROOT, *command], exit_code=exit_code)


@pytest.fixture(scope="module")
def installed(wheel: Path) -> str:
    """Install the wheel with what it requires; return the folder of its commands."""
    shutil.copy(wheel, CHROOT / "packages")
    in_chroot("python3", "-m", "venv", "--clear", "/try")
    offline = ("--quiet", "--no-index", "--find-links", "/packages")
    in_chroot("/try/bin/pip", "install", *offline, f"/packages/{wheel.name}")
    return "/try/bin"


def test_it_is_small_and_tagged_and_has_the_stable_abi(wheel: Path) -> None:
    assert "shoal/_core.abi3.so" in check_file(wheel)


def test_the_core_runs(installed: str) -> None:
    said = in_chroot(f"{installed}/python", "-c", SUM)
    assert said == "(3, 13) _core.abi3.so [0.0, 3.0, 6.0, 9.0, 12.0]\n"


def test_the_command_runs(installed: str) -> None:
    assert "built from commit" in in_chroot(f"{installed}/shoal", "--version")
    assert "--port" in in_chroot(f"{installed}/shoal", "serve", "--help")
    assert "ok  native core" in in_chroot(f"{installed}/shoal", "doctor", exit_code=1)
