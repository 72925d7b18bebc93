"""Environments with the wheel and a framework, and jobs of several processes in them."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from wheels import ROOT, find_wheel

SECRET = "the secret of the tests of frameworks"
DEADLINE_S = 240.0
NOT_FOR_CHILDREN = ("PYTHONPATH", "VIRTUAL_ENV", "RANK", "WORLD_SIZE")


def environment(name: str, extra: str, *packages: str) -> Path:
    """Return the interpreter of an environment with the wheel, made once per wheel, under a lock.

    Args:
        name: of its folder in ``build``.
        extra: of the wheel; empty: none.
        packages: to install besides.
    """
    own = "abi3" if sys.version_info >= (3, 12) else f"cp3{sys.version_info.minor}"
    wheel = find_wheel("make wheels", own)
    folder = ROOT / "build" / f"{name}-environment"
    python = folder / "bin" / "python"
    made_of = f"{wheel.name} {wheel.stat().st_mtime_ns} {extra} {' '.join(packages)}"
    stamp = folder / "made-of.txt"
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists() and stamp.read_text() == made_of:
            return python
        uv = [sys.executable, "-m", "uv"]
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, folder], check=True)
        what = f"shoal{f'[{extra}]' if extra else ''} @ {wheel.as_uri()}"
        subprocess.run([*uv, "pip", "install", "--quiet", "--python", python, what, *packages], check=True)
        stamp.write_text(made_of)
    return python


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def run(
    python: Path | str,
    script: Path,
    name: str,
    size: int,
    hosts: str = "",
    *,
    lost: int | None = None,
    of_rank: Sequence[dict[str, str]] = (),
    **more: str,
) -> str:
    """Run a function of a script in ``size`` processes; return what rank 0 printed.

    Args:
        python: interpreter.
        script: its first argument is the name of the function.
        name: of the function.
        size: number of processes.
        hosts: not empty: each process counts as a host, so that data goes over TCP.
        lost: rank that kills itself.
        of_rank: variables of each rank.
        **more: variables of all.
    """
    kept = {key: value for key, value in os.environ.items() if key not in NOT_FOR_CHILDREN}
    common = {
        **kept, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2", "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1", **more, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "COORDINATOR_PORT": str(free_port()), "SHOAL_SECRET": SECRET,
    }  # fmt: skip
    workers = [
        subprocess.Popen(
            [python, script, name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd="/",
            env={
                **common, "RANK": str(rank), **({"SHOAL_HOST_ID": f"host-{rank}"} if hosts else {}),
                **(of_rank[rank] if of_rank else {}),
            },
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        said = [worker.communicate(timeout=DEADLINE_S)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    expected = [-signal.SIGKILL if rank == lost else 0 for rank in range(size)]
    assert [worker.returncode for worker in workers] == expected, "\n".join(said)
    return said[0]


@contextmanager
def helper(python: Path | str, folder: Path) -> Iterator[str]:
    """Run a helper host's server; yield the value of SHOAL_HELPERS, and check that it has added something."""
    output = folder / "helper.txt"
    with output.open("w") as file:
        server = subprocess.Popen(
            [python, "-m", "shoal", "serve", "--address", "127.0.0.1", "--port", str(port := free_port())],
            stdout=file, stderr=subprocess.STDOUT, cwd="/", env={**os.environ, "SHOAL_SECRET": SECRET},
        )  # fmt: skip
    try:
        end = time.monotonic() + DEADLINE_S
        while "listening on" not in output.read_text():
            assert server.poll() is None and time.monotonic() < end, output.read_text()
            time.sleep(0.05)
        yield f"127.0.0.1:{port}*1.0"
    finally:
        server.terminate()
        server.wait(DEADLINE_S)
    summed = re.search(r"stopped; \d+ groups, ([\d,]+) chunks summed", output.read_text())
    assert summed and summed[1] != "0", output.read_text()
