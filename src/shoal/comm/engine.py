"""The engine of one group, as the torch backend sees it: addresses in, sums out, waits with a deadline.

Knows nothing of torch: whoever has an address, a count and an element type can use it. The work is done in
the C++ core (``csrc/engine``); what is here names things and turns failures into :class:`CommError`.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from weakref import WeakSet

from shoal import native
from shoal.errors import ShoalError, UsageError

Event = tuple[str, int, int, int, int]
"""What happened, from and to in ns of ``time.monotonic_ns``, number of the operation, index of the chunk."""


_PYTHON_OPTIONS = frozenset(
    {"partial_dtype", "order", "transport", "staging_bytes", "staging_buffers", "ordered_callbacks"}
)
"""Options that the core does not have under the same name."""
_FABRIC = "ofi:"
_MOST_BYTES = 1 << 40
_RANGES: dict[str, tuple[float, float, int]] = {
    "chunk_bytes": (128, 8 << 20, 128),
    "shared_chunk_bytes": (128, 8 << 20, 128),
    "num_slots": (1, 64, 1),
    "min_window_bytes": (1, _MOST_BYTES, 1),
    "window_bytes": (1, _MOST_BYTES, 1),
    "target_rtt_s": (1e-6, 3600.0, 0),
    "unexpected_bytes": (0, _MOST_BYTES, 1),
    "connections_per_peer": (1, 64, 1),
    "send_buffer_bytes": (0, 1 << 30, 1),
    "peer_grace_s": (0.0, 86400.0, 0),
    "straggler_s": (0.0, 86400.0, 0),
    "staging_bytes": (1, _MOST_BYTES, 1),
    "staging_buffers": (2, 4096, 1),
}
"""The least and the most of each number of :class:`EngineOptions`, and what divides it; 0 for any number."""


def fabric_providers(transport: str | None) -> str:
    """Return libfabric's providers in the words of :attr:`EngineOptions.transport`; an empty text is TCP.

    Raises:
        UsageError: it is neither.
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


class CommError(ShoalError):
    """The group has failed: a peer was lost, a deadline passed, or ranks ask for different things."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Where a rank of the group is.

    Attributes:
        host: ranks with the same text share memory.
        address: IPv4 address where its engine listens.
        port: and the port.
        global_rank: its rank in the whole job, for messages.
        pid: its process, for messages.
    """

    host: str
    address: str
    port: int
    global_rank: int
    pid: int


