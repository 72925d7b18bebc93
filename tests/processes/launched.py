"""Launchers for tests, each in a process of its own, with ``launch_job.py`` for their workers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Self

from forked import fork_process
from forked_programs import fork_programs
from shoal.errors import ShoalError
from shoal.launch import local, spot_notice, supervision

JOB = Path(__file__).with_name("launch_job.py")
START_DEADLINE_S = 180.0
GRACE_S = 1.0
END_DEADLINE_S = 3 * (GRACE_S + 4)
"""A failure ends the job in the grace that the others get; three times that for a busy machine."""
SECRET = "the secret of the launchers' tests"


class Launched:
    """A launcher in a process of its own, and what its workers leave in ``folder``."""

    def __init__(self, process: BaseProcess, folder: Path, output: Path) -> None:
        self.process = process
        self.folder = folder
        self.output = output

    def wait(self, deadline_s: float = START_DEADLINE_S) -> int:
        """Return the launcher's exit code."""
        self.process.join(deadline_s)
        if (code := self.process.exitcode) is None:
            raise TimeoutError(f"the launcher did not end in {deadline_s} s; it said: {self.text}")
        return code

    @property
    def text(self) -> str:
        return self.output.read_text()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def await_file(self, *names: str) -> None:
        end = time.monotonic() + START_DEADLINE_S
        while not all((self.folder / name).exists() for name in names):
            assert time.monotonic() < end, f"no {names} in time; the launcher said: {self.text}"
            assert self.process.exitcode is None, f"the launcher ended too early; it said: {self.text}"
            time.sleep(0.02)

    def await_listening(self, port: int) -> None:
        end = time.monotonic() + START_DEADLINE_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                return
            assert time.monotonic() < end, f"nobody listens at {port}; the launcher said: {self.text}"
            time.sleep(0.02)

    def pid_of(self, rank: int) -> int:
        return int((self.folder / f"pid-{rank}").read_text())

    def variables_of(self, rank: int) -> dict[str, str]:
        """Return the environment that a worker has; it writes it before its first step."""
        variables: dict[str, str] = json.loads((self.folder / f"variables-{rank}").read_text())
        return variables

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def assert_no_worker_is_left(self, deadline_s: float = 5.0) -> None:
        end = time.monotonic() + deadline_s
        for path in self.folder.glob("pid-*"):
            while is_alive(int(path.read_text())):
                assert time.monotonic() < end, f"{path.name} is still there"
                time.sleep(0.02)


class Launchers:
    """Starts launchers; at the end of the block they and their workers are killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._launched: list[Launched] = []

    def __enter__(self) -> Self:
        return self

    def __call__(
        self,
        orders: str = "",
        *,
        backend: str = "",
        name: str = "job",
        environ: dict[str, str] | None = None,
        **settings: object,
    ) -> Launched:
        """Start a launcher with ``environ`` on top of this process's; several hosts get a secret with it."""
        output = self.folder / f"{name}.txt"
        options = {"num_workers": 2, "log_dir": self.folder / f"{name}-logs", **settings}
        environ = environ or {}
        if "nnodes" in settings:
            environ = {"SHOAL_SECRET_FILE": str(self.secret_file()), **environ}
        process = fork_process(run_launcher, self.folder, orders, backend, environ, output, options)
        self._launched.append(Launched(process, self.folder, output))
        return self._launched[-1]

    def __exit__(self, *_: object) -> None:
        for job in self._launched:
            job.process.kill()
            job.process.join()
            for path in job.folder.glob("pid-*"):
                if is_alive(int(path.read_text())):
                    os.kill(int(path.read_text()), signal.SIGKILL)

    def secret_file(self) -> Path:
        path = self.folder / "job.secret"
        if not path.exists():  # a launcher that has been started may be reading it
            path.touch(mode=0o600)
            path.write_text(SECRET)
        return path


def run_launcher(
    folder: Path,
    orders: str,
    backend: str,
    environ: dict[str, str],
    output: Path,
    options: dict[str, object],
) -> None:
    os.environ.pop("OMP_NUM_THREADS", None)
    os.environ.update(environ)
    descriptor = os.open(output, os.O_CREAT | os.O_RDWR | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    command = [sys.executable, str(JOB), "--dir", str(folder), "--orders", orders, "--backend", backend]
    supervision.AFTER_FAILURE_S = local.STOP_DEADLINE_S = GRACE_S
    spot_notice.POLL_S = 0.1
    if backend:  # without, a worker starts without torch
        fork_programs()
    try:
        code = local.launch(command, **options)  # type: ignore[arg-type]
    except ShoalError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
    sys.exit(code)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
