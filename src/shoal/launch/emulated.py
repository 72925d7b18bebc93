"""A cluster of emulated hosts on this machine: network namespaces on a bridge, with shaped links.

    with Cluster(hosts=8, helpers=4, nic="200mbit") as cluster:
        results = cluster.run([sys.executable, "job.py"])   # one worker a host, helpers' servers started
        cluster.link(3, up=False)                           # pull host 3's cable

Each host has a network namespace with an interface ``eth0`` and a loopback of its own, and a host name of its
own. Processor, memory, files, shared memory and process ids are this machine's. Hosts are numbered: those of
the workers from 0, then the helper hosts. :mod:`shoal.launch.emulated_keeper` holds it all and takes it away
when this process ends, however it ends. Needs Linux, root and iproute2.
"""

from __future__ import annotations

import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ShoalError, UsageError
from shoal.launch.emulated_hosts import POLL_S, EmulatedHosts, Output, end
from shoal.launch.emulated_plan import (
    HELPER_PORT,
    MASTER_PORT,
    helpers_setting,
    plan_cluster,
    worker_places,
)

HELPER_COMMAND = (sys.executable, "-m", "shoal.comm.server")
"""What runs on each helper host; ``--address ADDRESS --port PORT`` is appended."""

_HELPER_DEADLINE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a worker of :meth:`Cluster.run` has ended."""

    rank: int
    exit_code: int
    """Minus the signal's number for a death by signal."""
    stdout: str
    stderr: str


class Cluster(EmulatedHosts):
    """``hosts`` worker hosts and ``helpers`` helper hosts; a context manager.

    Args:
        hosts: number of worker hosts.
        helpers: number of helper hosts.
        nic: rate of every host's link in each direction, such as ``"200mbit"``; ``None``: not shaped.
        helper_nic: the same for helper hosts; ``None``: as ``nic``.
        announce_rates: tell the workers, in SHOAL_HELPERS, the ratio of the helpers' rate to theirs. Off, the
            engine has to find it out.
        helper_command: what to start on each helper host, before ``--address ADDRESS --port PORT``. It must
            print a line with ``listening on ADDRESS:PORT`` when it is ready.
        log_dir: folder for the helpers' output; ``None``: a temporary one, removed at the end.

    Raises:
        UsageError: a number or a rate is none, or this machine cannot emulate hosts.
        ShoalError: making the hosts failed.
    """

    def __init__(
        self,
        *,
        hosts: int,
        helpers: int = 0,
        nic: str | None = None,
        helper_nic: str | None = None,
        announce_rates: bool = True,
        helper_command: Sequence[str] = HELPER_COMMAND,
        log_dir: Path | None = None,
    ) -> None:
        prefix = f"shoal-{secrets.token_hex(3)}"
        super().__init__(
            plan_cluster(hosts=hosts, helpers=helpers, nic=nic, helper_nic=helper_nic, prefix=prefix)
        )
        self.num_hosts = hosts
        self.helpers: list[subprocess.Popen[str]] = []
        """The helper hosts' servers, in the order of the hosts; empty before :meth:`start_helpers`."""
        self.helper_logs: list[Path] = []
        self._announce_rates = announce_rates
        self._helper_command = tuple(helper_command)
        self._log_dir = log_dir
        self._num_jobs = 0

    def environment(self) -> dict[str, str]:
        variables = super().environment()
        if self.plan.helpers:
            variables["SHOAL_HELPERS"] = helpers_setting(self.plan, announce_rates=self._announce_rates)
        return variables

    def start_helpers(self) -> list[subprocess.Popen[str]]:
        """Start the server of each helper host, unless that has been done, and wait until they listen.

        Raises:
            ShoalError: one has ended, or does not listen after 60 s.
        """
        if self.helpers or not self.plan.helpers:
            return self.helpers
        folder = self._log_dir or self._temporary("helpers")
        folder.mkdir(parents=True, exist_ok=True)
        for index, helper in enumerate(self.plan.helpers):
            path = folder / f"{helper.port}.log"
            argv = [*self._helper_command, "--address", helper.address, "--port", str(HELPER_PORT)]
            with path.open("w", encoding="utf-8") as file:
                process = self.start(self.num_hosts + index, argv, stdout=file, stderr=subprocess.STDOUT)
            self.helpers.append(process)
            self.helper_logs.append(path)
        for index, helper in enumerate(self.plan.helpers):
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
            outputs: gives stdout and stderr for a rank.
        """
        if workers_per_host < 1:
            raise UsageError(f"{workers_per_host} workers per host must be at least 1")
        port = MASTER_PORT + self._num_jobs % 1_000  # the last job's port may still have connections
        self._num_jobs += 1
        workers = []
        for rank in range(self.num_hosts * workers_per_host):
            place = worker_places(self.plan, rank=rank, workers_per_host=workers_per_host, master_port=port)
            stdout, stderr = outputs(rank)
            host = rank // workers_per_host
            workers.append(self.start(host, argv, env={**place, **(env or {})}, stdout=stdout, stderr=stderr))
        return workers

    def run(
        self,
        argv: Sequence[str],
        *,
        workers_per_host: int = 1,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
    ) -> list[Result]:
        """Run ``argv`` as every worker to its end, with the helpers' servers started.

        Failures are told in the results, not raised. Who is not done after ``timeout_s`` is killed.

        Returns:
            One result a worker, in rank order.
        """
        self.start_helpers()
        folder = self._temporary(f"run{self._num_jobs}")
        folder.mkdir()
        with ExitStack() as files:

            def outputs(rank: int) -> tuple[Output, Output]:
                out, err = ((folder / f"{rank}.{name}").open("w") for name in ("out", "err"))
                return files.enter_context(out), files.enter_context(err)

            workers = self.start_workers(argv, workers_per_host=workers_per_host, env=env, outputs=outputs)
            until = time.monotonic() + timeout_s
            while any(worker.poll() is None for worker in workers) and time.monotonic() < until:
                time.sleep(POLL_S)
            end(workers, grace_s=0)
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
        until = time.monotonic() + _HELPER_DEADLINE_S
        while not re.search(rf"{re.escape(sign)}\b", text := _text(log)):
            code = process.poll()
            if code is not None or time.monotonic() > until:
                how = "does not listen" if code is None else f"ended with exit code {code}"
                said = "".join(f"\n  {line}" for line in text.splitlines()[-10:]) or " nothing"
                raise ShoalError(f"the server of helper host {index} {how}; it said:{said}")
            time.sleep(POLL_S)


def _text(path: Path) -> str:
    return path.read_text("utf-8", errors="replace")
