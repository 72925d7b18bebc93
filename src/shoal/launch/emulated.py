"""Emulates a cluster on this machine: network namespaces on a bridge, with shaped links.

    with Cluster(hosts=8, helpers=4, nic="200mbit") as cluster:
        results = cluster.run([sys.executable, "job.py"])   # one worker per host, helpers' servers started
        cluster.link(3, up=False)                           # disconnect host 3

Each host has its own network namespace with an interface ``eth0`` and a loopback, and its own host name.
Processor, memory, files, shared memory and process ids are this machine's. Worker hosts are numbered from
0, and helper hosts after them. :mod:`shoal.launch.emulated_network` holds the namespaces and removes them
when this process ends, even if it is killed. Needs Linux, root and iproute2.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from shoal.env.launcher import STORE_PORT
from shoal.env.settings import HELPERS, HOST_ID, LAUNCH_DIR, SECRET, SECRET_FILE
from shoal.env.settings import INTERFACE as INTERFACE_VARIABLE
from shoal.env.variables import child_environment
from shoal.env.worker import STORE_FILE
from shoal.errors import ShoalError, UsageError
from shoal.json_text import parse_json
from shoal.launch.emulated_network import (
    BURST_BYTES,
    GRACE_S,
    HELPER_PORT,
    INTERFACE,
    MASTER_PORT,
    Namespace,
    end_processes,
    helpers_setting,
    identity,
    parse_rate,
    plan_cluster,
    shaping,
)
from shoal.launch.supervision import (
    POLL_S,
    THREADS,
    Output,
    end_process_groups,
    worker_variables,
    write_secret,
)

HELPER_COMMAND = (sys.executable, "-m", "shoal.comm.server")
"""Command of each helper host's server, before ``--address ADDRESS --port PORT``; it prints a line with
``listening on ADDRESS:PORT`` when it is ready."""

_DEADLINE_S = 60.0
_NOT_INHERITED = (
    LAUNCH_DIR,
    STORE_FILE,
    STORE_PORT,
    SECRET,
    SECRET_FILE,
    HELPERS,
    HOST_ID,
    INTERFACE_VARIABLE,
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
)
"""Variables of an outer job."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """End of one worker of :meth:`Cluster.run`."""

    rank: int
    exit_code: int
    """Minus the signal's number for a death by signal."""
    stdout: str
    stderr: str


