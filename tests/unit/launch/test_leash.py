"""The connection by which helpers notice the end of the workers."""

from __future__ import annotations

import io
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shoal.errors import ShoalError, UsageError
from shoal.launch.leash import Leash, await_release, take_secret


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("code", [0, 76, None])
def test_helpers_are_released_when_the_holder_ends(code: int | None) -> None:
    port, said = free_port(), []
    released = threading.Event()

    def hold() -> None:
        said.append(await_release("127.0.0.1", port, deadline_s=30.0))
        released.set()

    helper = threading.Thread(target=hold, daemon=True)
    helper.start()  # before anybody listens
    with Leash(port) as leash:
        while not leash.num_held:
            assert not released.wait(0.05)
        assert not released.wait(0.3)
        leash.exit_code = code
    assert released.wait(30.0)
    assert said == [code]


@pytest.mark.parametrize("how", ["the end of stdin", "USR2"])
def test_stdin_asks_to_stop_and_its_first_line_is_the_secret(how: str) -> None:
    program = (
        "import signal, sys, time\n"
        "from shoal.launch.leash import take_secret\n"
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
        if how == "USR2":
            child.send_signal(signal.SIGUSR2)
        else:
            child.stdin.close()
        assert child.wait(30) == 75
    assert not Path(path).exists()
    with pytest.raises(UsageError, match="--leash reads the job's secret from stdin, which is empty"):
        take_secret(io.StringIO(""))


def test_a_holder_that_never_comes() -> None:
    with pytest.raises(ShoalError, match=r"127\.0\.0\.1:\d+ did not come within 0 s"):
        await_release("127.0.0.1", free_port(), deadline_s=0.0)


def test_a_port_in_use_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with Leash(port):
            pass
    assert f"WARNING: port {port} cannot be opened (Address already in use)" in capsys.readouterr().err