@dataclass(frozen=True, kw_only=True)
class Helper:
    """A helper host's server."""

    address: str
    port: int
    name: str


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What can be tuned. The defaults suit hosts with 1 to 25 Gbit/s.

    Attributes:
        chunk_bytes: the most that travels in one message between hosts; a multiple of 128, at most 8 MiB.
        shared_chunk_bytes: the same inside a host: small enough for the caches.
        num_slots: chunks of each rank that are under way in shared memory, from 1 to 64.
        min_window_bytes: what may always be on its way without an answer, for each server.
        window_bytes: and what at most, in all; bounds a server's memory. In between it follows the answers.
        target_rtt_s: the time that an answer should take: longer ones mean that queues fill on the way.
        unexpected_bytes: what may be sent to a rank that has not begun the operation.
        connections_per_peer: TCP connections for data to each peer; clouds limit what one carries.
        send_buffer_bytes: the kernel's buffer of each; small ones keep the flows fair, 0: the system's.
        peer_grace_s: how long a host may not answer before it is lost.
        straggler_s: how long an operation waits before the ranks that are missing are named.
        partial_dtype: "float32" sends the sums of a host's 16-bit tensors unrounded, "input" in 16 bits.
        workers_serve: whether workers carry chunks of a lost helper.
        order: "host" adds up inside each host first; "rank" adds in plain rank order for any placement, and
            sends each rank's tensor over the network for it.
        transport: "tcp", or "ofi:" and libfabric's providers, one a rail, separated by commas: "ofi:efa",
            "ofi:tcp;ofi_rxm,tcp;ofi_rxm". ``None``: what SHOAL_TRANSPORT says, or else TCP.
        staging_bytes: a piece of a CUDA tensor that is copied to or from the host at once.
        staging_buffers: such pieces that have memory on the host, for each group.
        ordered_callbacks: whether a collective waits until callbacks of earlier ones have ended. For
            callbacks that begin collectives while the program does too, as PowerSGD's with several buckets.
    """

    chunk_bytes: int = 32 << 10
    shared_chunk_bytes: int = 128 << 10
    num_slots: int = 16
    min_window_bytes: int = 32 << 10
    window_bytes: int = 8 << 20
    target_rtt_s: float = 0.015
    unexpected_bytes: int = 1 << 20
    connections_per_peer: int = 1
    send_buffer_bytes: int = 128 << 10
    peer_grace_s: float = 2.0
    straggler_s: float = 1.0
    partial_dtype: str = "float32"
    workers_serve: bool = True
    order: str = "host"
    transport: str | None = None
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
        for name, (least, most, unit) in _RANGES.items():
            number = getattr(self, name)
            if not least <= number <= most or (unit and number % unit):
                multiple = f" and a multiple of {unit}" if unit and unit > 1 else ""
                raise UsageError(f"EngineOptions.{name} is {number}; it is from {least} to {most}{multiple}")
        fabric_providers(self.transport)


@dataclass(kw_only=True, slots=True)
class Operation:
    """A collective, as one rank asks for it.

    Attributes:
        kind: all_reduce, reduce, broadcast, all_gather, reduce_scatter, barrier, or delegated (nothing moves,
            but the others hear of it).
        input: address of the elements; they stay where they are until the operation has ended.
        output: address for the result; may be ``input``.
        count: elements of the tensor; of the input for all_gather, of the output for reduce_scatter.
        dtype: float32, float64, float16, bfloat16, int8, uint8, int32 or int64.
        op: sum, avg, prod, min, max, band, bor or bxor; of a delegated operation its name.
        root: rank in the group that a broadcast comes from or a reduce goes to.
        shape: for messages.
        timeout_s: the operation's deadline; 0 for none.
        priority: of an all_reduce. 0: it goes in the order of the calls, before all others. Else: among those
            that have one, in an order that rank 0 sets for all ranks, higher ones first. All ranks give one,
            or none. The bits do not depend on it.
    """

    kind: str
    input: int = 0
    output: int = 0
    count: int = 0
    dtype: str = "uint8"
    op: str = "sum"
    root: int = 0
    shape: Sequence[int] = ()
    timeout_s: float
    priority: int = 0

    @property
    def name(self) -> str:
        """What counters and messages call it."""
        return self.op if self.kind == "delegated" else self.kind


class Engine:
    """One rank's part in a group of ranks. Listens as soon as it is made; :meth:`connect` meets the others.

    Raises:
        CommError: the address or the port cannot be had.
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
        port: int = 0,
    ) -> None:
        settings = native.core().EngineOptions()
        settings.set_secret(secret)
        settings.rank, settings.size, settings.group = rank, size, group
        settings.address, settings.port = address, port
        settings.wide_partials = options.partial_dtype == "float32"
        settings.fabric = fabric_providers(options.transport)
        for name, value in asdict(options).items():
            if name not in _PYTHON_OPTIONS:
                setattr(settings, name, value)
        self._group_error: type[Exception] = native.core().GroupError
        try:
            self._engine = native.core().Engine(settings)
        except RuntimeError as error:
            raise CommError(f"group {group!r}, rank {rank}: {error}") from error
        self._group, self._rank, self._pid = group, rank, os.getpid()
        _open.add(self)

    @property
    def port(self) -> int:
        return int(self._engine.port)

    def connect(
        self,
        peers: Sequence[Peer],
        helpers: Sequence[Helper],
        pattern: Sequence[int],
        *,
        segment: str,
        timeout_s: float,
    ) -> None:
        """Meet all ranks and helpers of the group.

        Args:
            peers: one for each rank, in rank order.
            helpers: the helper hosts, in the same order on all ranks.
            pattern: the server of each successive chunk, again from the start when it ends; servers 0 to
                size - 1 are beside the ranks, then come the helpers.
            segment: name for shared memory, unique to the group and the same on all ranks.
            timeout_s: how long this may take.

        Raises:
            CommError: somebody did not come, refused us, or does not know the secret.
        """
        try:
            self._engine.connect(
                [(peer.host, peer.address, peer.port, peer.global_rank, peer.pid) for peer in peers],
                [(helper.address, helper.port, helper.name) for helper in helpers],
                list(pattern),
                segment,
                timeout_s,
            )
        except (RuntimeError, ValueError) as error:
            raise CommError(
                f"group {self._group!r}, rank {self._rank} cannot meet the others: {error}"
            ) from error

    def set_pattern(self, pattern: Sequence[int]) -> None:
        """Assign later chunks to servers. All ranks call it between the same two operations."""
        self._engine.set_pattern(list(pattern))

    def submit(self, asked: Operation) -> int:
        """Begin a collective and return its handle, the group's running number. Never waits for peers.

        Raises:
            CommError: the group has failed before.
            ValueError: an unknown word, or an operation that the type does not have.
        """
        try:
            handle: int = self._engine.submit(
                asked.kind, asked.input, asked.output, asked.count, asked.dtype, asked.op, asked.root,
                list(asked.shape), asked.timeout_s, asked.priority,
            )  # fmt: skip
        except self._group_error as error:
            raise CommError(str(error)) from None
        return handle

    def finish_delegated(self, handle: int) -> None:
        """Say that the delegated operation has ended here."""
        self._engine.finish_delegated(handle)

    def wait(self, handle: int, timeout_s: float | None = None) -> bool:
        """Wait for an operation; ``False`` when it is still under way after ``timeout_s``.

        Raises:
            CommError: the operation failed.
        """
        try:
            ended: bool = self._engine.wait(handle, -1.0 if timeout_s is None else max(timeout_s, 0.0))
        except self._group_error as error:
            raise CommError(str(error)) from None
        return ended

    def is_done(self, handle: int) -> bool:
        """Whether the operation has ended or failed."""
        return bool(self._engine.is_done(handle))

    def watch(self, handle: int) -> None:
        """Have :meth:`next_watched` report the operation's end, at once if it is over."""
        self._engine.watch(handle)

    def next_watched(self, timeout_s: float) -> list[int]:
        """Return watched operations that have ended or failed since; waits for the first."""
        return list(self._engine.next_watched(timeout_s))

    def error(self) -> str | None:
        """Return why the group has failed, if it has."""
        return self._engine.error() or None

    def abort(self, reason: str) -> None:
        """End the group here and on all peers: who waits is freed with this reason."""
        self._engine.abort(reason)

    def close(self) -> None:
        """Leave the group in order. Peers that wait for nothing do not mind."""
        if os.getpid() == self._pid:
            _lost.update(dict.fromkeys(self._engine.lost_helpers()))
            _open.discard(self)
            self._engine.close()

    def counters(self) -> dict[str, int]:
        """Return bytes, frames and operations by kind since the start."""
        return dict(self._engine.counters())

    def take_events(self) -> list[str]:
        """Return what was worth telling a person since the last call: stragglers, lost helpers."""
        return list(self._engine.take_events())

    def trace(self, on: bool) -> None:
        """Begin or end to note every chunk's way."""
        self._engine.trace(on)

    def take_trace(self) -> list[Event]:
        """Return the events noted since the last call."""
        return list(self._engine.take_trace())


_open: WeakSet[Engine] = WeakSet()
_lost: dict[str, None] = {}
"""The helpers that engines lost which are closed, in the order of the losses."""


def lost_helpers() -> list[str]:
    """Return the names of the helpers that engines of this process have lost."""
    for engine in list(_open):
        if engine._pid == os.getpid():
            _lost.update(dict.fromkeys(engine._engine.lost_helpers()))
    return list(_lost)


@atexit.register
def _leave_all() -> None:
    """Leave open groups when the interpreter exits; what is on its way to the others arrives."""
    for engine in list(_open):
        engine.close()
