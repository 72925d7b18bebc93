"""Implements the wire protocol from its description, for strangers and for peers that send garbage."""

from __future__ import annotations

import hashlib
import hmac
import os
import random
import socket
import struct
import threading
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Self

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

MARK = b"SHOAL\0\0\4"
FRAME_MAGIC = 0x334C4853
HEADER_BYTES = 128
PAYLOAD_BYTES_AT = 92
TIMEOUT_S = 10.0
HELLO_BYTES, CHALLENGE_BYTES, IDENTITY_BYTES, WELCOME_BYTES = 40, 144, 216, 17
CHECKSUM, TAG, ENCRYPT = range(3)
PUSH, RESULT, SUPPLY, HEARTBEAT, ORDER, SERVER_DOWN, ANNOUNCE, TELL, FAIL, GOODBYE = range(10)
JOIN, LEAVE, OFFER, ACCEPT, PART, ROOM = range(11, 17)


def private_key(rank: int) -> bytes:
    """Return the private key of a rank's process in tests, so that they can lie as this process."""
    return hashlib.sha256(b"the key of rank %d" % rank).digest()


@cache
def mark_of(rank: int) -> bytes:
    """Return what stands for the key of a rank where it joins."""
    return public_key(private_key(rank))[:16]


def public_key(own: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(own).public_key().public_bytes_raw()


@dataclass
class Transcript:
    """The messages of a handshake so far, without their HMACs; and the keys that follow from them."""

    secret: str
    own: bytes
    said: bytes = b""

    def signed(self, side: bytes, message: bytes, mac_bytes: int = 32) -> bytes:
        self.said += message
        mac = hmac.new(self.secret.encode(), side + self.said, hashlib.sha256).digest()
        return message + mac[:mac_bytes]

    def keys(self, other: bytes) -> list[bytes]:
        """Return those of the caller's frames, of the listener's, and the confirmations of both."""
        own = X25519PrivateKey.from_private_bytes(self.own)
        common = own.exchange(X25519PublicKey.from_public_bytes(other))
        info = b"shoal session" + hashlib.sha256(self.said).digest()
        derived = HKDF(SHA256(), 64, self.secret.encode(), info).derive(common)
        return [derived[at : at + 16] for at in range(0, 64, 16)]


@dataclass
class Seal:
    """Protects the frames that one side of a connection sends."""

    protection: int
    key: bytes
    number: int = 0

    def close(self, frame: bytes) -> bytes:
        """Return a frame that has checksums with what the connection wants instead."""
        if self.protection == CHECKSUM:
            return frame
        head, payload = frame[: HEADER_BYTES - 32], frame[HEADER_BYTES:]
        gcm, number = AESGCM(self.key), struct.pack("<Q", self.number)
        self.number += 1
        nonce, tag = number + bytes(4), bytes(16)
        if payload and self.protection == ENCRYPT:
            sealed = gcm.encrypt(nonce, payload, b"")
            payload, tag = sealed[:-16], sealed[-16:]
        elif payload:
            tag = gcm.encrypt(nonce, b"", payload)
        head += tag
        return head + gcm.encrypt(number + b"\1" + bytes(3), b"", head) + payload


@dataclass(frozen=True, kw_only=True)
class Who:
    """Identifies a member of a group; each rank is on a host of its own unless ``host`` is given.

    ``process`` is the name of the process that it pretends to be, and ``own`` its private key (default: the
    rank's). ``marks`` are those of all ranks' keys (default: the keys of ranks in tests).
    """

    group: str
    rank: int
    size: int
    host: int | None = None
    process: str = ""
    own: bytes = b""
    marks: tuple[bytes, ...] = ()

    @property
    def key(self) -> bytes:
        return self.own or private_key(self.rank)

    @property
    def name(self) -> str:
        return self.process or f"stranger {self.rank} of {self.group}"[:128]

    def join(self) -> bytes:
        """Return the frame with which it joins the group."""
        host = self.rank if self.host is None else self.host
        payload = struct.pack("<5i", self.rank, self.size, host, self.size, len(self.group.encode()))
        payload += self.group.encode() + b"".join(self.marks or map(mark_of, range(self.size)))
        return self.encode(Frame(type=JOIN, payload=payload))

    def encode(self, frame: Frame) -> bytes:
        """Return the frame as one of the group's."""
        return replace(frame, group=group_number(self.group)).encode()


def group_number(group: str) -> int:
    return crc32c(group.encode())


def begin(secret: str, who: Who) -> tuple[Transcript, bytes]:
    """Return the first message of a caller, and what follows from it."""
    said = Transcript(secret, who.key)
    return said, said.signed(b"hello", MARK + os.urandom(16), 16)


def identity(said: Transcript, challenge: bytes, who: Who, protection: int) -> tuple[bytes, list[bytes]]:
    """Return a caller's answer to a challenge, and the keys."""
    assert said.signed(b"listener", challenge[:-32]) == challenge
    name = who.name.encode()
    body = name.ljust(128, b"\0") + struct.pack("<2I", len(name), protection << 8) + public_key(who.key)
    message = said.signed(b"caller", body)
    keys = said.keys(challenge[16:48])
    return message + keys[2], keys


def dial(address: str, port: int, source: str = "") -> socket.socket:
    return socket.create_connection((address, port), TIMEOUT_S, (source, 0) if source else None)


def prove(address: str, port: int, secret: str, who: Who, source: str = "") -> tuple[socket.socket, bool]:
    """Return a connection that knows the secret, and whether it is let in as one for data of the process."""
    connection, _, is_in = session(address, port, secret, who, source, CHECKSUM)
    return connection, is_in


def session(
    address: str, port: int, secret: str, who: Who, source: str = "", protection: int = TAG
) -> tuple[socket.socket, Seal, bool]:
    """Return such a connection, what seals its frames, and whether it is let in."""
    with ExitStack() as unless_let_in:
        connection = unless_let_in.enter_context(dial(address, port, source))
        said, hello = begin(secret, who)
        connection.sendall(hello)
        message, keys = identity(said, receive(connection, CHALLENGE_BYTES), who, protection)
        connection.sendall(message)
        welcome = receive(connection, WELCOME_BYTES)
        assert welcome in (b"\1" + keys[3], bytes(WELCOME_BYTES))
        unless_let_in.pop_all()
    return connection, Seal(protection, keys[0]), welcome[0] == 1


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
    connections: list[tuple[socket.socket, Seal]] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._listener = socket.create_server((self.address, 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._admit_all, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        for connection, _ in self.connections:
            connection.close()

    def _admit_all(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                said = Transcript(self.secret, private_key(-1))
                said.signed(b"hello", receive(connection, HELLO_BYTES)[:-16])
                place = f"{self.address}:{self.port}".encode().ljust(64, b"\0")
                connection.sendall(said.signed(b"listener", os.urandom(16) + public_key(said.own) + place))
                body = receive(connection, IDENTITY_BYTES)[:168]
                said.signed(b"caller", body)
                keys = said.keys(body[136:])
                connection.sendall(b"\1" + keys[3])
                seal = Seal(body[133], keys[1])
                if body[132]:
                    self._answer_join(connection, seal)
                self.connections.append((connection, seal))

    def _answer_join(self, connection: socket.socket, seal: Seal) -> None:
        """Let the process join: send back what it says."""
        head = receive(connection, HEADER_BYTES)
        (size,) = struct.unpack_from("<I", head, PAYLOAD_BYTES_AT)
        connection.sendall(seal.close(head + receive(connection, size)))

    def send(self, frame: Frame, group: str) -> None:
        """Send a frame of a group over every connection."""
        for connection, seal in self.connections:
            with suppress(OSError):
                connection.sendall(seal.close(replace(frame, group=group_number(group)).encode()))


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
            "<I6B3Hi3I6Q4I16s",
            self.magic,
            *(self.type, self.kind, self.element, self.input, self.combine, self.redo),
            *(self.host, self.needed, self.divisor, self.root, self.group, 0, self.server),
            *(self.seq, self.chunk, self.signature, self.submitted, self.completed, 0),
            *(0, 0, 0, size, struct.pack("<I12x", crc)),
        )
        own = crc32c(head) if self.header_crc is None else self.header_crc
        return head + struct.pack("<I12x", own) + self.payload


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
            connection.sendall((MARK + os.urandom(32))[: chance.randint(1, HELLO_BYTES)])
        elif kind == "long":
            connection.sendall(MARK + os.urandom(32) + chance.randbytes(1 << 18))
            assert hears_the_end(connection)
        else:
            who = Who(group=group, rank=1, size=2)
            said, hello = begin("a guess" if kind == "wrong secret" else secret, who)
            connection.sendall(hello)
            if kind == "flipped":  # somebody has heard a member's first message
                words = bytearray(identity(said, receive(connection, CHALLENGE_BYTES), who, CHECKSUM)[0])
                words[chance.randrange(len(words))] ^= 1 << chance.randrange(8)
                connection.sendall(words)
            assert hears_the_end(connection), f"a stranger was let in: {kind}"
    return True
