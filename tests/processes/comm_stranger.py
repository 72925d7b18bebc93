"""Implements the wire protocol from its description, for strangers and for peers that send garbage."""

from __future__ import annotations

import hashlib
import hmac
import os
import random
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Self

MARK = b"SHOAL\0\0\3"
FRAME_MAGIC = 0x324C4853
HEADER_BYTES = 120
TIMEOUT_S = 10.0
IDENTITY_BYTES = 168
PUSH, RESULT, SUPPLY, HEARTBEAT, ORDER, SERVER_DOWN, ANNOUNCE, TELL, FAIL, GOODBYE = range(10)
JOIN, LEAVE, OFFER, ACCEPT, PART, ROOM = range(11, 17)


def proof(secret: str, side: bytes, caller: bytes, listener: bytes, body: bytes = b"") -> bytes:
    return hmac.new(secret.encode(), side + caller + listener + body, hashlib.sha256).digest()


@dataclass(frozen=True, kw_only=True)
class Who:
    """Identifies a member of a group; each rank is on a host of its own unless ``host`` is given.

    ``process`` is the name of the process that it pretends to be.
    """

    group: str
    rank: int
    size: int
    host: int | None = None
    process: str = ""

    @property
    def name(self) -> str:
        return self.process or f"stranger {self.rank} of {self.group}"[:128]

    def join(self) -> bytes:
        """Return the frame with which it joins the group."""
        host = self.rank if self.host is None else self.host
        payload = struct.pack("<4i", self.rank, self.size, host, self.size) + self.group.encode()
        return self.encode(Frame(type=JOIN, payload=payload))

    def encode(self, frame: Frame) -> bytes:
        """Return the frame as one of the group's."""
        return replace(frame, group=group_number(self.group)).encode()


def group_number(group: str) -> int:
    return crc32c(group.encode())


def identity(secret: str, caller: bytes, listener: bytes, name: str) -> bytes:
    body = name.encode().ljust(128, b"\0") + struct.pack("<2I", len(name.encode()), 0)
    return body + proof(secret, b"caller", caller, listener, body)


def dial(address: str, port: int, source: str = "") -> socket.socket:
    return socket.create_connection((address, port), TIMEOUT_S, (source, 0) if source else None)


def prove(address: str, port: int, secret: str, who: Who, source: str = "") -> tuple[socket.socket, bool]:
    """Return a connection that knows the secret, and whether it is let in as one for data of the process."""
    connection = dial(address, port, source)
    caller = os.urandom(16)
    connection.sendall(MARK + caller)
    challenge = receive(connection, 48)
    listener, answer = challenge[:16], challenge[16:]
    assert answer == proof(secret, b"listener", caller, listener)
    connection.sendall(identity(secret, caller, listener, who.name))
    return connection, receive(connection, 1) == b"\1"


def join(address: str, port: int, secret: str, who: Who) -> socket.socket:
    """Return a connection that is let in as one of the rank's process, which joins."""
    connection, is_in = prove(address, port, secret, who)
    assert is_in
    connection.sendall(who.join())
    return connection


