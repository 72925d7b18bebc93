"""Tests groups that cannot be created: one clear error that names the cause."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time

import pytest
from comm_group import SECRET, Group, HelperProcess, Member

from forked import free_port
from shoal.comm.engine import CommError, Engine, EngineOptions

CONNECT_S = 2.0


def do_nothing(member: Member) -> None:
    member.report("connected")


def errors(group: Group, *ranks: int) -> list[str]:
    return group.errors(ranks, time.monotonic(), bound_s=3 * CONNECT_S)


def test_an_address_of_another_machine_is_one_clear_error() -> None:
    with pytest.raises(CommError, match=r"cannot listen at 192\.0\.2\.1:0: Cannot assign requested address"):
        _engine("192.0.2.1")
    with pytest.raises(CommError, match="not an IPv4 or IPv6 address"):
        _engine("somewhere")


def _engine(address: str) -> Engine:
    return Engine(rank=0, size=2, group="g", secret=b"s", address=address, options=EngineOptions())


def test_a_taken_port_is_one_line_and_exit_code_1_for_a_helper() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "shoal.comm.server", "--address", "127.0.0.1", "--port", str(port)]
        ended = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "SHOAL_SECRET": SECRET}, timeout=60
        )
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert f"cannot listen at 127.0.0.1:{port}: Address already in use" in line and "--port" in line


def test_a_helper_that_is_not_there_is_named() -> None:
    gone = HelperProcess("the-missing-one", port=free_port())
    with Group(do_nothing, "ab", helpers=[gone], connect_s=CONNECT_S) as group:
        for text in errors(group, 0, 1):
            assert f"helper the-missing-one (127.0.0.100:{gone.port})" in text
            assert re.search(r"was not reached in 2 s: (Connection refused|no answer in time)", text)


def test_a_helper_with_another_secret_is_named() -> None:
    with HelperProcess("h0", secret="another secret than theirs") as helper:
        with Group(do_nothing, "ab", helpers=[helper], connect_s=CONNECT_S) as group:
            for text in errors(group, 0, 1):
                assert (
                    f"helper h0 (127.0.0.100:{helper.port})" in text
                    and "does not know the job's secret" in text
                )


def test_a_rank_with_another_secret_is_named_and_told() -> None:
    with Group(
        do_nothing, "abc", secrets=[SECRET, "another secret than theirs", SECRET], connect_s=CONNECT_S
    ) as group:
        first, second, third = errors(group, 0, 1, 2)
        # by itself, or as the third tells it
        said = "do all ranks have the same secret?" in first or "it does not know the job's secret" in first
        assert group.name(1) in first and said
        assert f"{group.name(0)}: " in second and "it does not know the job's secret" in second
        assert f"{group.name(1)}: " in third and "it does not know the job's secret" in third


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_never_comes_is_named(absent: int) -> None:
    with Group(do_nothing, "abc", absent=[absent], connect_s=CONNECT_S) as group:
        for text in errors(group, *({0, 1, 2} - {absent})):
            assert group.name(absent) in text
            assert "did not connect" in text or "no answer in time" in text
