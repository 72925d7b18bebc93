"""Runs the checks of a test file in a process of its own, in which Triton's interpreter takes the kernels.

Triton decides for the interpreter as it is imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

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


def patch_language_once() -> None:
    """Let the interpreter replace Triton's operations once a launch, which it does for each function called.

    The functions of a module share what was replaced for the first of them: most of the time went there.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    patch, execute = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def patch_once(function: Any) -> Any:
        names = id(function.__globals__)
        if names in patched:
            return None
        patched.add(names)
        return patch(function)

    def execute_anew(*args: Any, **given: Any) -> None:
        patched.clear()  # the last launch put all back
        execute(*args, **given)

    mock.patch.object(interpreter, "_patch_lang", patch_once).start()
    mock.patch.object(interpreter.GridExecutor, "__call__", execute_anew).start()


if os.environ.get("TRITON_INTERPRET") == "1":
    patch_language_once()