@dataclass
class FakeHelper:
    """A helper that lets everybody in and only sends what the test has it send; a context manager."""

    secret: str
    name: str = "fake"
    address: str = "127.0.0.101"
    connections: list[socket.socket] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._listener = socket.create_server((self.address, 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._admit_all, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        for connection in self.connections:
            connection.close()

    def _admit_all(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                caller, listener = receive(connection, 24)[8:], os.urandom(16)
                connection.sendall(listener + proof(self.secret, b"listener", caller, listener))
                control = receive(connection, IDENTITY_BYTES)[132]
                connection.sendall(b"\1")
                if control:
                    self._answer_join(connection)
                self.connections.append(connection)

    def _answer_join(self, connection: socket.socket) -> None:
        """Let the process join: send back what it says."""
        head = receive(connection, HEADER_BYTES)
        (size,) = struct.unpack_from("<I", head, HEADER_BYTES - 16)
        connection.sendall(head + receive(connection, size))

    def send(self, frame: Frame, group: str) -> None:
        """Send a frame of a group over every connection."""
        for connection in self.connections:
            with suppress(OSError):
                connection.sendall(replace(frame, group=group_number(group)).encode())


def receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise EOFError(f"{len(data)} of {count} bytes")
        data += more
    return data


def hears_the_end(connection: socket.socket) -> bool:
    """Return whether the other side closes the connection within the timeout."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


# ---- frames -----------------------------------------------------------------------------------------------


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _table()


def crc32c(data: bytes) -> int:
    value = 0xFFFFFFFF
    for byte in data:
        value = (value >> 8) ^ _TABLE[(value ^ byte) & 0xFF]
    return value ^ 0xFFFFFFFF


@dataclass
class Frame:
    """The words of a frame's header; ``payload_bytes`` and the checksums are right unless they are given."""

    type: int = PUSH
    kind: int = 0
    element: int = 0
    input: int = 0
    combine: int = 0
    redo: int = 0
    host: int = 0
    needed: int = 2
    divisor: int = 2
    root: int = 0
    seq: int = 1 << 40
    chunk: int = 0
    signature: int = 1
    submitted: int = 0
    completed: int = 0
    payload: bytes = bytes(64)
    payload_bytes: int | None = None
    payload_crc: int | None = None
    server: int = 0
    group: int = 0
    header_crc: int | None = None
    magic: int = FRAME_MAGIC

    def encode(self) -> bytes:
        size = len(self.payload) if self.payload_bytes is None else self.payload_bytes
        crc = crc32c(self.payload) if self.payload_crc is None else self.payload_crc
        head = struct.pack(
            "<I6B3Hi3I6Q2I16s3I",
            self.magic,
            *(self.type, self.kind, self.element, self.input, self.combine, self.redo),
            *(self.host, self.needed, self.divisor, self.root, self.group, 0, self.server),
            *(self.seq, self.chunk, self.signature, self.submitted, self.completed, 0),
            *(0, 0, bytes(16), size, crc, 0),
        )
        return (
            head
            + struct.pack("<I", crc32c(head) if self.header_crc is None else self.header_crc)
            + self.payload
        )


def signature(*, kind: int = 0, element: int = 0, combine: int = 0, root: int = 0, count: int) -> int:
    """Return what tells a collective without a priority from others: FNV-1a over its words."""
    value = 0xCBF29CE484222325
    for word in (kind, element, combine, root, count, 0):
        for byte in word.to_bytes(8, "little"):
            value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    return value


_BITS = {
    **dict.fromkeys(("type", "kind", "element", "input", "combine", "redo"), 8),
    **dict.fromkeys(("host", "needed", "divisor"), 16),
    **dict.fromkeys(("seq", "chunk", "signature"), 64),
    **dict.fromkeys(("payload_bytes", "payload_crc", "header_crc", "magic"), 32),
}


def mutated(chance: random.Random, original: Frame) -> Frame:
    """Return a frame with some words changed, mostly to small values; its checksums fit, as a rule."""
    words = asdict(original)
    for word in chance.sample(sorted(_BITS), chance.randint(1, 3)):
        if word in ("payload_bytes", "payload_crc", "header_crc", "magic") and chance.random() < 0.7:
            continue
        bits = _BITS[word] if chance.random() < 0.3 else 3
        words[word] = chance.getrandbits(bits)
    words["payload"] = chance.randbytes(chance.choice([0, 1, 64, 100, 4096]))
    return Frame(**words)


# ---- strangers -------------------------------------------------------------------------------------------


def intrude(chance: random.Random, address: str, port: int, *, group: str, secret: str) -> bool:
    """Try to get in without knowing the secret; return whether anything was sent. Fails if it is let in."""
    kind = chance.choice(["silent", "noise", "frame", "half", "long", "wrong secret", "flipped"])
    with suppress(ConnectionError), dial(address, port) as connection:
        if kind == "silent":
            return False
        if kind == "noise":
            connection.sendall(chance.randbytes(chance.randint(1, 2000)))
        elif kind == "frame":
            connection.sendall(mutated(chance, Frame()).encode())
        elif kind == "half":
            connection.sendall((MARK + os.urandom(16))[: chance.randint(1, 24)])
        elif kind == "long":
            connection.sendall(MARK + os.urandom(16) + chance.randbytes(1 << 18))
            assert hears_the_end(connection)
        else:
            caller = os.urandom(16)
            connection.sendall(MARK + caller)
            listener = receive(connection, 48)[:16]
            given = "a guess" if kind == "wrong secret" else secret
            words = bytearray(identity(given, caller, listener, Who(group=group, rank=1, size=2).name))
            if kind == "flipped":
                words[chance.randrange(len(words))] ^= 1 << chance.randrange(8)
            connection.sendall(words)
            assert hears_the_end(connection), f"a stranger was let in: {kind}"
    return True
