"""Proves over a connection that both ends know the job's secret, and limits what strangers can take.

1. The server sends the name of its protocol, a random number, and whether it has a secret.
2. The client answers with a random number of its own and the HMAC-SHA256 of both, under the secret.
3. The server answers with another HMAC of them. The secret is not sent, and a proof of one protocol or side
   is none of another.

Before its proof a connection may send 256 bytes, in 10 s altogether. 256 connections may be in this state at
once: with one more the oldest is closed, whose process tries again if it is one of the job.

A message is its length and its fields, each with its length, as unsigned 32-bit numbers in network order.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

MAX_MESSAGE = 1 << 20
GREETING_S = 10.0
MAX_UNPROVED = 256
MAX_CONNECTIONS = 1 << 14
_MAX_GREETING = 256
_MAX_FIELDS = 1 << 16
_NONCE_BYTES = 32
_RETRY_S = 0.05
_LENGTH = struct.Struct("!I")
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
"""A peer whose host is gone is noticed after about a minute."""


class NotProved(Exception):
    """Raised where the other end is not one of the job.

    Attributes:
        problem: ``program``: it has another protocol; ``given``: only one of the two has a secret;
            ``secret``: they have different ones.
    """

    def __init__(self, problem: Literal["program", "given", "secret"]) -> None:
        super().__init__(problem)
        self.problem = problem


class ProvedListener:
    """Serves the connections of the job's processes in threads, from ``start`` until it is closed.

    Args:
        listener: the socket at which it listens; this takes it over.
        protocol: name of the protocol and its version.
        secret: of the job; ``None``: any process that reaches the port may connect.
        serve: called in a thread of its own with a connection that was proved; closed when it returns or
            raises ``OSError`` or ``ValueError``.
    """

    def __init__(
        self,
        listener: socket.socket,
        protocol: bytes,
        secret: bytes | None,
        serve: Callable[[socket.socket], None],
    ) -> None:
        self.port = int(listener.getsockname()[1])
        self.is_closed = False
        self._socket, self._protocol, self._secret, self._serve = listener, protocol, secret, serve
        self._lock = threading.Lock()
        self._unproved: dict[socket.socket, None] = {}
        """Connections before their proof, the oldest first."""
        self._num_connections = 0

    def start(self) -> None:
        """Accept connections, in a thread."""
        threading.Thread(target=self._accept, name=self._protocol.decode(), daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self.is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self.is_closed:
                    return
                time.sleep(_RETRY_S)  # too many open files
                continue
            with self._lock:
                if self._num_connections >= MAX_CONNECTIONS:
                    connection.close()
                    continue
                if len(self._unproved) >= MAX_UNPROVED:
                    oldest = next(iter(self._unproved))
                    del self._unproved[oldest]
                    with contextlib.suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # wakes its thread
                self._unproved[connection] = None
                self._num_connections += 1
            threading.Thread(target=self._run, args=(connection,), daemon=True).start()

    def _run(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError, ValueError):
                if not self._greet(connection):
                    return
                with self._lock:
                    self._unproved.pop(connection, None)
                prepare(connection)
                self._serve(connection)
        finally:
            with self._lock:
                self._unproved.pop(connection, None)
                self._num_connections -= 1

    def _greet(self, connection: socket.socket) -> bool:
        """Return whether the process at the other end knows the secret."""
        until = time.monotonic() + GREETING_S
        connection.settimeout(GREETING_S)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        send(connection, [self._protocol, nonce, b"secret" if self._secret else b"open"])
        answer = receive(connection, _MAX_GREETING - _LENGTH.size, until)
        if len(answer) != 2 or len(answer[0]) != _NONCE_BYTES:
            return False
        if self._secret is not None and not hmac.compare_digest(
            answer[1], _proof(self._secret, self._protocol, b"client", nonce, answer[0])
        ):
            send(connection, [b"refused", b""])
            return False
        proof = _proof(self._secret, self._protocol, b"server", nonce, answer[0]) if self._secret else b""
        send(connection, [b"ok", proof])
        return True


def prove(connection: socket.socket, protocol: bytes, secret: bytes | None, until: float) -> None:
    """Prove to a :class:`ProvedListener` that this process knows the secret, and let it prove the same.

    Args:
        until: time of ``time.monotonic`` at which this ends.

    Raises:
        NotProved: it is not of the job.
        OSError: it was closed, is late, or sent no greeting.
    """
    greeting = receive(connection, _MAX_GREETING, until)
    if len(greeting) != 3 or greeting[0] != protocol:
        raise NotProved("program")
    if (greeting[2] == b"secret") != (secret is not None):
        raise NotProved("given")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    send(connection, [nonce, _proof(secret, protocol, b"client", greeting[1], nonce) if secret else b""])
    answer = receive(connection, _MAX_GREETING, until)
    expected = _proof(secret, protocol, b"server", greeting[1], nonce) if secret else b""
    if len(answer) != 2 or answer[0] != b"ok" or not hmac.compare_digest(answer[1], expected):
        raise NotProved("secret")


def _proof(secret: bytes, protocol: bytes, side: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(secret, protocol + side + first + second, "sha256")


def prepare(connection: socket.socket) -> None:
    """Enable TCP keep-alive: a connection waits without a limit, except for a host that is gone."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def send(connection: socket.socket, fields: Sequence[bytes]) -> None:
    """Send a message.

    Raises:
        ValueError: it is too long.
        OSError: the connection was lost.
    """
    text = b"".join(_LENGTH.pack(len(field)) + field for field in fields)
    if len(text) > MAX_MESSAGE:
        raise ValueError(f"a message has {len(text):,} bytes; at most {MAX_MESSAGE:,} are sent")
    connection.sendall(_LENGTH.pack(len(text)) + text)


def receive(connection: socket.socket, most: int = MAX_MESSAGE, until: float | None = None) -> list[bytes]:
    """Return the fields of a message of at most ``most`` bytes, which has arrived ``until`` a time.

    Raises:
        ConnectionError: the connection was closed.
        OSError: the message is malformed, too long or too late.
    """
    (num_bytes,) = _LENGTH.unpack(read(connection, _LENGTH.size, until))
    if num_bytes > most:
        raise OSError(f"a message of {num_bytes:,} bytes")
    text, at = read(connection, num_bytes, until), 0
    fields: list[bytes] = []
    while at < num_bytes and len(fields) < _MAX_FIELDS:
        if num_bytes - at < _LENGTH.size:
            raise OSError("a malformed message")
        (length,) = _LENGTH.unpack_from(text, at)
        at += _LENGTH.size
        fields.append(text[at : at + length])
        at += length
    if at != num_bytes or not fields:
        raise OSError("a malformed message")
    return fields


def read(connection: socket.socket, num_bytes: int, until: float | None = None) -> bytes:
    """Return exactly so many bytes.

    Raises:
        ConnectionError: the connection was closed.
        OSError: they are late.
    """
    text = bytearray()
    while len(text) < num_bytes:
        if until is not None:
            connection.settimeout(max(until - time.monotonic(), 0.001))
        part = connection.recv(num_bytes - len(text))
        if not part:
            raise ConnectionError("the connection was closed")
        text += part
    return bytes(text)
