"""Emulated hosts as places to start processes: made, entered, unplugged, taken away."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from shoal.env import LAUNCH_DIR, SECRET, SECRET_FILE, STORE_FILE, child_environment
from shoal.errors import ShoalError, UsageError
from shoal.json_text import parse_json
from shoal.launch.emulated_keeper import Namespace, end_processes, identity
from shoal.launch.emulated_plan import INTERFACE, ClusterPlan
from shoal.launch.job_secret import write_secret

POLL_S = 0.02

_GRACE_S = 2.0
_KEEPER_DEADLINE_S = 60.0
# what an outer job has set is not for the workers of this one
_NOT_INHERITED = (
    LAUNCH_DIR,
    STORE_FILE,
    SECRET,
    SECRET_FILE,
    "SHOAL_HELPERS",
    "SHOAL_HOST_ID",
    "SHOAL_INTERFACE",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
)

Output = int | IO[Any] | None
"""As ``subprocess.Popen`` takes it: ``None`` (this process's own), a constant or a file."""


class EmulatedHosts:
    """The hosts of a plan; a context manager, which ends what still runs on them.

    Raises:
        UsageError: this machine cannot emulate hosts.
        ShoalError: making them failed.
    """

    def __init__(self, plan: ClusterPlan) -> None:
        self.plan = plan
        self.namespaces: frozenset[Namespace] = frozenset()
        """The network namespaces of hosts and bridge by device and inode: whoever is in one belongs to us."""
        self._tools = _require_tools()
        self._folder: Path | None = None
        self._secret_file: Path | None = None
        self._keeper: subprocess.Popen[str] | None = None
        self._files: dict[str, Any] = {}
        self._started: list[subprocess.Popen[str]] = []

    # ---- life --------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="shoal-emulated-"))  # 0700
        self._secret_file = write_secret(self._folder, secrets.token_hex(32).encode())
        keeper = self._keeper = subprocess.Popen(
            [sys.executable, "-m", "shoal.launch.emulated_keeper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert keeper.stdin is not None and keeper.stdout is not None
        request = {
            "launcher": os.getpid(),
            "folder": str(self._folder),
            "hosts": [asdict(host) for host in self.plan.hosts],
            "ip": self._tools["ip"],
            "tc": self._tools["tc"],
        }
        keeper.stdin.write(json.dumps(request) + "\n")
        keeper.stdin.flush()
        answer = parse_json(
            keeper.stdout.readline() or '{"error": "its keeper ended", "denied": false}',
            "the answer of the keeper of the emulated hosts",
        )
        if "error" in answer:
            raise _cannot_make(answer["error"], denied=answer["denied"])
        self._files = answer
        networks = (answer["bridge"], *(network for network, _ in answer["hosts"]))
        self.namespaces = frozenset(identity(self._path(file)) for file in networks)

    def close(self) -> None:
        """End all processes (SIGTERM, SIGKILL 2 s later) and what they have left behind; free the hosts."""
        end(self._started, grace_s=_GRACE_S)
        if self._keeper is not None:
            self._dismiss(self._keeper)
            self._keeper = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _dismiss(self, keeper: subprocess.Popen[str]) -> None:
        assert keeper.stdin is not None and keeper.stdout is not None
        with suppress(BrokenPipeError):
            keeper.stdin.write("close\n")
            keeper.stdin.flush()
        with suppress(BrokenPipeError):
            keeper.stdin.close()
        try:
            keeper.wait(_KEEPER_DEADLINE_S)
        except subprocess.TimeoutExpired:
            keeper.kill()
            keeper.wait()
        keeper.stdout.close()
        if keeper.returncode != 0 and self.namespaces:  # somebody killed it: do its work
            end_processes(self.namespaces, grace_s=0)

    # ---- hosts -------------------------------------------------------------------------------------------

    def address(self, host: int) -> str:
        """Return the IPv4 address of a host."""
        return self.plan.hosts[host].address

    def name(self, host: int) -> str:
        """Return the host name of a host, unique on this machine."""
        return self.plan.hosts[host].name

    def enter(self, host: int) -> list[str]:
        """Return the command line to put before another one so that it runs on a host."""
        network, uts = self._files["hosts"][host]
        return [self._tools["nsenter"], f"--net={self._path(network)}", f"--uts={self._path(uts)}", "--"]

    def start(
        self,
        host: int,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdout: Output = None,
        stderr: Output = None,
        cwd: Path | None = None,
    ) -> subprocess.Popen[str]:
        """Start a process on a host, leading a session of its own; :meth:`close` ends it.

        Its environment is this process's with :meth:`environment` and ``env`` on top. Its stdin is empty.

        Raises:
            ShoalError: the hosts are not there, or no longer.
        """
        if self._keeper is None or self._keeper.poll() is not None:
            raise ShoalError("the emulated cluster is not running: its hosts are gone")
        inherited = {name: value for name, value in child_environment().items() if name not in _NOT_INHERITED}
        process = subprocess.Popen(
            [*self.enter(host), *argv],
            env={**inherited, **self.environment(), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def environment(self) -> dict[str, str]:
        """Return the variables that every process on the hosts gets, the secret's file among them."""
        assert self._secret_file is not None
        return {
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            SECRET_FILE: str(self._secret_file),
            "OMP_NUM_THREADS": "1",
        }

    def link(self, host: int, *, up: bool) -> None:
        """Plug in or pull the cable of a host: its port of the bridge goes up or down."""
        bridge = f"--net={self._path(self._files['bridge'])}"
        state = "up" if up else "down"
        command = [self._tools["ip"], "link", "set", self.plan.hosts[host].port, state]
        subprocess.run([self._tools["nsenter"], bridge, "--", *command], check=True)

    def _path(self, file: int) -> str:
        assert self._keeper is not None
        return f"/proc/{self._keeper.pid}/fd/{file}"

    def _temporary(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / name


def end(processes: Sequence[subprocess.Popen[str]], *, grace_s: float) -> None:
    """End processes that lead a process group each: SIGTERM, and SIGKILL after ``grace_s``; wait for them."""
    until = time.monotonic() + grace_s
    for number in (signal.SIGTERM, signal.SIGKILL) if grace_s > 0 else (signal.SIGKILL,):
        alive = [process for process in processes if process.poll() is None]
        for process in alive:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        while any(process.poll() is None for process in alive) and (
            number == signal.SIGKILL or time.monotonic() < until
        ):
            time.sleep(POLL_S)


def _require_tools() -> dict[str, str]:
    """Return the paths of the programs that emulated hosts need.

    Raises:
        UsageError: one is missing, this is not Linux, or not root.
    """
    if sys.platform != "linux":
        raise UsageError(f"emulated hosts are Linux network namespaces and this is {sys.platform}")
    names = ("ip", "tc", "nsenter")
    found = {name: shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin") for name in names}
    if missing := [name for name, path in found.items() if path is None]:
        raise UsageError(
            f"emulated hosts need the programs {', '.join(missing)}, not found here: install iproute2 and "
            "util-linux (Debian and Ubuntu: apt-get install iproute2 util-linux)"
        )
    if os.geteuid() != 0:
        raise UsageError(
            "emulated hosts need root, to make network namespaces: run the same command as root, for "
            "instance with sudo -E"
        )
    return {name: path for name, path in found.items() if path is not None}


def _cannot_make(reason: str, *, denied: bool) -> ShoalError:
    if denied:
        return UsageError(
            f"root may not make network namespaces here ({reason}): start the container with --privileged, "
            "or with --cap-add SYS_ADMIN --cap-add NET_ADMIN and a seccomp filter that lets unshare pass"
        )
    return ShoalError(f"the emulated hosts could not be made: {reason}")
