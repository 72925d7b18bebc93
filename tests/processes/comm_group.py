"""Runs groups of engines, one process per rank, and helper servers; tests stop, kill and isolate them."""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from comm_stranger import Who, private_key, public_key

from forked import fork_process
from shoal.comm.engine import CommError, Engine, EngineOptions, Helper, Operation, Peer
from shoal.launch.emulated import Cluster
from shoal.launch.emulated_network import HELPER_PORT

SECRET = "the secret of these tests"
DEADLINE_S = 60.0
BOUND_S = 3 * 2.0
"""A loss is named within 2 s; tests allow three times that."""
DEFAULTS = EngineOptions()
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Report:
    """A worker's report: its kind, its time (``time.monotonic``, one clock for all processes), its value."""

    what: str
    at: float
    value: Any


@dataclass
class Member:
    """A rank inside its process."""

    engine: Engine
    rank: int
    size: int
    pipe: Connection

    def report(self, what: str, value: Any = None) -> None:
        self.pipe.send(Report(what, time.monotonic(), value))

    def told(self, timeout_s: float = 0.0) -> bool:
        """Return whether the test has sent a command (:meth:`Group.tell`) within the timeout."""
        return self.pipe.poll(timeout_s) and bool(self.pipe.recv())

    def begin(self, kind: str, data: np.ndarray, output: np.ndarray | None = None, **given: Any) -> int:
        """Submit a collective of ``data``, by default in place; the caller keeps both alive."""
        to = data if output is None else output
        asked = Operation(
            kind=kind, input=data.ctypes.data, output=to.ctypes.data, count=data.size, dtype=str(data.dtype),
            shape=data.shape, timeout_s=DEADLINE_S,
        )  # fmt: skip
        return self.engine.submit(replace(asked, **given))

    def end(self, handle: int) -> None:
        if not self.engine.wait(handle, DEADLINE_S):
            raise TimeoutError(f"operation {handle} has no end")


