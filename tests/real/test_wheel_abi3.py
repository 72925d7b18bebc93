"""Tries the wheel for Python 3.12 and newer with Debian 13's Python 3.13, in the chroot that built it.

There the newest JAX runs too, which has no wheel for Python 3.11.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import framework_jobs
import pytest
from wheels import BUILT_WITH_LIBFABRIC, ROOT, check_file, find_wheel, output_of

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


def test_it_is_built_with_libfabric(installed: str) -> None:
    """The chroot has its headers."""
    assert in_chroot(f"{installed}/python", "-c", BUILT_WITH_LIBFABRIC) == "True\n"


def test_the_command_runs(installed: str) -> None:
    assert "built from commit" in in_chroot(f"{installed}/shoal", "--version")
    assert "--port" in in_chroot(f"{installed}/shoal", "serve", "--help")
    assert "ok  native core" in in_chroot(f"{installed}/shoal", "doctor", exit_code=1)


@pytest.fixture(scope="module")
def with_jax(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Install the wheel with JAX 0.12 or newer in the chroot; yield a command that runs its Python there."""
    platforms = [
        f"--platform={name}_x86_64" for name in ("manylinux_2_28", "manylinux_2_27", "manylinux2014")
    ]
    pip = [sys.executable, "-m", "pip", "--quiet"]
    subprocess.run(
        [
            *pip, "download", "--dest", CHROOT / "packages-jax", "--only-binary=:all:",
            "--python-version=3.13", *platforms, "jax>=0.12", "optax", "hypothesis", "cyclopts",
        ],
        check=True,
    )  # fmt: skip
    shutil.copy(wheel, CHROOT / "packages-jax")
    shutil.copy(Path(__file__).with_name("jax_workers.py"), CHROOT)
    in_chroot("python3", "-m", "venv", "--clear", "/jax")
    offline = ("--quiet", "--no-index", "--find-links", "/packages-jax")
    in_chroot(
        "/jax/bin/pip", "install", *offline, f"/packages-jax/{wheel.name}", "jax", "optax", "hypothesis"
    )
    command = tmp_path_factory.mktemp("chroot") / "python"
    command.write_text(f'#!/bin/sh\nexec chroot "{CHROOT}" /jax/bin/python "$@"\n')
    command.chmod(0o755)
    # Without /proc XLA does not know the processor, and its products fail.
    subprocess.run(["mount", "-t", "proc", "proc", CHROOT / "proc"], check=True)
    yield command
    subprocess.run(["umount", CHROOT / "proc"], check=True)


@pytest.mark.parametrize(
    "name", ["sums", "shapes", "collectives", "order", "dispatch", "training", "differing", "mpi"]
)
def test_the_newest_jax(with_jax: Path, name: str) -> None:
    framework_jobs.run(with_jax, Path("/jax_workers.py"), name, 2, RUNS="20")
    version = in_chroot("/jax/bin/python", "-c", "import jax; print(jax.__version__)")
    assert tuple(map(int, version.split(".")[:2])) >= (0, 12)
