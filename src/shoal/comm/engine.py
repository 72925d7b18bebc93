"""Submits collectives on raw memory to the engine of a group, and waits for them with a deadline.

:class:`Operation` is a collective from the process group to the core. :class:`Engine` passes it to the C++
engine (``csrc/engine``), and :class:`SingleProcessEngine` to that of a group of one rank; the rest of the
package calls the methods of their base, :class:`CollectiveEngine`. Independent of torch.
"""

from __future__ import annotations

import atexit
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any
from weakref import WeakSet

from shoal import native
from shoal.env.machine import cores_per_worker
from shoal.errors import ShoalError, UsageError

_FABRIC = "ofi:"
_MAX_BYTES = 1 << 40
_UNINTERRUPTED_S = 0.5  # a wait in C++ returns to Python this often, for signals
_Range = tuple[float, float, int]
_RANGES: dict[str, _Range] = {
    "target_rtt_s": (1e-6, 3600.0, 0),
    "unexpected_bytes": (0, _MAX_BYTES, 1),
    "send_buffer_bytes": (0, 1 << 30, 1),
    "peer_grace_s": (0.0, 86400.0, 0),
    "straggler_s": (0.0, 86400.0, 0),
    "helper_patience_s": (0.0, 86400.0, 0),
    "staging_bytes": (1, _MAX_BYTES, 1),
    "staging_buffers": (2, 4096, 1),
}
"""Minimum and maximum of numbers of :class:`EngineOptions`, and the number that divides them; 0 for any."""
_AUTOMATIC = ("connections_per_peer", "network_threads")
"""Options for which 0 chooses a number before the core gets it."""


@cache
def _ranges() -> dict[str, _Range]:
    """Return the ranges of all numbers; the core, where it is built, has those that it checks."""
    of_core = native.core().option_ranges() if native.is_built() else []
    return _RANGES | {
        name: (0 if name in _AUTOMATIC else least, most, unit) for name, least, most, unit in of_core
    }


def fabric_providers(transport: str | None) -> str:
    """Return the libfabric providers of :attr:`EngineOptions.transport`; an empty string means TCP.

    Raises:
        UsageError: the transport is neither.
    """
    if transport is None or transport == "tcp":
        return ""
    providers = transport.removeprefix(_FABRIC)
    if not transport.startswith(_FABRIC) or not all(
        each.strip() == each != "" for each in providers.split(",")
    ):
        raise UsageError(
            f"transport {transport!r} is not known; it is tcp, or ofi: and libfabric's providers separated "
            "by commas, as in ofi:efa or ofi:tcp;ofi_rxm; `shoal doctor` lists those that can be used here"
        )
    return providers


