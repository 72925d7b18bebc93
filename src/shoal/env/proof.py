"""Proves over a connection that both ends know the job's secret, and limits what strangers can take.

1. The client sends the name of its protocol and a random number, and their HMAC-SHA256 under the secret. A
   stranger is cut here.
2. The server answers with a random number of its own, and the HMAC of both.
3. The client answers with another HMAC of them, which shows that it has not repeated another's first message.
   The secret is not sent, and a proof of one protocol or side is none of another.

Before its proof a connection may send 256 bytes, in 10 s altogether. 256 connections may be in this state at
once: with one more the oldest is closed, whose process tries again if it is one of the job. One thread serves
all of them.

A message is its length and its fields, each with its length, as unsigned 32-bit numbers in network order.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class _Newcomer:
    """A connection before its proof."""

    connection: socket.socket
    until: float
    received: bytearray = field(default_factory=bytearray)
    num_used: int = 0
    """bytes of earlier messages"""
    numbers: bytes = b""
    """the server's random number and the client's, once that one has come"""


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
        self._num_proved = 0
        self._unproved: dict[int, _Newcomer] = {}
        """By file descriptor, the oldest first; of the listening thread alone."""
        self._poll = select.epoll()
        self._poll.register(listener.fileno(), select.EPOLLIN)
        listener.setblocking(False)
        self._thread = threading.Thread(target=self._listen, name=protocol.decode(), daemon=True)

    def start(self) -> None:
        """Accept connections, in a thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self.is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes it
        if not self._thread.ident:
            self._close()

    def _close(self) -> None:
        while self._unproved:
            self._forget(next(iter(self._unproved)))
        self._poll.close()
        self._socket.close()

    def _listen(self) -> None:
        listens_at = self._socket.fileno()
        while not self.is_closed:
            for number, _ in self._poll.poll(self._seconds_left()):
                if number == listens_at:
                    self._accept()
                elif number in self._unproved:
                    self._hear(number)
            while self._seconds_left() == 0:
                self._forget(next(iter(self._unproved)))
        self._close()

    def _seconds_left(self) -> float | None:
        """Return the seconds until the oldest newcomer is late; ``None``: there is none."""
        for oldest in self._unproved.values():
            return max(oldest.until - time.monotonic(), 0.0)
        return None

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except BlockingIOError:  # it is gone
            return
        except OSError:
            if not self.is_closed:
                time.sleep(_RETRY_S)  # too many open files
            return
        if self._num_proved + len(self._unproved) >= MAX_CONNECTIONS:
            connection.close()
            return
        if len(self._unproved) >= MAX_UNPROVED:
            self._forget(next(iter(self._unproved)))
        number = connection.fileno()
        self._unproved[number] = _Newcomer(connection, time.monotonic() + GREETING_S)
        self._hear(number)
        if number in self._unproved:
            self._poll.register(number, select.EPOLLIN)

    def _forget(self, number: int) -> None:
        self._unproved.pop(number).connection.close()

    def _hear(self, number: int) -> None:
        """Read what a newcomer has sent, and answer or drop it."""
        newcomer = self._unproved[number]
        try:
            most = _MAX_GREETING - newcomer.num_used - len(newcomer.received)
            newcomer.received += (part := newcomer.connection.recv(most, socket.MSG_DONTWAIT))
            fields = _whole(newcomer.received, _MAX_GREETING - newcomer.num_used) if part else []
        except BlockingIOError:
            return
        except OSError:
            fields = []
        if fields is None:
            return
        newcomer.num_used += len(newcomer.received)
        newcomer.received.clear()
        try:
            if not newcomer.numbers:
                if not self._is_of_the_job(newcomer, fields):
                    self._forget(number)
            elif hmac.compare_digest(b"".join(fields), self._proof(b"client", newcomer.numbers)):
                self._admit(number)
            else:
                self._forget(number)
        except OSError:  # it does not read
            self._forget(number)

    def _is_of_the_job(self, newcomer: _Newcomer, fields: list[bytes]) -> bool:
        """Return whether a first message comes from one that knows the secret; answer it."""
        if len(fields) != 3:
            return False
        protocol, theirs, proof = fields
        if (
            protocol != self._protocol
            or len(theirs) != _NONCE_BYTES
            or not hmac.compare_digest(proof, self._proof(b"hello", theirs))
        ):
            send(newcomer.connection, [b"refused", self._protocol, b"secret" if self._secret else b"open"])
            return False
        ours = secrets.token_bytes(_NONCE_BYTES)
        newcomer.numbers = ours + theirs
        send(newcomer.connection, [self._protocol, ours, self._proof(b"server", newcomer.numbers)])
        return True

    def _proof(self, side: bytes, numbers: bytes) -> bytes:
        return _proof(self._secret, self._protocol, side, numbers)

    def _admit(self, number: int) -> None:
        connection = self._unproved.pop(number).connection
        self._poll.unregister(number)
        with self._lock:
            self._num_proved += 1
        threading.Thread(target=self._run, args=(connection,), daemon=True).start()

    def _run(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError, ValueError):
                prepare(connection)
                send(connection, [b"ok"])
                self._serve(connection)
        finally:
            with self._lock:
                self._num_proved -= 1