class Cluster:
    """``hosts`` worker hosts and ``helpers`` helper hosts; a context manager.

    Leaving the context ends all processes on the hosts and removes the hosts.

    Args:
        hosts: number of worker hosts.
        helpers: number of helper hosts.
        nic: rate of every host's link in each direction, such as ``"200mbit"``; ``None``: not shaped.
        helper_nic: the same for helper hosts; ``None``: as ``nic``.
        burst_bytes: bytes that a shaped link sends at once after a pause, as links of clouds do.
        interfaces: number of links of each worker host, each shaped separately and in a network of its own:
            ``eth0``, ``eth1``, …; helper hosts have one.
        announce_rates: pass the ratio of the helpers' rate to the workers' in SHOAL_HELPERS. Without it the
            engine has to measure the ratio.
        log_dir: folder for the helpers' output; ``None``: a temporary one, removed at the end.

    Raises:
        UsageError: a number or a rate is invalid, or this machine cannot emulate hosts.
        ShoalError: the hosts could not be created.
    """

    def __init__(
        self,
        *,
        hosts: int,
        helpers: int = 0,
        nic: str | None = None,
        helper_nic: str | None = None,
        burst_bytes: int = BURST_BYTES,
        interfaces: int = 1,
        announce_rates: bool = True,
        log_dir: Path | None = None,
    ) -> None:
        prefix = f"shoal-{secrets.token_hex(4)}"
        self.plan = plan_cluster(
            hosts=hosts,
            helpers=helpers,
            nic=nic,
            helper_nic=helper_nic,
            burst_bytes=burst_bytes,
            interfaces=interfaces,
            prefix=prefix,
        )
        self.num_hosts = hosts
        self._num_helpers = helpers
        self.helpers: list[subprocess.Popen[str]] = []
        """The helper hosts' servers, in the order of the hosts; empty before :meth:`start_helpers`."""
        self.helper_logs: list[Path] = []
        self.namespaces: frozenset[Namespace] = frozenset()
        """The network namespaces of hosts and bridge, by device and inode."""
        self._announce_rates = announce_rates
        self._log_dir = log_dir
        self._num_jobs = 0
        self._tools = _require_tools()
        self._folder = Path(tempfile.gettempdir()) / f"emulated-{prefix}"
        self._keeper: subprocess.Popen[str] | None = None
        self._bridge = ""
        self._host_files: list[tuple[str, str]] = []  # network and UTS namespace
        self._started: list[subprocess.Popen[str]] = []

    # ---- lifetime ----------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _make(self) -> None:
        self._folder.mkdir(mode=0o700)
        self._secret_file = write_secret(self._folder, secrets.token_hex(32).encode())
        keeper = self._keeper = subprocess.Popen(
            [sys.executable, "-m", "shoal.launch.emulated_network"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert keeper.stdin is not None and keeper.stdout is not None
        request = {
            "launcher": os.getpid(),
            "folder": str(self._folder),
            "hosts": [asdict(host) for host in self.plan],
            "ip": self._tools["ip"],
            "tc": self._tools["tc"],
        }
        keeper.stdin.write(json.dumps(request) + "\n")
        keeper.stdin.flush()
        answer = parse_json(
            keeper.stdout.readline() or '{"error": "its keeper ended"}',
            "the answer of the keeper of the emulated hosts",
        )
        if "error" in answer:
            raise _cannot_make(answer["error"])
        files = f"/proc/{keeper.pid}/fd"
        self._bridge = f"{files}/{answer['bridge']}"
        self._host_files = [(f"{files}/{network}", f"{files}/{uts}") for network, uts in answer["hosts"]]
        networks = (self._bridge, *(network for network, _ in self._host_files))
        self.namespaces = frozenset(map(identity, networks))

    def close(self) -> None:
        """End all processes and their daemons (SIGTERM, SIGKILL 2 s later) and remove the hosts."""
        end_process_groups(self._started, grace_s=GRACE_S)
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            try:
                keeper.communicate("close\n", _DEADLINE_S)
            except subprocess.TimeoutExpired:
                keeper.kill()
                keeper.communicate()
            if keeper.returncode != 0 and self.namespaces:  # it was killed: do its work
                end_processes(self.namespaces, grace_s=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    # ---- hosts -------------------------------------------------------------------------------------------

    def address(self, host: int, interface: int = 0) -> str:
        """Return the IPv4 address of a host's interface."""
        return self.plan[host].links()[interface][3]

    def name(self, host: int) -> str:
        """Return the host name of a host, unique on this machine."""
        return self.plan[host].name

    def enter(self, host: int) -> list[str]:
        """Return the command prefix that runs a command on a host."""
        network, uts = self._host_files[host]
        return [self._tools["nsenter"], f"--net={network}", f"--uts={uts}", "--"]

    def enter_bridge(self) -> list[str]:
        """Return the command prefix that runs a command in the network of the bridges between the hosts."""
        return [self._tools["nsenter"], f"--net={self._bridge}", "--"]

    def link(self, host: int, *, up: bool, interface: int = 0) -> None:
        """Connect or disconnect a link of a host: set its bridge port up or down."""
        port = self.plan[host].links()[interface][1]
        command = [self._tools["ip"], "link", "set", port, "up" if up else "down"]
        subprocess.run([*self.enter_bridge(), *command], check=True)

    def limit(self, host: int, nic: str) -> None:
        """Change the rate of a shaped host's links in each direction."""
        plan = replace(self.plan[host], rate_bps=parse_rate(nic, option="nic"))
        network, _ = self._host_files[host]
        for _, port, interface, _ in plan.links():
            for namespace, device in ((self._bridge, port), (network, interface)):
                qdisc = shaping(device, plan).split()
                command = [self._tools["tc"], "qdisc", "change", *qdisc[2:]]
                subprocess.run([self._tools["nsenter"], f"--net={namespace}", "--", *command], check=True)

    def environment(self) -> dict[str, str]:
        """Return the variables of every process on the hosts, the secret's file and the helpers included."""
        variables = {
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            SECRET_FILE: str(self._secret_file),
            **dict.fromkeys(THREADS, "1"),
        }
        if self._num_helpers:
            variables[HELPERS] = helpers_setting(self.plan, announce_rates=self._announce_rates)
        return variables

    # ---- processes ---------------------------------------------------------------------------------------

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
        """Start a process on a host, as leader of a new session; :meth:`close` ends it.

        Its environment is this process's, updated by :meth:`environment` and ``env``. Its stdin is empty.

        Raises:
            ShoalError: the hosts have not been created yet, or are gone.
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

    def start_helpers(self) -> list[subprocess.Popen[str]]:
        """Start the servers of the helper hosts, unless they run, and wait until they listen.

        Raises:
            ShoalError: one has ended, or does not listen after 60 s.
        """
        if self.helpers or not self._num_helpers:
            return self.helpers
        folder = self._log_dir or self._folder / "helpers"
        folder.mkdir(parents=True, exist_ok=True)
        servers = self.plan[self.num_hosts :]
        for index, helper in enumerate(servers):
            path = folder / f"{helper.port}.log"
            argv = [*HELPER_COMMAND, "--address", helper.address, "--port", str(HELPER_PORT)]
            with path.open("w", encoding="utf-8") as file:
                process = self.start(self.num_hosts + index, argv, stdout=file, stderr=subprocess.STDOUT)
            self.helpers.append(process)
            self.helper_logs.append(path)
        for index, helper in enumerate(servers):
            self._await_listening(index, f"listening on {helper.address}:{HELPER_PORT}")
        return self.helpers

    def start_workers(
        self,
        argv: Sequence[str],
        *,
        workers_per_host: int = 1,
        env: Mapping[str, str] | None = None,
        outputs: Callable[[int], tuple[Output, Output]] = lambda rank: (None, None),
    ) -> list[subprocess.Popen[str]]:
        """Start ``argv`` as every worker, in rank order, with torchrun's environment.

        Args:
            outputs: returns stdout and stderr for a rank.
        """
        if workers_per_host < 1:
            raise UsageError(f"{workers_per_host} workers per host must be at least 1")
        self._num_jobs += 1
        return [
            self.start_worker(rank, argv, workers_per_host=workers_per_host, env=env, outputs=outputs)
            for rank in range(self.num_hosts * workers_per_host)
        ]

    def start_worker(
        self,
        rank: int,
        argv: Sequence[str],
        *,
        workers_per_host: int,
        env: Mapping[str, str] | None,
        outputs: Callable[[int], tuple[Output, Output]],
    ) -> subprocess.Popen[str]:
        """Start one worker of :meth:`start_workers`, perhaps again."""
        port = MASTER_PORT + self._num_jobs % 1_000  # the last job's port may still have connections
        variables = worker_variables(
            rank,
            num_hosts=self.num_hosts,
            workers_per_host=workers_per_host,
            master=(self.address(0), port),
        )
        stdout, stderr = outputs(rank)
        host, variables = rank // workers_per_host, {**variables, **(env or {})}
        return self.start(host, argv, env=variables, stdout=stdout, stderr=stderr)

    def run(
        self,
        argv: Sequence[str],
        *,
        workers_per_host: int = 1,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
    ) -> list[Result]:
        """Run ``argv`` as every worker until all have ended, with the helpers' servers started.

        Failures are in the results, not raised. Workers that still run after ``timeout_s`` are killed.

        Returns:
            One result per worker, in rank order.
        """
        self.start_helpers()
        folder = self._folder / f"run{self._num_jobs}"
        folder.mkdir()
        with ExitStack() as files:

            def outputs(rank: int) -> tuple[Output, Output]:
                out, err = ((folder / f"{rank}.{name}").open("w") for name in ("out", "err"))
                return files.enter_context(out), files.enter_context(err)

            workers = self.start_workers(argv, workers_per_host=workers_per_host, env=env, outputs=outputs)
            until = time.monotonic() + timeout_s
            while any(worker.poll() is None for worker in workers) and time.monotonic() < until:
                time.sleep(POLL_S / 2)
            end_process_groups(workers, grace_s=0)
        return [
            Result(
                rank=rank,
                exit_code=worker.wait(),
                stdout=_text(folder / f"{rank}.out"),
                stderr=_text(folder / f"{rank}.err"),
            )
            for rank, worker in enumerate(workers)
        ]

    def _await_listening(self, index: int, sign: str) -> None:
        process, log = self.helpers[index], self.helper_logs[index]
        until = time.monotonic() + _DEADLINE_S
        while not re.search(rf"{re.escape(sign)}\b", text := _text(log)):
            code = process.poll()
            if code is not None or time.monotonic() > until:
                state = "does not listen" if code is None else f"ended with exit code {code}"
                output = "".join(f"\n  {line}" for line in text.splitlines()[-10:]) or " none"
                raise ShoalError(f"the server of helper host {index} {state}; its output:{output}")
            time.sleep(POLL_S / 2)


def _text(path: Path) -> str:
    return path.read_text("utf-8", errors="replace")


def _require_tools() -> dict[str, str]:
    """Return the paths of the required programs."""
    if sys.platform != "linux":
        raise UsageError(f"emulated hosts are Linux network namespaces and this is {sys.platform}")
    names = ("ip", "tc", "nsenter")
    paths = {name: shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin") for name in names}
    if missing := [name for name, path in paths.items() if path is None]:
        raise UsageError(
            f"emulated hosts need the programs {', '.join(missing)}, not found here: install iproute2 and "
            "util-linux (Debian and Ubuntu: apt-get install iproute2 util-linux)"
        )
    if os.geteuid() != 0:
        raise UsageError(
            "emulated hosts need root, to make network namespaces: run the same command as root, for "
            "instance with sudo -E"
        )
    return {name: path for name, path in paths.items() if path is not None}


def _cannot_make(reason: str) -> ShoalError:
    if "not permitted" in reason or "Permission denied" in reason:
        return UsageError(
            f"root may not make network namespaces here ({reason}): start the container with --privileged, "
            "or with --cap-add SYS_ADMIN --cap-add NET_ADMIN and a seccomp filter that lets unshare pass"
        )
    return ShoalError(f"the emulated hosts could not be made: {reason}")
