"""Reads shards from the hosts that keep them, so that storage is read once for the whole cluster.

Each host has a server of shards (:mod:`shoal.data.shard_server`). A shard has an owner among the hosts
(:mod:`shoal.decide.shard_owners`), whose server copies it from its storage once, however many hosts ask at a
time. If the owner does not answer, the next one in its place is asked, and then the storage.

A peer is believed nothing. Both ends of a connection prove that they know the job's secret
(:mod:`shoal.env.proof`), every length is checked, every wait has a limit, and the cache compares each shard
with the manifest's SHA-256 before it is used. A peer that fails is named, counted and left alone for a while.

Reads of shards wait while the host's workers exchange gradients (:mod:`shoal.data.precedence`).

A helper host may have such a server too (``shoal serve --cache-bytes``), at the port after that of its sums.
The first worker of a job tells it which data to keep.

After the proof a connection carries requests: the copy's name, the offset of the first byte and their number.
The answer is ``ok`` and ``ready`` or ``filling``, or ``no`` and the reason. Then come frames, each with its
length before it, as an unsigned 32-bit number: bytes of the shard, or a length of 0 while the server waits
for the storage, ``DONE``, or ``FAILED`` with a message. ``DONE`` comes when the copy is complete.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shoal.data.manifest import ShardFile
from shoal.data.precedence import Precedence
from shoal.decide.shard_owners import ranked_owners
from shoal.env import proof
from shoal.env.secret import job_secret
from shoal.env.settings import HelperAddress

PROTOCOL = b"shoal-shards-1"
FRAME = struct.Struct("!I")
WAITING, DONE, FAILED = 0, 0xFFFFFFFE, 0xFFFFFFFF
MAX_FRAME = 8 << 20
MAX_SETTINGS = 1 << 20
MAX_REASON = 256
_NUM_OWNERS = 2
"""Hosts that are asked for a shard: its owner, and the one that takes its place."""
_BUFFER_BYTES = 128 << 10
_IN_FLIGHT_BYTES = 128 << 10
"""Of a connection, and the kernel takes as many again: they still arrive when gradients take precedence."""
_REST_S = 60.0
"""Time for which a peer that failed is not asked."""
_FILLING_S, _LEAST_FILLING_RATE = 60.0, 64 << 10
"""Time for a shard that is being filled, and the rate at which its bytes get more: storage may be slow."""
_READY_S = 5.0
"""Time for a shard that a peer has, besides that of its bytes at the least rate."""
_MOST_DIGITS = 18
_HELPER_S, _KEEP_S = 5.0, 60.0
"""Times for the answer of a helper: with its size, and once it has read the manifest of the data."""
_MOST_HOLD_S = 600.0
"""Time for a copy of this host's own server, whose requests to the storage have a deadline of their own."""

Problem = Literal["does not answer", "is slow", "is not of this job", "sent wrong bytes", "refused"]


class PeerError(Exception):
    """Raised where a peer does not give a shard.

    Attributes:
        problem: kind of failure, for the counts.
        reason: details for a message.
    """

    def __init__(self, problem: Problem, reason: str) -> None:
        super().__init__(f"{problem}: {reason}")
        self.problem: Problem = problem
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A host with a server of shards."""

    name: str
    """Decides which shards it owns; the same at each start."""
    address: str
    port: int
    num_bytes: int
    """Size of its cache: it owns shards in proportion."""

    def __str__(self) -> str:
        return f"{self.name} ({self.address}:{self.port})"


@dataclass(frozen=True, kw_only=True)
class Peers:
    """The servers of shards of a job. Picklable; the job's secret is read where it is used."""

    hosts: tuple[Peer, ...]
    own: str
    """Name of this host among them."""
    stall_s: float = 5.0
    """Time without a byte after which a peer is given up."""
    least_rate: float = 1 << 20
    """Bytes per second below which a peer is given up that has the shard."""
    exchange: Path | None = None
    """Slots of this host's workers, for whose gradients reads wait (:mod:`shoal.data.precedence`)."""

    def owners(self, file: ShardFile) -> list[Peer]:
        """Return the hosts to ask for a file, in order."""
        by_name = {peer.name: peer for peer in self.hosts}
        weights = {peer.name: float(peer.num_bytes) for peer in self.hosts}
        return [by_name[name] for name in ranked_owners(file.copy_name, weights)[:_NUM_OWNERS]]

    def own_files(self, files: Iterable[ShardFile]) -> list[ShardFile]:
        """Return the files that this host owns."""
        return [file for file in files if [peer.name for peer in self.owners(file)[:1]] == [self.own]]


