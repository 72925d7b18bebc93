"""Steps of both tests of wheels: find one, look into it, run a command in its environment."""

from __future__ import annotations

import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_BYTES = 5_000_000  # 1.7 MB of them are libcrypto's
BUILT_WITH_LIBFABRIC = "from shoal import native; print(native.fabric('127.0.0.1').built)"
"""A program for Python, which prints True or False."""


def find_wheel(made_by: str, *tags: str) -> Path:
    """Return the only wheel in ``dist/`` with one of the tags of Python or ABI."""
    found = [file for file in (ROOT / "dist").glob("shoal-*.whl") if set(tags) & set(file.name.split("-"))]
    assert len(found) == 1, f"{made_by} leaves one wheel with {' or '.join(tags)} in dist/, there are {found}"
    return found[0]


def check_file(wheel: Path) -> set[str]:
    """Check the size, the tag and the notices of a wheel; return the names of its files."""
    assert wheel.stat().st_size <= MAX_BYTES
    assert "-manylinux_2_" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    for file in ("LICENSE", "THIRD_PARTY_NOTICES.md"):
        assert sum(name.endswith(f".dist-info/licenses/{file}") for name in names) == 1
    assert not [name for name in names if not name.startswith(("shoal/", "shoal-"))]
    assert "shoal/launch/aws/parallelcluster.yaml" in names
    return set(names)


def output_of(
    command: Sequence[str | Path],
    *,
    exit_code: int,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
) -> str:
    """Run a command that has to end with ``exit_code``; return what it printed to both streams."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == exit_code, done.stdout[-4000:]
    return done.stdout