def threads_for(num_cores: int) -> int:
    """Return the number of network threads of a process with so many cores: one for 8 of them, 1 to 4.

    Example:

        >>> [threads_for(num_cores) for num_cores in (2, 16, 64)]
        [1, 2, 4]
    """
    return min(max(num_cores // 8, 1), 4)


class CommError(ShoalError):
    """The group has failed: a peer was lost, a deadline passed, or ranks issued different collectives."""


PROTECTIONS = ("checksum", "tag", "encrypt")
"""Values of :attr:`EngineOptions.protection`."""
DEFAULT_PROTECTION = "tag"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Location of a rank.

    Attributes:
        host: ranks with the same string share memory.
        address: address (IPv4 or IPv6) on which its engine listens; several, separated by commas.
        port: port on which its engine listens.
        global_rank: its rank in the whole job, for messages.
        pid: its process id; with address and port it names the process.
        key: the public key of the process, 32 bytes as hexadecimal digits; empty: not known.
    """

    host: str
    address: str
    port: int
    global_rank: int
    pid: int
    key: str = ""

    def words(self) -> tuple[str, str, int, int, int, bytes]:
        """Return it as the core takes it."""
        return self.host, self.address, self.port, self.global_rank, self.pid, bytes.fromhex(self.key)


@dataclass(frozen=True, kw_only=True)
class Helper:
    """Location of a helper host's server, and its public key, as :attr:`Peer.key`."""

    address: str
    port: int
    name: str
    key: str = ""

    def words(self) -> tuple[str, int, str, bytes]:
        """Return it as the core takes it."""
        return self.address, self.port, self.name, bytes.fromhex(self.key)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Tuning options of a group, the same on all ranks. The defaults suit hosts with 1 to 25 Gbit/s.

    Raises:
        UsageError: a value is out of its range, or a name is unknown.

    Example:

        >>> EngineOptions(chunk_bytes=64 << 10, transport="ofi:efa").chunk_bytes
        65536

    Attributes:
        chunk_bytes: largest message between hosts; a multiple of 128, at most 8 MiB. 0: 32 KiB, or with more
            than 8 hosts a share of 256 KiB; over TCP up to 256 KiB for large operations of at most 8 hosts
            with one rank each.
        shared_chunk_bytes: largest chunk inside a host; small enough for the caches.
        num_slots: chunks of each rank in flight in shared memory, 1 to 64.
        min_window_bytes: minimum of the flow-control window (bytes in flight), per connection for data. 0: 32
            KiB, and with more than 8 hosts a share of 256 KiB, so that they fit the queue of a server's link.
        window_bytes: maximum of the window, for all servers together; bounds a server's memory.
        target_rtt_s: round-trip time of a chunk to which the window adapts; longer ones mean full queues.
            More than that of the links without load.
        unexpected_bytes: maximum bytes sent to a rank that has not begun the operation.
        connections_per_peer: TCP connections for data per peer; clouds limit the rate of one. 0: four where
            links are measured and four are faster, else one. Links are measured where there are helpers whose
            bandwidths are not given.
        network_threads: threads of a process that read and write its TCP connections, of which there are at
            least as many for data per peer. One with several interfaces, or with libfabric. 0:
            SHOAL_NETWORK_THREADS if set, else one for 8 cores of a worker, at most 4, over
            ``connections_per_peer`` connections.
        send_buffer_bytes: kernel send buffer of a connection; small ones keep flows fair, 0 is the system's.
        peer_grace_s: silence after which a host counts as lost.
        straggler_s: wait after which an operation's missing ranks are logged.
        helper_patience_s: silence after which a helper that an operation waits for counts as lost, though its
            host answers; 0: never. A helper with the only copy of weights is waited for.
        partial_dtype: dtype in which 16-bit tensors' partial sums leave a host: "float32", or "input" for 16
            bits.
        workers_serve: whether workers take over chunks of a lost helper.
        order: "host" adds inside each host first. "rank" adds in rank order for any placement, and sends each
            rank's tensor over the network for it.
        transport: "tcp", or "ofi:" and libfabric's providers, one per rail, separated by commas: "ofi:efa",
            "ofi:tcp;ofi_rxm,tcp;ofi_rxm". ``None``: SHOAL_TRANSPORT if set, else TCP.
        staging_bytes: largest part of a CUDA tensor that is copied to the host, reduced and copied back at a
            time. Smaller tensors are copied in parts of a quarter, of at least 1 MiB.
        staging_buffers: pinned host buffers of that size, per group and device.
        protection: of messages between processes. "checksum" finds damage. "tag" authenticates each one with
            a key of the connection (GMAC): nobody without it can change, repeat, reorder or insert any.
            "encrypt" keeps their contents secret too (AES-GCM); over TCP only. ``None``: "encrypt" if
            SHOAL_ENCRYPT is 1, else "tag".
        ordered_callbacks: whether a collective waits until callbacks of earlier ones have returned. Needed if
            callbacks and the program issue collectives concurrently, as PowerSGD's with several buckets.
    """

    chunk_bytes: int = 0
    shared_chunk_bytes: int = 128 << 10
    num_slots: int = 16
    min_window_bytes: int = 0
    window_bytes: int = 8 << 20
    target_rtt_s: float = 0.01
    unexpected_bytes: int = 1 << 20
    connections_per_peer: int = 0
    network_threads: int = 0
    send_buffer_bytes: int = 128 << 10
    peer_grace_s: float = 2.0
    straggler_s: float = 1.0
    helper_patience_s: float = 20.0
    partial_dtype: str = "float32"
    workers_serve: bool = True
    order: str = "host"
    transport: str | None = None
    protection: str | None = None
    staging_bytes: int = 4 << 20
    staging_buffers: int = 8
    ordered_callbacks: bool = False

    def __post_init__(self) -> None:
        for name, value, known in (
            ("partial_dtype", self.partial_dtype, ("float32", "input")),
            ("order", self.order, ("host", "rank")),
        ):
            if value not in known:
                raise UsageError(f"EngineOptions.{name} is {value!r}; it is {known[0]!r} or {known[1]!r}")
        for name, (least, most, unit) in _ranges().items():
            number = getattr(self, name)
            if not least <= number <= most or (unit and number % unit):
                multiple = f" and a multiple of {unit}" if unit and unit > 1 else ""
                raise UsageError(f"EngineOptions.{name} is {number}; it is from {least} to {most}{multiple}")
        if self.protection not in (None, *PROTECTIONS):
            raise UsageError(
                f"EngineOptions.protection is {self.protection!r}; it is one of {', '.join(PROTECTIONS)}"
            )
        if fabric_providers(self.transport) and self.protection == "encrypt":
            raise UsageError(
                f"EngineOptions.protection is 'encrypt', but transport {self.transport} does not encrypt; "
                "use transport tcp"
            )


SERVED_KINDS = (
    *("configure", "load", "dump", "update", "collect", "measure", "factor", "normalise", "apply"),
)
"""Of operations on weights that servers keep."""
MESSAGE_KINDS = ("all_to_all", "gather", "scatter", "send", "recv")
"""Of operations that consist of messages."""


@dataclass(kw_only=True, slots=True)
class Operation:
    """A collective, as one rank submits it. The core reads the fields up to ``source_rank``.

    Attributes:
        kind: all_reduce, reduce, broadcast, all_gather, reduce_scatter, barrier, all_to_all, gather, scatter;
            send and recv, which concern two ranks only; or delegated (announced to the other ranks, but moves
            no data).
        input: address of the elements, which must stay valid until the operation completes.
        output: address for the result; may equal ``input``.
        count: number of elements of the tensor; of the input for all_gather, of the output for
            reduce_scatter.
        dtype: float32, float64, float16, bfloat16, int8, uint8, int32 or int64.
        op: sum, avg, prod, min, max, band, bor or bxor; for a delegated operation, its name.
        root: source rank of a broadcast or scatter, destination rank of a reduce or gather; the other rank of
            a message, -1 to receive from any.
        shape: for messages.
        timeout_s: the operation's deadline; 0 for none, or for that of the process group.
        priority: of an all_reduce. Operations with priority 0 are sent in call order, before all others. The
            others are sent by descending priority, in an order that rank 0 sets for all ranks. All ranks give
            a priority, or none does. The bits of the result do not depend on it.
        inputs: address and number of elements for each rank, of an all_to_all and of a scatter's root.
        outputs: the same, of an all_to_all and of a gather's root.
        tag: of a message; a receive takes those of its tag.
        source_rank: of a receive, address of the int32 that gets the number of the rank that has sent.
        served: table, step, rule and place of an operation on weights that servers keep: configure, load,
            dump, update, collect, measure, factor, normalise and apply (``csrc/engine/served_weights.h``),
            which are made by ``train.servers.tensors``. Of weights on a device, ``source`` and ``target`` are
            what is copied from there and to there, and ``input`` and ``output`` the other side's memory of
            the host.
        weights: dtype in which an update or an apply answers: float32 or bfloat16.
        columns: of a matrix whose second moment is factored; else 0.
        copied: whether ranks have a second copy of the weights that helpers keep.
        text: names the options of a configure, for messages.
        memory: tensors at the addresses, where ``source`` and ``target`` are not given.
        source: tensor at ``input``, flat and contiguous.
        target: tensor at ``output``, flat and contiguous.
        result: value of the work's future.
        finish: completes the result after the engine has written ``output``.
    """

    kind: str
    input: int = 0
    output: int = 0
    count: int = 0
    dtype: str = "uint8"
    op: str = "sum"
    root: int = 0
    shape: Sequence[int] = ()
    timeout_s: float = 0.0
    priority: int = 0
    inputs: Sequence[tuple[int, int]] = ()
    outputs: Sequence[tuple[int, int]] = ()
    tag: int = 0
    source_rank: int = 0
    served: tuple[int, int, int, int] = (0, 0, 0, 0)
    weights: str = "float32"
    columns: int = 0
    copied: bool = False
    text: str = ""
    memory: Any = None
    source: Any = None
    target: Any = None
    result: Any = None
    finish: Callable[[], None] | None = None

    @property
    def is_served(self) -> bool:
        """True for operations on weights that servers keep."""
        return self.kind in SERVED_KINDS

    @property
    def is_by_messages(self) -> bool:
        """True for operations that consist of messages between two ranks each (``comm.messages``)."""
        return self.kind in MESSAGE_KINDS

    @property
    def name(self) -> str:
        """Name of the operation in counters and messages."""
        return self.op if self.kind == "delegated" else self.kind


class CollectiveEngine:
    """One rank's membership in a group: operations that have the same number on all ranks.

    Attributes:
        shares: ``ServerShares`` of the group (``comm.server_shares``); ``None`` within one host.
        peers: locations of the ranks; empty for one rank alone, and before they are known.
    """

    def __init__(self, core: Any) -> None:
        self._engine = core
        self.peers: list[Peer] = []
        self.shares: Any = None

    @property
    def core(self) -> Any:
        """Return the engine of the C++ core."""
        return self._engine

    def submit(self, operation: Operation) -> int:
        """Begin an operation and return its handle, its number in the group. Never waits for peers.

        With ``ordered_callbacks``, a collective of the program waits until earlier callbacks have returned.

        Raises:
            CommError: the group has failed, or callbacks did not return within the operation's time.
            UsageError: a callback begins a collective after the program has begun others.
            ValueError: a name is unknown, or the dtype does not support the operation.
        """
        handle: int = self._engine.submit(operation)
        return handle

    def finish_delegated(self, handle: int) -> None:
        """Complete a delegated operation on this rank."""
        self._engine.finish_delegated(handle)

    def wait(self, handle: int, timeout_s: float | None = None) -> bool:
        """Wait for an operation; return ``False`` if it has not completed after ``timeout_s``.

        Signals are handled meanwhile: Ctrl-C raises ``KeyboardInterrupt``.

        Raises:
            CommError: the operation failed.
        """
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._engine.wait(handle, min(_UNINTERRUPTED_S, max(until - time.monotonic(), 0.0))):
            if time.monotonic() >= until:
                return False
        return True

    def is_done(self, handle: int) -> bool:
        """Return whether the operation has completed or failed."""
        return bool(self._engine.is_done(handle))

    def then(self, handle: int, function: Callable[[], None]) -> None:
        """Call a function once the operation has ended, or the group is closed.

        Functions are called one at a time, in the order of their operations, on threads of the engine
        (``csrc/engine/completer.h``). They may submit operations and wait for any of the group.
        """
        self._engine.then(handle, function)

    @property
    def num_submitted(self) -> int:
        """Number of collectives begun; messages do not count."""
        return int(self._engine.num_submitted)

    def error(self) -> str | None:
        """Return the reason for which the group has failed, if it has."""
        return self._engine.error() or None

    def lost_ranks(self) -> list[int]:
        """Return the ranks that were lost, in the order of the losses, also after the group has failed."""
        return []

    def abort(self, reason: str) -> None:
        """Fail the group here and on all peers; pending waits raise this reason."""
        self._engine.abort(reason)

    def close(self) -> None:
        """Leave the group. Peers are not affected unless they wait for this rank."""
        self._engine.close()

    def counters(self) -> dict[str, int]:
        """Return bytes, frames, and operations by kind, since construction."""
        return dict(self._engine.counters())

    def take_events(self) -> list[str]:
        """Return the log messages since the last call: stragglers, lost helpers."""
        return list(self._engine.take_events())

    def c_group(self) -> int:
        """Return the address of a new reference to this group as a ``shoal_group`` of ``shoal.h``."""
        return int(self._engine.c_group())


class SingleProcessEngine(CollectiveEngine):
    """A group of one rank. Operations complete on submission: the reduction of one tensor is a copy."""

    def __init__(self) -> None:
        super().__init__(native.core().SingleRank())


class Engine(CollectiveEngine):
    """A group of several ranks.

    It listens on construction; :meth:`connect` connects to the others.

    Args:
        rank: of this process in the group.
        size: number of ranks, at least 2.
        group: name of the group, the same on all ranks.
        secret: that the ranks share.
        address: address to listen on, IPv4 or IPv6; several, separated by commas: one per interface.
        options: the same on all ranks.
        share_connections: whether to share connections with other groups of this process that have the same
            options.
        returning: ranks that a former group of this process had too. Connections are shared although others
            of them were lost.

    Raises:
        CommError: the address is not available.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        group: str,
        secret: bytes,
        address: str,
        options: EngineOptions,
        share_connections: bool = True,
        returning: Sequence[Peer] | None = None,
        private_key: bytes = b"",
    ) -> None:
        settings = {
            **asdict(options), "private_key": private_key,
            "protection": options.protection or DEFAULT_PROTECTION,
            "fabric": fabric_providers(options.transport),
            "network_threads": options.network_threads or threads_for(cores_per_worker()),
            "connections_per_peer": max(options.connections_per_peer, options.network_threads, 1),
            "rank": rank, "size": size, "group": group, "secret": secret, "address": address,
            "share_connections": share_connections,
            "returning": None if returning is None else [(p.address, p.port, p.pid) for p in returning],
        }  # fmt: skip
        try:
            super().__init__(native.core().Engine(settings))
        except RuntimeError as error:
            raise CommError(f"group {group!r}, rank {rank}: {error}") from error
        self._group, self._rank, self._size, self._pid = group, rank, size, os.getpid()
        _open_engines.add(self)

    @property
    def port(self) -> int:
        return int(self._engine.port)

    @property
    def public_key(self) -> str:
        """Return the public key of this process, as in :class:`Peer`."""
        return bytes(self._engine.public_key).hex()

    def connect(
        self,
        peers: Sequence[Peer],
        helpers: Sequence[Helper],
        pattern: Sequence[int],
        *,
        segment: str,
        timeout_s: float,
    ) -> None:
        """Connect to all ranks and helpers of the group.

        Args:
            peers: one per rank, in rank order.
            helpers: the helper hosts, in the same order on all ranks.
            pattern: server of each successive chunk, repeated cyclically. Servers 0 to size - 1 are on the
                ranks, the next ones are the helpers.
            segment: name for shared memory, unique to the group and the same on all ranks.
            timeout_s: limit for connecting.

        Raises:
            CommError: a peer did not come, rejected this rank, or does not know the secret.
        """
        self.peers = list(peers)
        self._helper_keys = {helper.name: helper.key for helper in helpers}
        try:
            self._engine.connect(
                [peer.words() for peer in peers],
                [helper.words() for helper in helpers],
                list(pattern),
                segment,
                timeout_s,
            )
        except (RuntimeError, ValueError) as error:
            raise CommError(
                f"group {self._group!r}, rank {self._rank} cannot meet the others: {error}"
            ) from error

    def _losses(self) -> dict[tuple[str, str], None]:
        return {(name, self._helper_keys[name]): None for name in self._engine.lost_helpers()}

    def c_group(self) -> int:
        return int(self._engine.c_group(self._rank, self._size))

    def set_pattern(self, pattern: Sequence[int]) -> None:
        """Set the servers of later chunks. All ranks call it between the same two operations."""
        self._engine.set_pattern(list(pattern))

    def server_times(self) -> list[tuple[int, int]]:
        """Return, for each server, the number of sums of chunks that it has sent, and their time in ns."""
        return list(self._engine.server_times())

    def lost_ranks(self) -> list[int]:
        return list(self._engine.lost_ranks())

    def close(self) -> None:
        if os.getpid() == self._pid:
            _lost.update(self._losses())
            _open_engines.discard(self)
            self._engine.close()

    def trace(self, on: bool) -> None:
        """Start or stop recording the events of each chunk."""
        self._engine.trace(on)

    def take_trace(self) -> list[tuple[str, int, int, int, int]]:
        """Return the events since the last call: name, begin and end in ns, operation number, chunk index."""
        return list(self._engine.take_trace())


_open_engines: WeakSet[Engine] = WeakSet()
_lost: dict[tuple[str, str], None] = {}
"""Helpers lost by engines of this process, by name and public key, in the order of the losses."""


def lost_helpers() -> list[str]:
    """Return the names of the helpers that engines of this process have lost.

    A name comes twice where another process has been lost at the same place.
    """
    for engine in list(_open_engines):
        if engine._pid == os.getpid():
            _lost.update(engine._losses())
    return [name for name, _ in _lost]


def has_lost(name: str, key: str) -> bool:
    """Return whether engines of this process have lost the helper with this name and public key.

    So has one that was lost before its key was known.
    """
    return name in lost_helpers() and not {(name, key), (name, "")}.isdisjoint(_lost)


@atexit.register
def _close_all() -> None:
    """Close open groups at interpreter exit, so that data in flight to other ranks arrives."""
    for engine in list(_open_engines):
        engine.close()
