"""Tests that processes without torch join to one group, by a port and by a file."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
sys.modules["torch"] = sys.modules["jax"] = sys.modules["tensorflow"] = None

import shoal.comm.job_group

joined = shoal.comm.job_group.join(timeout_s=30.0)
assert joined.size == 3 and joined.local_size == 3 and joined.local_rank == joined.rank
assert joined.c_group()
for root in range(3):
    value = bytes([root]) * (root * 100_000)
    assert joined.broadcast_bytes(value if joined.rank == root else b"other", root) == value
joined.barrier()
joined.close()
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize("by", ["port", "file", "beside torchrun"])
def test_three_processes_join(by: str, tmp_path: Path) -> None:
    variables = {"WORLD_SIZE": "3", "SHOAL_SECRET": "the secret of the world's tests"}
    if by == "file":
        variables["SHOAL_STORE_FILE"] = str(tmp_path / "store")
    else:
        taken = by == "beside torchrun"
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port() - taken)}
        variables["TORCHELASTIC_USE_AGENT_STORE"] = str(taken)
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM], env={**os.environ, **variables, "RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in (2, 1, 0)
    ]  # fmt: skip
    said = [worker.communicate(timeout=60)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0], "\n".join(said)


INTERRUPTED = """
import signal, sys, time
from pathlib import Path
from shoal.comm.job_group import join

interrupted = Path(sys.argv[1])
group = join(timeout_s=20.0)
if group.rank == 0:
    signal.signal(signal.SIGALRM, signal.default_int_handler)  # what Ctrl-C does
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        group.barrier()
    except KeyboardInterrupt:
        interrupted.touch()
else:
    while not interrupted.exists():
        time.sleep(0.05)
    group.barrier()
assert group.broadcast_bytes(b"as before") == b"as before"
group.close()
"""


def test_a_wait_for_others_can_be_interrupted(tmp_path: Path) -> None:
    variables = {"WORLD_SIZE": "2", "SHOAL_STORE_FILE": str(tmp_path / "store")}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", INTERRUPTED, str(tmp_path / "interrupted")],
            env={**os.environ, **variables, "RANK": str(rank)},
        )
        for rank in (0, 1)
    ]
    try:
        assert [worker.wait(timeout=40) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
