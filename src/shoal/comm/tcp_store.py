"""Holds the job's key-value store in rank 0's process, for programs that do not use torch.

The others connect by TCP, after both ends have proved that they know the job's secret
(:mod:`shoal.env.proof`). What is stored is signed apart from that (:class:`~shoal.comm.store.Records`).
Messages have at most 1 MiB, and the store at most 256 MiB. The first field of a request is the name of a
method of :class:`~shoal.comm.store.Store`, that of an answer is ``ok``, ``late`` or ``bad``.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

from shoal.comm.engine import CommError
from shoal.env import proof
from shoal.errors import UsageError

_PROTOCOL = b"shoal-store-2"
_MAX_STORED = 256 << 20
_MAX_WAIT_S = 7 * 86400.0
_RETRY_S = 0.05


class TcpStoreServer:
    """Serves the store to all processes of the job, in threads, until it is closed or the process ends.

    Args:
        listener: the socket at which it listens, such as one of :func:`listening_socket`; this takes it over.
        secret: of the job; ``None``: any process that reaches the port may connect.
    """

    def __init__(self, listener: socket.socket, secret: bytes | None) -> None:
        self._values: dict[str, bytes] = {}
        self._num_bytes = 0
        self._changed = threading.Condition()
        self._listener = proof.ProvedListener(listener, _PROTOCOL, secret, self._serve)
        self.port = self._listener.port
        self._listener.start()

    def close(self) -> None:
        """Stop listening; answer no more requests."""
        self._listener.close()
        with self._changed:
            self._changed.notify_all()

    def _serve(self, connection: socket.socket) -> None:
        while not self._listener.is_closed:
            proof.send(connection, self._answer(proof.receive(connection)))

    def _answer(self, request: list[bytes]) -> list[bytes]:
        try:
            name, *fields = request
            if name == b"set":
                return self._set(fields[0].decode(), fields[1])
            if name == b"get":
                return self._wait(fields[:1], fields[1]) or [b"ok", self._values[fields[0].decode()]]
            if name == b"check":
                return [b"ok", b"1" if self._has(fields) else b"0"]
            if name == b"add":
                return self._add(fields[0].decode(), int(fields[1]))
            if name == b"wait":
                return self._wait(fields[1:], fields[0]) or [b"ok"]
        except (ValueError, IndexError):  # malformed; UnicodeDecodeError is a ValueError
            pass
        return [b"bad", b"a malformed request"]

    def _has(self, keys: Sequence[bytes]) -> bool:
        return all(key.decode() in self._values for key in keys)

    def _set(self, key: str, value: bytes) -> list[bytes]:
        with self._changed:
            grown = len(value) - len(self._values.get(key, b""))
            if key not in self._values:
                grown += len(key)
            if self._num_bytes + grown > _MAX_STORED:
                return [b"bad", b"the store is full"]
            self._num_bytes += grown
            self._values[key] = value
            self._changed.notify_all()
        return [b"ok"]

    def _add(self, key: str, amount: int) -> list[bytes]:
        with self._changed:
            total = b"%d" % (int(self._values.get(key, b"0")) + amount)
            answer = self._set(key, total)  # the lock of a Condition is reentrant
        return [*answer, total]

    def _wait(self, keys: list[bytes], limit: bytes) -> list[bytes]:
        """Return the answer of a wait that failed, or an empty list."""
        if not math.isfinite(limit_s := float(limit)):
            raise ValueError(limit)
        end = time.monotonic() + min(max(limit_s, 0.0), _MAX_WAIT_S)
        with self._changed:
            while not self._has(keys):
                left_s = end - time.monotonic()
                if self._listener.is_closed or left_s <= 0:
                    return [b"late"]
                self._changed.wait(left_s)
        return []


class TcpStore:
    """A :class:`~shoal.comm.store.Store` in another process, or in this one.

    Calls of several threads take turns.

    Args:
        host: of the server.
        port: of the server.
        secret: of the job, or ``None``.
        timeout: limit for the server to start, and for :meth:`get`.

    Raises:
        CommError: the server did not answer in time, or does not know the secret.
        UsageError: one of the two has a secret and the other has none.
    """

    def __init__(self, host: str, port: int, secret: bytes | None, timeout: timedelta) -> None:
        self.host, self.port, self.timeout = host, port, timeout
        self._lock = threading.Lock()
        self._socket = self._connect(secret)

    def set(self, key: str, value: str, /) -> None:
        self._call(b"set", key.encode(), value.encode())

    def get(self, key: str, /) -> bytes:
        return self._call(b"get", key.encode(), b"%f" % self.timeout.total_seconds())[0]

    def check(self, keys: list[str], /) -> bool:
        return self._call(b"check", *map(str.encode, keys))[0] == b"1"

    def add(self, key: str, amount: int, /) -> int:
        return int(self._call(b"add", key.encode(), b"%d" % amount)[0])

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        self._call(b"wait", b"%f" % timeout.total_seconds(), *map(str.encode, keys))

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _call(self, *request: bytes) -> list[bytes]:
        with self._lock:
            try:
                proof.send(self._socket, request)
                status, *fields = proof.receive(self._socket)
            except ValueError as problem:
                raise CommError(f"the store at {self.host}:{self.port}: {problem}") from None
            except OSError as problem:
                raise CommError(f"the store at {self.host}:{self.port} was lost: {problem}") from problem
        if status == b"late":
            raise TimeoutError(f"the store at {self.host}:{self.port} has no such key yet")
        if status != b"ok":
            raise CommError(f"the store at {self.host}:{self.port}: {fields[0].decode(errors='replace')}")
        return fields

    def _connect(self, secret: bytes | None) -> socket.socket:
        end = time.monotonic() + self.timeout.total_seconds()
        greeted_until: float | None = None
        while True:
            try:
                connection = socket.create_connection((self.host, self.port), timeout=proof.GREETING_S)
            except OSError as problem:
                if time.monotonic() > end:
                    raise CommError(
                        f"rank 0's store at {self.host}:{self.port} did not answer within "
                        f"{self.timeout.total_seconds():g} s ({problem}); see whether rank 0 was started, "
                        "and whether MASTER_ADDR and MASTER_PORT are the same on all hosts and open to them"
                    ) from problem
                time.sleep(_RETRY_S)
                continue
            greeted_until = greeted_until or min(end, time.monotonic() + proof.GREETING_S)
            try:
                self._greet(connection, secret, max(greeted_until, time.monotonic() + 1.0))
                proof.prepare(connection)
                return connection
            except OSError as problem:
                connection.close()
                if time.monotonic() > greeted_until or not isinstance(problem, ConnectionError):
                    raise CommError(
                        f"what listens at {self.host}:{self.port} is not shoal's store: {problem}; set "
                        "MASTER_PORT to a port that nothing else uses"
                    ) from problem
                time.sleep(_RETRY_S)  # strangers had all places
            except BaseException:
                connection.close()
                raise

    def _greet(self, connection: socket.socket, secret: bytes | None, until: float) -> None:
        peer = f"the store at {self.host}:{self.port}"
        try:
            proof.prove(connection, _PROTOCOL, secret, until)
        except proof.NotProved as stranger:
            if stranger.problem == "program":
                raise CommError(
                    f"{peer} is that of another program or version; set MASTER_PORT to a free port"
                ) from None
            if stranger.problem == "given":
                has = "has a SHOAL_SECRET and this rank has none" if secret is None else "has no SHOAL_SECRET"
                raise UsageError(f"{peer}, of rank 0, {has}; set the same on all hosts") from None
            raise CommError(
                f"{peer} has another SHOAL_SECRET than this rank; set the same on all hosts"
            ) from None


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens for the ranks of a job.

    Args:
        host: address or name at which it listens; an empty string: all addresses of this host.
        port: port at which it listens; 0: any.

    Raises:
        UsageError: the address is not this host's, or the port is taken.
    """
    try:
        family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][
            0
        ]
        both = not host and socket.has_dualstack_ipv6()
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if both else family, backlog=1024, dualstack_ipv6=both
        )
    except OSError as problem:
        raise UsageError(
            f"rank 0 cannot listen at {host or 'this host'}:{port} ({problem.strerror or problem}); set "
            "MASTER_PORT to a free port on all hosts"
        ) from None