def prove(connection: socket.socket, protocol: bytes, secret: bytes | None, until: float) -> None:
    """Prove to a :class:`ProvedListener` that this process knows the secret, and let it prove the same.

    Args:
        until: time of ``time.monotonic`` at which this ends.

    Raises:
        NotProved: it is not of the job.
        OSError: it was closed, is late, or sent no greeting.
    """
    ours = secrets.token_bytes(_NONCE_BYTES)
    send(connection, [protocol, ours, _proof(secret, protocol, b"hello", ours)])
    answer = receive(connection, _MAX_GREETING, until)
    if len(answer) != 3 or protocol not in answer[:2]:
        raise NotProved("program")
    if answer[0] == b"refused":
        raise NotProved("secret" if (answer[2] == b"secret") == (secret is not None) else "given")
    numbers = answer[1] + ours
    if not hmac.compare_digest(answer[2], _proof(secret, protocol, b"server", numbers)):
        raise NotProved("secret")
    send(connection, [_proof(secret, protocol, b"client", numbers)])
    if receive(connection, _MAX_GREETING, until) != [b"ok"]:
        raise NotProved("secret")


def _proof(secret: bytes | None, protocol: bytes, side: bytes, numbers: bytes) -> bytes:
    return hmac.digest(secret, protocol + side + numbers, "sha256") if secret else b""


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
    return _fields(read(connection, num_bytes, until))


def _fields(text: bytes) -> list[bytes]:
    """Return the fields of a message without its length; raise ``OSError`` for a malformed one."""
    at = 0
    fields: list[bytes] = []
    while at < len(text) and len(fields) < _MAX_FIELDS:
        if len(text) - at < _LENGTH.size:
            raise OSError("a malformed message")
        (length,) = _LENGTH.unpack_from(text, at)
        at += _LENGTH.size
        fields.append(text[at : at + length])
        at += length
    if at != len(text) or not fields:
        raise OSError("a malformed message")
    return fields


def _whole(received: bytearray, most: int) -> list[bytes] | None:
    """Return the fields of a message once all of it has been received; raise ``OSError`` for a wrong one."""
    if len(received) < _LENGTH.size:
        return None
    (num_bytes,) = _LENGTH.unpack_from(received)
    if _LENGTH.size + num_bytes > most or len(received) > _LENGTH.size + num_bytes:
        raise OSError(f"a message of {num_bytes:,} bytes")
    if len(received) < _LENGTH.size + num_bytes:
        return None
    return _fields(bytes(received[_LENGTH.size :]))


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
