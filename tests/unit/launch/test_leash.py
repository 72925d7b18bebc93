"""The connection by which helpers notice the end of the workers."""

from __future__ import annotations

import socket
import threading

import pytest

from shoal.errors import ShoalError
from shoal.launch.leash import Leash, await_release


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


def test_a_holder_that_never_comes() -> None:
    with pytest.raises(ShoalError, match=r"127\.0\.0\.1:\d+ did not come within 0 s"):
        await_release("127.0.0.1", free_port(), deadline_s=0.0)


def test_a_port_in_use_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with Leash(port):
            pass
    assert f"WARNING: port {port} cannot be opened (Address already in use)" in capsys.readouterr().err
