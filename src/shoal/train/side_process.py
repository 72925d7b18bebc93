"""Starts and ends commands of shoal beside training, outside of its job."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from shoal.env.launcher import outside_of_job

_END_S = 10.0
"""Seconds in which a command ends after a signal."""


def start_command(words: Sequence[object], log: Path, *, nice: int) -> subprocess.Popen[bytes]:
    """Start ``shoal WORDS``, whose output is appended to ``log``, at a priority below that of training."""
    with log.open("ab") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "shoal", *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=outside_of_job(),
        )
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.setpriority(os.PRIO_PROCESS, child.pid, nice)
    return child


def end_command(child: subprocess.Popen[bytes]) -> None:
    """End a command, by a signal that it handles or, later, by one that it does not."""
    child.terminate()
    try:
        child.wait(_END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
