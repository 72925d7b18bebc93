"""A stop request in a real process: noted once, harmless when repeated and at the interpreter's exit."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

CODE = """
import os, signal, sys
from shoal.train.stopping import StopRequest
stop = StopRequest()
assert stop.requested is None
for number in (signal.{first}, signal.{second}, signal.{first}):
    os.kill(os.getpid(), number)
assert stop.requested == "{first}", stop.requested

class LateSignal:
    def __del__(self):  # runs while the interpreter is taken down, after Python has let its handlers go
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        os.write(1, b"sent")

import builtins
builtins.late = LateSignal()
sys.exit(75)
"""


@pytest.mark.parametrize(("first", "second"), [("SIGTERM", "SIGUSR1"), ("SIGUSR1", "SIGTERM")])
def test_signals_leave_a_note_and_the_exit_code_stays(first: str, second: str) -> None:
    assert hasattr(signal, first)
    code = CODE.format(first=first, second=second)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (75, "sent", "")
