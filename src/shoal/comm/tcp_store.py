"""Holds the job's key-value store in rank 0's process, for programs that do not use torch.

The others connect by TCP. With a secret of the job, both ends of a connection prove first that they know it,
by HMAC-SHA256 over random numbers of both; it is not sent. What is stored is signed apart from that
(:class:`~shoal.comm.store.Records`). Messages have at most 1 MiB, and the store at most 256 MiB.

Before its proof a connection may send 256 bytes, in 10 s altogether. 256 connections may be in this state at
once: with one more the oldest is closed, whose process tries again if it is one of the job.

A message is its length and its fields, each with its length, as unsigned 32-bit numbers in network order. The
first field of a request is the name of a method of :class:`~shoal.comm.store.Store`, that of an answer is
``ok``, ``late`` or ``bad``.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

from shoal.comm.engine import CommError
from shoal.errors import UsageError

_GREETING = b"shoal-store-1"
_NONCE_BYTES = 32
_MAX_MESSAGE = 1 << 20
_MAX_STORED = 256 << 20
_MAX_KEYS = 1 << 16
_GREETING_S = 10.0
_MAX_GREETING = 256
_MAX_UNPROVED = 256
_MAX_CONNECTIONS = 1 << 14
_RETRY_S = 0.05
_LENGTH = struct.Struct("!I")
_MAX_WAIT_S = 7 * 86400.0
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
"""A peer whose host is gone is noticed after about a minute."""


class TcpStoreServer:
    """Serves the store to all processes of the job, in threads, until it is closed or the process ends.

    Args:
        listener: the socket at which it listens, such as one of :func:`listening_socket`; this takes it over.
        secret: of the job; ``None``: any process that reaches the port may connect.
    """

    def __init__(self, listener: socket.socket, secret: bytes | None) -> None:
        self._secret = secret
        self._values: dict[str, bytes] = {}
        self._num_bytes = 0
        self._changed = threading.Condition()
        self._lock = threading.Lock()
        self._unproved: dict[socket.socket, None] = {}
        """Connections before their proof, the oldest first."""
        self._num_connections = 0
        self._is_closed = False
        self._socket = listener
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept, name="shoal store", daemon=True).start()

    def close(self) -> None:
        """Stop listening; answer no more requests."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(_RETRY_S)  # too many open files
                continue
            with self._lock:
                if self._num_connections >= _MAX_CONNECTIONS:
                    connection.close()
                    continue
                if len(self._unproved) >= _MAX_UNPROVED:
                    oldest = next(iter(self._unproved))
                    del self._unproved[oldest]
                    with contextlib.suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # wakes its thread
                self._unproved[connection] = None
                self._num_connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError, CommError):
                if not self._greet(connection):
                    return
                with self._lock:
                    self._unproved.pop(connection, None)
                _prepare(connection)
                while not self._is_closed:
                    _send(connection, self._answer(_receive(connection)))
        finally:
            with self._lock:
                self._unproved.pop(connection, None)
                self._num_connections -= 1

    def _greet(self, connection: socket.socket) -> bool:
        """Return whether the process at the other end knows the secret."""
        until = time.monotonic() + _GREETING_S
        connection.settimeout(_GREETING_S)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        _send(connection, [_GREETING, nonce, b"secret" if self._secret else b"open"])
        answer = _receive(connection, _MAX_GREETING, until)
        if len(answer) != 2 or len(answer[0]) != _NONCE_BYTES:
            return False
        if self._secret is not None and not hmac.compare_digest(
            answer[1], _proof(self._secret, b"client", nonce, answer[0])
        ):
            _send(connection, [b"refused", b""])
            return False
        proof = _proof(self._secret, b"server", nonce, answer[0]) if self._secret else b""
        _send(connection, [b"ok", proof])
        return True

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
                if self._is_closed or left_s <= 0:
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
                _send(self._socket, list(request))
                status, *fields = _receive(self._socket)
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
                connection = socket.create_connection((self.host, self.port), timeout=_GREETING_S)
            except OSError as problem:
                if time.monotonic() > end:
                    raise CommError(
                        f"rank 0's store at {self.host}:{self.port} did not answer within "
                        f"{self.timeout.total_seconds():g} s ({problem}); see whether rank 0 was started, "
                        "and whether MASTER_ADDR and MASTER_PORT are the same on all hosts and open to them"
                    ) from problem
                time.sleep(_RETRY_S)
                continue
            greeted_until = greeted_until or min(end, time.monotonic() + _GREETING_S)
            try:
                self._greet(connection, secret, max(greeted_until, time.monotonic() + 1.0))
                _prepare(connection)
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
        greeting = _receive(connection, _MAX_GREETING, until)
        if len(greeting) != 3 or greeting[0] != _GREETING:
            raise CommError(f"{peer} is that of another program or version; set MASTER_PORT to a free port")
        if (greeting[2] == b"secret") != (secret is not None):
            has = "has a SHOAL_SECRET and this rank has none" if secret is None else "has no SHOAL_SECRET"
            raise UsageError(f"{peer}, of rank 0, {has}; set the same on all hosts")
        nonce = secrets.token_bytes(_NONCE_BYTES)
        _send(connection, [nonce, _proof(secret, b"client", greeting[1], nonce) if secret else b""])
        answer = _receive(connection, _MAX_GREETING, until)
        expected = _proof(secret, b"server", greeting[1], nonce) if secret else b""
        if len(answer) != 2 or answer[0] != b"ok" or not hmac.compare_digest(answer[1], expected):
            raise CommError(f"{peer} has another SHOAL_SECRET than this rank; set the same on all hosts")


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


def _proof(secret: bytes, side: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(secret, _GREETING + side + first + second, "sha256")


def _prepare(connection: socket.socket) -> None:
    """Enable TCP keep-alive: a connection waits without a limit, except for a host that is gone."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _send(connection: socket.socket, fields: Sequence[bytes]) -> None:
    text = b"".join(_LENGTH.pack(len(field)) + field for field in fields)
    if len(text) > _MAX_MESSAGE:
        raise CommError(f"a message to the store has {len(text):,} bytes; at most {_MAX_MESSAGE:,} are sent")
    connection.sendall(_LENGTH.pack(len(text)) + text)


def _receive(connection: socket.socket, most: int = _MAX_MESSAGE, until: float | None = None) -> list[bytes]:
    """Return the fields of a message of at most ``most`` bytes, which has arrived ``until`` a time.

    Raises:
        ConnectionError: the connection was closed.
        OSError: the message is malformed, too long or too late.
    """
    (num_bytes,) = _LENGTH.unpack(_read(connection, _LENGTH.size, until))
    if num_bytes > most:
        raise OSError(f"a message of {num_bytes:,} bytes")
    text, at = _read(connection, num_bytes, until), 0
    fields: list[bytes] = []
    while at < num_bytes and len(fields) < _MAX_KEYS:
        if num_bytes - at < _LENGTH.size:
            raise OSError("a malformed message")
        (length,) = _LENGTH.unpack_from(text, at)
        at += _LENGTH.size
        fields.append(text[at : at + length])
        at += length
    if at != num_bytes or not fields:
        raise OSError("a malformed message")
    return fields


def _read(connection: socket.socket, num_bytes: int, until: float | None) -> bytes:
    text = bytearray()
    while len(text) < num_bytes:
        if until is not None:
            connection.settimeout(max(until - time.monotonic(), 0.001))
        part = connection.recv(num_bytes - len(text))
        if not part:
            raise ConnectionError("the connection was closed")
        text += part
    return bytes(text)