class PeerReader:
    """Asks peers for files of shards, and remembers those that failed. Threads may share it."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self.problems: Counter[tuple[str, str]] = Counter()
        """Number of failures by the peer's name and their kind."""
        self._resting_until: dict[str, float] = {}
        self._precedence = Precedence(peers.exchange)
        self._lock = threading.Lock()

    def usable(self, file: ShardFile) -> list[Peer]:
        """Return the hosts to ask for a file, in order, without those that failed a short time ago."""
        now = time.monotonic()
        return [peer for peer in self.peers.owners(file) if self._resting_until.get(peer.name, 0.0) <= now]

    def hold(self, peer: Peer, file: ShardFile) -> None:
        """Wait until a peer has a complete copy of a file.

        Raises:
            PeerError: it does not get one, or fails.
        """
        for _ in self._received(peer, file, 0, 0):
            pass

    def parts(self, peer: Peer, file: ShardFile) -> Iterator[memoryview]:
        """Yield the bytes of a file from a peer; each part is valid until the next.

        Raises:
            PeerError: it fails.
        """
        return self._received(peer, file, 0, file.num_bytes)

    def note(self, peer: Peer, error: PeerError) -> None:
        """Count a failure, leave the peer alone for a while, and report the first of its kind."""
        with self._lock:
            self.problems[peer.name, error.problem] += 1
            is_first = self.problems[peer.name, error.problem] == 1
            if error.problem != "refused":
                self._resting_until[peer.name] = time.monotonic() + _REST_S
        if is_first:
            sys.stderr.write(
                f"shards of host {peer}: it {error.problem} ({error.reason}); they are read from another "
                "host or from their storage\n"
            )

    def _received(self, peer: Peer, file: ShardFile, start: int, size: int) -> Iterator[memoryview]:
        asked = [b"get", file.copy_name.encode(), b"%d" % start, b"%d" % size]
        with _answered(peer.address, peer.port, asked, self.peers.stall_s) as (connection, answer):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _IN_FLIGHT_BYTES)
            yield from self._frames(connection, size, is_ready=answer == b"ready")

    def _frames(self, connection: socket.socket, size: int, *, is_ready: bool) -> Iterator[memoryview]:
        """Yield the bytes of frames, which have ``size`` together."""
        buffer = memoryview(bytearray(_BUFFER_BYTES))
        began, received = time.monotonic(), 0
        free_s, least = _FILLING_S if size else _MOST_HOLD_S, float(_LEAST_FILLING_RATE)
        if is_ready:
            free_s, least = _READY_S, self.peers.least_rate
        while True:
            (length,) = FRAME.unpack(self._read(connection, buffer[: FRAME.size]))
            if length == DONE:
                break
            if length == FAILED:
                (message, *_) = proof.receive(connection, MAX_REASON, time.monotonic() + self.peers.stall_s)
                raise PeerError("refused", _shown(message))
            if length > min(MAX_FRAME, size - received):
                raise PeerError("sent wrong bytes", f"a frame of {length:,} of {size - received:,} bytes")
            while length:
                began += self._precedence.wait()
                part = self._read(connection, buffer[:length])
                yield part
                length -= len(part)
                received += len(part)
            seconds = time.monotonic() - began
            if seconds > free_s + received / least:
                raise PeerError("is slow", f"{received:,} of {size:,} bytes in {seconds:.1f} s")
        if received != size:
            raise PeerError("sent wrong bytes", f"{received:,} of {size:,} bytes")

    def _read(self, connection: socket.socket, buffer: memoryview) -> memoryview:
        """Fill a buffer."""
        until, at = time.monotonic() + self.peers.stall_s, 0
        while at < len(buffer):
            connection.settimeout(max(until - time.monotonic(), 0.001))
            count = connection.recv_into(buffer[at:])
            if not count:
                raise ConnectionError("the connection was closed")
            at += count
        return buffer


def room_of(helper: HelperAddress) -> Peer | None:
    """Return the server of shards of a helper host; ``None`` if it has none.

    Raises:
        PeerError: it does not answer, or is not of this job.
    """
    address, port = helper.address, helper.port + 1
    try:
        with _answered(address, port, [b"room"], _HELPER_S) as (_, answer):
            if not answer.isdigit() or len(answer) > _MOST_DIGITS:
                raise PeerError("sent wrong bytes", f"{_shown(answer)} is not the size of its cache")
            return Peer(name=f"helper-{address}-{port}", address=address, port=port, num_bytes=int(answer))
    except PeerError as error:
        if isinstance(error.__cause__, ConnectionRefusedError):  # nobody listens there
            return None
        raise


def keep(helper: Peer, settings: Mapping[str, Any]) -> None:
    """Let a helper keep its part of the data that the settings name.

    Raises:
        PeerError: it cannot read them, or fails.
    """
    with _answered(helper.address, helper.port, [b"keep", json.dumps(settings).encode()], _KEEP_S):
        pass


@contextlib.contextmanager
def _answered(
    address: str, port: int, request: list[bytes], stall_s: float
) -> Iterator[tuple[socket.socket, bytes]]:
    """Send a request, and yield the connection and what follows ``ok`` in the answer.

    Raises:
        PeerError: the server refuses or fails, then or while the connection is used.
    """
    try:
        with socket.create_connection((address, port), timeout=stall_s) as connection:
            proof.prove(connection, PROTOCOL, job_secret(), time.monotonic() + stall_s)
            proof.send(connection, request)
            answer = proof.receive(connection, 2 * MAX_REASON, time.monotonic() + stall_s)
            if len(answer) != 2 or answer[0] != b"ok":
                raise PeerError("refused", _shown(answer[-1]))
            yield connection, answer[1]
    except proof.NotProved as stranger:
        reason = {"program": "another program", "given": "one has no secret", "secret": "another secret"}
        raise PeerError("is not of this job", reason[stranger.problem]) from None
    except TimeoutError:
        raise PeerError("does not answer", f"nothing came for {stall_s:g} s") from None
    except OSError as error:
        raise PeerError("does not answer", error.strerror or str(error)) from error


def _shown(message: bytes) -> str:
    """Return a peer's text for a line on the screen."""
    text = message[:MAX_REASON].decode(errors="replace")
    return "".join(letter if letter.isprintable() else "?" for letter in text)
