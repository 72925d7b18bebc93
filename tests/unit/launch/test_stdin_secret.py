"""The stdin by which a launcher notices the end of its starter."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.errors import UsageError
from shoal.launch.stdin_secret import take_secret


@pytest.mark.parametrize("stop", ["the end of stdin", "USR2"])
def test_stdin_asks_to_stop_and_its_first_line_is_the_secret(stop: str) -> None:
    program = (
        "import signal, sys, time\n"
        "from shoal.launch.stdin_secret import take_secret\n"
        "path = take_secret(sys.stdin)\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "print(path, oct(path.stat().st_mode & 0o777), path.read_text(), flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write("0123456789abcdef\n")
        child.stdin.flush()
        path, mode, secret = child.stdout.readline().split()
        assert (mode, secret) == ("0o600", "0123456789abcdef")
        assert child.poll() is None
        if stop == "USR2":
            child.send_signal(signal.SIGUSR2)
        else:
            child.stdin.close()
        assert child.wait(30) == 75
    assert not Path(path).exists()
    with pytest.raises(UsageError, match="--stdin-secret reads the job's secret from stdin, which is empty"):
        take_secret(io.StringIO(""))
