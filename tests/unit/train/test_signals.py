"""A stop request in a real process: noted once, harmless when repeated and at the interpreter's exit."""

from __future__ import annotations

import os
import re
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
        os.kill(os.getpid(), signal.SIGUSR2)
        os.write(1, b"sent")

import builtins
builtins.late = LateSignal()
sys.exit(75)
"""


@pytest.mark.parametrize(
    ("first", "second"), [("SIGTERM", "SIGUSR1"), ("SIGUSR1", "SIGTERM"), ("SIGUSR2", "SIGTERM")]
)
def test_signals_leave_a_note_and_the_exit_code_stays(first: str, second: str) -> None:
    assert hasattr(signal, first)
    code = CODE.format(first=first, second=second)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (75, "sent", "")


ENDS = """
import sys
from shoal.errors import ShoalError, UsageError
from shoal.train.config import DistributedConfig, LoopConfig, ServersConfig, check_combination
from shoal.train.stopping import end_in_one_line
end_in_one_line()
{fails}
"""
WIRE = (
    "check_combination(LoopConfig(), DistributedConfig(wire='bf16'), "
    "ServersConfig(mode='sync'), clip='global')"
)
MODE = "ServersConfig(mode='bounded')"


@pytest.mark.parametrize(
    ("fails", "variables", "code", "said"),
    [
        (WIRE, {}, 2, "shoal: .*use --distributed.wire fp32 (in a script: DistributedConfig(wire=...))"),
        (MODE, {}, 2, "shoal: .*set --servers.wait-for or .*(in a script: ServersConfig(wait_for=...), .*"),
        ("raise ShoalError('the disk is full')", {}, 1, "shoal: the disk is full"),
        (
            "raise UsageError('no')",
            {"SHOAL_DEBUG": "1"},
            2,
            "Traceback .*UsageError: no",
        ),
        ("1 / 0", {}, 1, "Traceback .*ZeroDivisionError: division by zero"),
        ("sys.ps1 = ''; raise UsageError('no')", {}, 1, "Traceback .*UsageError: no"),
    ],
)
def test_a_script_ends_in_one_line_by_a_known_error_only(
    fails: str, variables: dict[str, str], code: int, said: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS.format(fails=fails)], capture_output=True, text=True, timeout=60,
        check=False, env={**os.environ, **variables},
    )  # fmt: skip
    assert done.returncode == code
    pattern = re.escape(said).replace(r"\.\*", "(.|\n)*")
    assert re.fullmatch(pattern, done.stderr.strip()), done.stderr
    assert "Traceback" in said or done.stderr.count("\n") == 1