class Group:
    """``len(hosts)`` workers that run ``function(member, *args)``; ranks with the same host share memory.

    With a ``cluster`` the hosts are its hosts' numbers, and its helpers serve. A worker reports ``"error"``
    with the text of a :class:`CommError` that ends its function, ``"crash"`` for any other exception, or
    ``"done"`` with the engine's counters. ``change`` gets the group before its ranks learn of each other.
    """

    def __init__(
        self,
        function: Callable[..., None],
        hosts: Sequence[str | int],
        *args: Any,
        helpers: Sequence[HelperProcess] = (),
        pattern: Sequence[int] | None = None,
        options: Sequence[EngineOptions] | EngineOptions = DEFAULTS,
        secrets: Sequence[str] | None = None,
        cluster: Cluster | None = None,
        connect_s: float = 30.0,
        absent: Sequence[int] = (),
        change: Callable[[Group], None] = lambda _: None,
    ) -> None:
        self._change = change
        self.hosts, self.cluster, self.helpers = hosts, cluster, helpers
        self.size = len(hosts)
        self.reports: list[list[Report]] = [[] for _ in hosts]
        self._gone: set[int] = set()
        self._function, self._args = function, args
        self._options = options if isinstance(options, Sequence) else [options] * self.size
        secret = SECRET if cluster is None else Path(cluster.environment()["SHOAL_SECRET_FILE"]).read_text()
        self._secrets = secrets or [secret] * self.size
        self._pattern = pattern
        self._connect_s, self._absent = connect_s, absent
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self.peers: list[Peer] = []

    def address(self, rank: int) -> str:
        if self.cluster is not None:
            return ",".join(address for *_, address in self.cluster.plan[int(self.hosts[rank])].links())
        return f"127.0.0.{1 + self.hosts.index(self.hosts[rank])}"

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill()

    def _start(self) -> None:
        for rank in range(self.size):
            ours, theirs = Pipe()
            network = self._network(rank)
            start = (rank, self.size, self.address(rank), self._secrets[rank], self._options[rank], network)
            self._processes.append(fork_process(_worker, theirs, start, self._function, self._args))
            theirs.close()
            self._pipes.append(ours)
        ports = [self.expect(rank, "port").value for rank in range(self.size)]
        self.peers = [
            Peer(
                host=str(host),
                address=self.address(rank),
                port=port,
                global_rank=rank,
                pid=self.pid(rank),
                key=public_key(private_key(rank)).hex(),
            )
            for rank, (host, port) in enumerate(zip(self.hosts, ports, strict=True))
        ]
        self._change(self)
        helpers = [Helper(address=each.address, port=each.port, name=each.name) for each in self.helpers]
        if self.cluster is not None:
            helpers = [
                Helper(address=host.address, port=HELPER_PORT, name=f"h{index}")
                for index, host in enumerate(self.cluster.plan[self.cluster.num_hosts :])
            ]
        servers = range(self.size, self.size + len(helpers)) if helpers else range(self.size)
        pattern = list(self._pattern if self._pattern is not None else servers)
        segment = f"test-{os.getpid()}-{time.time_ns()}"
        self.identity = f"{segment} faults"  # how the group's connections introduce themselves
        for rank, pipe in enumerate(self._pipes):
            if rank not in self._absent:  # these listen, and never go on
                pipe.send((self.peers, helpers, pattern, segment, self._connect_s))

    def _network(self, rank: int) -> str | None:
        if self.cluster is None:
            return None
        (option,) = (word for word in self.cluster.enter(int(self.hosts[rank])) if word.startswith("--net="))
        return option.removeprefix("--net=")

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()

    # ---- what tests do -----------------------------------------------------------------------------------

    def pid(self, rank: int) -> int:
        pid = self._processes[rank].pid
        assert pid is not None
        return pid

    def who(self, rank: int) -> Who:
        """Return how a stranger passes for a rank."""
        peer = self.peers[rank]
        process = f"{peer.address}:{peer.port} pid {peer.pid}"
        return Who(group=self.identity, rank=rank, size=self.size, process=process)

    def name(self, rank: int) -> str:
        """Return the name of a rank in messages."""
        return f"rank {rank} ({self.address(rank)}, pid {self.pid(rank)})"

    def signal(self, rank: int, number: signal.Signals) -> float:
        """Send a signal to a rank's process and return when."""
        os.kill(self.pid(rank), number)
        return time.monotonic()

    def tell(self, rank: int) -> None:
        with suppress(BrokenPipeError):
            self._pipes[rank].send(True)

    def expect(self, rank: int, what: str, *, count: int = 1, deadline_s: float = DEADLINE_S) -> Report:
        """Return the ``count``-th report of this kind; fails where the worker ends or crashes before it."""
        until = time.monotonic() + deadline_s
        while len(found := [each for each in self.reports[rank] if each.what == what]) < count:
            ended = [each for each in self.reports[rank] if each.what in ("error", "crash", "done")]
            assert not ended, (
                f"rank {rank} ended before {count} x {what!r}: {ended[0].what}: {ended[0].value}"
            )
            left = until - time.monotonic()
            assert left > 0, f"rank {rank} has not said {what!r} {count} times in {deadline_s} s"
            self.hear(left)
            assert rank not in self._gone, f"rank {rank} is gone before it said {what!r}"
        return found[count - 1]

    def hear(self, timeout_s: float) -> None:
        """Take a report of each worker that has one: nobody is to block on a full pipe."""
        pipes = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in self._gone}
        for pipe in wait(list(pipes), timeout_s):
            assert isinstance(pipe, Connection)
            try:
                self.reports[pipes[pipe]].append(pipe.recv())
            except (EOFError, ConnectionResetError):
                self._gone.add(pipes[pipe])

    def values(self, rank: int, what: str) -> list[Any]:
        return [each.value for each in self.reports[rank] if each.what == what]

    def errors(self, ranks: Sequence[int], since: float, bound_s: float = BOUND_S) -> list[str]:
        """Return the error of each rank; all must come within ``bound_s`` after ``since``."""
        found = [self.expect(rank, "error", deadline_s=3 * bound_s) for rank in ranks]
        for rank, error in zip(ranks, found, strict=True):
            assert error.at - since < bound_s, (
                f"rank {rank} raised only after {error.at - since:.1f} s: {error.value}"
            )
        return [error.value for error in found]


