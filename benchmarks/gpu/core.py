"""Installs shoal from this tree and builds its C++ core, without a network, unless a build is there."""

from __future__ import annotations

import subprocess
import sys

PIP = (
    "-m",
    "pip",
    "install",
    "--quiet",
    "--no-index",
    "--no-build-isolation",
    "--no-deps",
    "--editable",
    ".",
)
IS_BUILT = "import sys; from shoal import native; sys.exit(0 if native.is_built() else 1)"


def is_built() -> bool:
    """Return whether Python finds shoal with its core."""
    return subprocess.run([sys.executable, "-c", IS_BUILT], capture_output=True, check=False).returncode == 0


def main() -> int:
    if is_built():
        print("the build that is there is kept")
        return 0
    return subprocess.call([sys.executable, *PIP])


if __name__ == "__main__":
    raise SystemExit(main())
