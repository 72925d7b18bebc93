"""Runs the checks of a test file in a process of its own, in which Triton's interpreter takes the kernels.

Triton decides for the interpreter as it is imported.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)


def run_in_interpreter(file: str, *arguments: str) -> None:
    """Run a test file as a program, which begins at its ``__main__``; it must end without an error."""
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": str(Path(__file__).parent),
    }
    command = [sys.executable, file, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("Triton's interpreter cannot count loops with this NumPy; Triton 3.9 can")
    assert done.returncode == 0, done.stderr