def _worker(
    pipe: Connection,
    start: tuple[int, int, str, str, EngineOptions, str | None],
    function: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    rank, size, address, secret, options, network = start
    if network is not None:
        _enter(network)
    engine = Engine(
        rank=rank, size=size, group="faults", secret=secret.encode(), address=address, options=options,
        private_key=private_key(rank),
    )  # fmt: skip
    member = Member(engine, rank, size, pipe)
    member.report("port", engine.port)
    try:
        peers, helpers, pattern, segment, connect_s = pipe.recv()
        engine.connect(peers, helpers, pattern, segment=segment, timeout_s=connect_s)
        function(member, *args)
        engine.close()
        member.report("done", engine.counters())
    except CommError as error:
        member.report("error", str(error))
    except BaseException:
        member.report("crash", traceback.format_exc())
    pipe.poll(DEADLINE_S)  # until the test has heard all


def _enter(network: str) -> None:
    """Move this process, which has one thread yet, into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(network).open() as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")


# ---- a stream of sums and what it must give --------------------------------------------------------------


def base(rank: int, count: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(count).astype(np.float32)


def scale(step: int) -> np.float32:
    return np.float32(1 + step / 7)


def stream(member: Member, steps: int, count: int, pause_s: float = 0.0) -> None:
    """All-reduce ``steps`` tensors, two at a time under way; report each sum's digest as ``"sum"``."""
    mine = base(member.rank, count)
    under_way: list[tuple[int, np.ndarray]] = []
    for step in range(steps + 1):
        if step < steps:
            data = mine * scale(step)
            under_way.append((member.begin("all_reduce", data), data))
        if step > 0:
            handle, data = under_way.pop(0)
            member.end(handle)
            member.report("sum", digest(data))
            time.sleep(pause_s)
    member.report("events", member.engine.take_events())


def expected(hosts: Sequence[str | int], steps: int, count: int) -> list[str]:
    """The digests of the stream's sums: ranks of a host in order, then hosts by their lowest rank."""
    bases = [base(rank, count) for rank in range(len(hosts))]
    digests = []
    for step in range(steps):
        partial: dict[str | int, np.ndarray] = {}
        for rank, host in enumerate(hosts):
            data = bases[rank] * scale(step)
            partial[host] = partial[host] + data if host in partial else data
        total, *others = partial.values()
        for other in others:
            total = total + other
        digests.append(digest(total))
    return digests


def digest(data: np.ndarray) -> str:
    return hashlib.sha256(data.tobytes()).hexdigest()[:16]


# ---- helper hosts -----------------------------------------------------------------------------------------


@dataclass
class HelperProcess:
    """``python -m shoal.comm.server``; a context manager."""

    name: str
    address: str = "127.0.0.100"
    port: int = 0
    secret: str = SECRET
    arguments: tuple[str, ...] = ()
    lines: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        self.start()
        self.await_listening()
        return self

    def start(self) -> None:
        place = ("--address", self.address, "--port", str(self.port))
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "shoal.comm.server", *place, *self.arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "SHOAL_SECRET": self.secret},
        )

    def await_listening(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "listening on" in line, line + self.process.stdout.read()
        self.port = int(line.rsplit(":", 1)[1])

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def kill(self) -> None:
        self.process.kill()

    def stop(self) -> str:
        """End it in order and return what it said; fails if it had crashed."""
        self.process.send_signal(signal.SIGTERM)
        said, _ = self.process.communicate(timeout=DEADLINE_S)
        assert self.process.returncode == 0, (self.process.returncode, said)
        return said
