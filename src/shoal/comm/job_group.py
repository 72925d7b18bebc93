"""Joins all processes of a job to one group, for programs that do not use torch.

:func:`join` returns the group. :class:`GlobalGroup` holds it for a package of functions, such as shoal.jax.

The rank of a process comes from its launcher (``shoal launch``, ``shoal emulate``, ``mpirun``, ``srun``,
torchrun); a process without one is alone. Rank 0 holds the store (:mod:`shoal.comm.tcp_store`) at MASTER_ADDR
and MASTER_PORT.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from shoal.comm.engine import (
    CollectiveEngine,
    CommError,
    Engine,
    EngineOptions,
    Operation,
    SingleProcessEngine,
)
from shoal.comm.rendezvous import LOOPBACK, connect_engine
from shoal.comm.store import PrefixStore, Store
from shoal.comm.tcp_store import TcpStore, TcpStoreServer, listening_socket
from shoal.env.launcher import store_port, worker_env
from shoal.env.secret import job_secret
from shoal.env.worker import WorkerRanks
from shoal.errors import UsageError

TIMEOUT_S = 300.0
_GROUP = "world"
_POLL_S = 0.01


class JobGroup:
    """The group of all processes of a job.

    Attributes:
        rank: of this process in the job.
        size: number of processes.
        local_rank: rank among the processes of this host.
        local_size: number of processes on this host.
        timeout_s: limit for each rank's arrival and for each collective.
        engine: of the group.
    """

    def __init__(
        self,
        ranks: WorkerRanks,
        engine: CollectiveEngine,
        timeout_s: float,
        store: TcpStore | None = None,
        server: TcpStoreServer | None = None,
    ) -> None:
        self.rank, self.size = ranks.rank, ranks.num_workers
        self.local_rank, self.local_size = ranks.local_rank, ranks.num_local_workers
        self.engine, self.timeout_s = engine, timeout_s
        self._store, self._server = store, server

    def c_group(self) -> int:
        """Return the address of a new reference to the group of ``shoal.h``; 0 for one process alone."""
        return self.engine.c_group() if isinstance(self.engine, Engine) else 0

    def barrier(self) -> None:
        """Wait until all ranks have called it.

        Raises:
            CommError: the group failed, or a rank did not come within ``timeout_s``.
        """
        self._run(Operation(kind="barrier", timeout_s=self.timeout_s))

    def broadcast_bytes(self, value: bytes, root: int = 0) -> bytes:
        """Return the bytes of rank ``root`` on all ranks.

        Raises:
            CommError: the group failed, or a rank did not come within ``timeout_s``.
        """
        length = ctypes.c_int64(len(value))
        self._broadcast(ctypes.addressof(length), ctypes.sizeof(length), root)
        text = ctypes.create_string_buffer(value if self.rank == root else b"", max(length.value, 1))
        self._broadcast(ctypes.addressof(text), length.value, root)
        return text.raw[: length.value]

    def close(self) -> None:
        """Leave the group; data in flight to other ranks arrives first."""
        self.engine.close()
        if self._store is not None:
            self._store.close()
        if self._server is not None:
            self._server.close()

    def _broadcast(self, address: int, num_bytes: int, root: int) -> None:
        self._run(
            Operation(
                kind="broadcast",
                input=address,
                output=address,
                count=num_bytes,
                root=root,
                timeout_s=self.timeout_s,
            )
        )

    def _run(self, operation: Operation) -> None:
        self.engine.wait(self.engine.submit(operation))


def join(
    *, timeout_s: float = TIMEOUT_S, options: EngineOptions | None = None, store: Store | None = None
) -> JobGroup:
    """Join the processes that the launcher has started together.

    Args:
        timeout_s: limit for each rank's arrival and for each collective.
        options: of the engine, the same on all ranks.
        store: that all ranks reach already, such as the one of a ``torch.distributed`` group; ``None``: rank
            0 makes one.

    Returns:
        The group of all processes; of this one alone, where no launcher has set its rank.

    Raises:
        CommError: a rank did not come in time, or has another secret.
        UsageError: an environment variable is wrong, or rank 0's port is taken.

    Example:
        >>> group = join()
        >>> group.rank, group.size, group.broadcast_bytes(b"seed")
        (0, 1, b'seed')
        >>> group.close()
    """
    worker = worker_env()
    if worker is None or worker.ranks.num_workers == 1:
        alone = WorkerRanks(rank=0, num_workers=1, local_rank=0, num_local_workers=1)
        return JobGroup(alone, SingleProcessEngine(), timeout_s)
    secret, limit, rank = job_secret(), timedelta(seconds=timeout_s), worker.ranks.rank
    if store is not None:
        kept = PrefixStore(f"shoal/{_GROUP}/", store)
        engine = _connect(kept, worker.ranks, limit, options)
        return JobGroup(worker.ranks, engine, timeout_s)
    server = None
    if worker.store_file is not None:  # all ranks are on this host, and no port is known
        if rank == 0:
            server = TcpStoreServer(listening_socket(LOOPBACK, 0), secret)
            _write_port(_port_file(worker.store_file), server.port)
        host, port = LOOPBACK, _read_port(_port_file(worker.store_file), timeout_s)
    else:
        host, port = worker.master_addr, store_port(worker)
        if rank == 0:
            server = TcpStoreServer(listening_socket("", port), secret)
    own = TcpStore(host, port, secret, limit)
    return JobGroup(worker.ranks, _connect(own, worker.ranks, limit, options), timeout_s, own, server)


def _connect(store: Store, ranks: WorkerRanks, limit: timedelta, options: EngineOptions | None) -> Engine:
    size = ranks.num_workers
    return connect_engine(store, ranks.rank, size, _GROUP, ranks.rank, limit, options or EngineOptions())


def _port_file(store_file: Path) -> Path:
    return store_file.with_name(store_file.name + ".port")


def _write_port(path: Path, port: int) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(str(port))
    temporary.replace(path)


def _read_port(path: Path, timeout_s: float) -> int:
    end = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > end:
            raise CommError(
                f"rank 0 did not write {path} within {timeout_s:g} s; see whether it was started and what it "
                "printed"
            )
        time.sleep(_POLL_S)
    text = path.read_text()
    if not (text.isdecimal() and 0 < int(text) < 1 << 16):
        raise UsageError(f"{path} has {text!r:.40}, not a port; delete it and start the job again")
    return int(text)


# ---- for packages of functions --------------------------------------------------------------------------


def _nothing() -> None:
    pass


class GlobalGroup:
    """The job's group as the global state of a package: :meth:`init` joins it, functions use it.

    Args:
        package: name of the package, for messages, as in ``"shoal.tensorflow"``.
        prepare: called before the other processes are waited for.
        joined: called with the group.
        finish: called before the group is left: waits for the collectives of the framework.
    """

    def __init__(
        self,
        package: str,
        *,
        prepare: Callable[[], None] = _nothing,
        joined: Callable[[JobGroup], None] = lambda _: None,
        finish: Callable[[], None] = _nothing,
    ) -> None:
        self._package, self._prepare, self._joined, self._finish = package, prepare, joined, finish
        self._group: JobGroup | None = None

    def init(
        self,
        *,
        timeout_s: float = TIMEOUT_S,
        options: EngineOptions | None = None,
        store: Store | None = None,
    ) -> None:
        """Join the processes that the launcher has started together; again: does nothing.

        The launcher (``shoal launch``, ``shoal emulate``, ``mpirun``, ``srun``) sets the rank. A process
        without one is alone: its collectives return their operands.

        Args:
            timeout_s: limit for each rank's arrival and for each collective, in seconds.
            options: of the engine, the same on all ranks.
            store: that all ranks reach already, such as the one of a ``torch.distributed`` group; ``None``:
                rank 0 makes one.

        Raises:
            CommError: a rank did not come in time, or has another secret.
            UsageError: an environment variable is wrong, rank 0's port is taken, or it was called before and
                options, a store or another timeout are given now.
        """
        if self._group is not None:
            others = timeout_s not in (TIMEOUT_S, self._group.timeout_s)
            if options is not None or store is not None or others:
                raise UsageError(
                    f"{self._package}.init() was called before, with timeout_s={self._group.timeout_s:g}; "
                    "give options, store and timeout_s in its first call"
                )
            return
        self._prepare()
        self._group = join(timeout_s=timeout_s, options=options, store=store)
        self._joined(self._group)
        atexit.register(self.shutdown)

    def shutdown(self) -> None:
        """Wait for the collectives of this process, and leave the others. A program's end does it too."""
        if self._group is not None:
            leaving, self._group = self._group, None
            atexit.unregister(self.shutdown)
            self._finish()
            leaving.close()

    def is_initialized(self) -> bool:
        """Return whether :meth:`init` was called."""
        return self._group is not None

    def group(self) -> JobGroup:
        """Return the group of all processes.

        Raises:
            UsageError: :meth:`init` was not called.
        """
        if self._group is None:
            raise UsageError(f"{self._package}.init() was not called; call it before the first collective")
        return self._group

    def rank(self) -> int:
        """Return the rank of this process, from 0 to :meth:`size` - 1.

        Raises:
            UsageError: :meth:`init` was not called.
        """
        return self.group().rank

    def size(self) -> int:
        """Return the number of processes.

        Raises:
            UsageError: :meth:`init` was not called.
        """
        return self.group().size

    def local_rank(self) -> int:
        """Return the rank of this process among those of its host.

        Raises:
            UsageError: :meth:`init` was not called.
        """
        return self.group().local_rank

    def local_size(self) -> int:
        """Return the number of processes on this host.

        Raises:
            UsageError: :meth:`init` was not called.
        """
        return self.group().local_size
