"""Routes collectives of device tensors: flat over all ranks, or hierarchically, first inside each host.

With L ranks per host, each with its own device, the hierarchical route sends only 1/L of a tensor over the
network from each device:

    all_reduce       reduce_scatter inside the host; all_reduce of the part over hosts; all_gather inside
    reduce           the same, but only the root's host gathers
    broadcast        the root's host scatters; each part goes to all hosts; all_gather inside the host
    all_gather       all_gather of this rank's rows over hosts, then inside the host; rows into rank order
    reduce_scatter   rows into rail order; reduce_scatter inside the host; reduce_scatter over hosts

A *rail* is the engine of the ranks with the same index in their hosts. The ranks of a host are added first,
then hosts in the order of their lowest ranks, as the engine does with CPU tensors. 16-bit tensors are
accumulated in float32 and rounded once. The flat route passes the whole tensor through an engine of all
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal import native
from shoal.comm.engine import CollectiveEngine, Operation
from shoal.errors import UsageError

SIXTEEN_BITS = (torch.float16, torch.bfloat16)
INTRA_HOST_OPS = ("sum", "avg", "prod", "min", "max")
_COLUMN_ALIGNMENT = 128
"""Chunks are multiples of this many elements."""
_NUM_CHUNKS, _MIN_CHUNK_BYTES = 4, 1 << 20
"""One chunk leaves the device while others are reduced and return; smaller ones cost more than they hide."""
_SERVED_CHUNK_BYTES = 1 << 20
"""Of weights that servers keep."""

Step = Callable[[], object]


class IntraHostGroup(Protocol):
    """Collectives among the ranks of one host, called in a stream's step, in the same order on all ranks."""

    def reduce_scatter(self, output: Tensor, input: Tensor, op: str) -> None:
        """Reduce the ranks' inputs; write the rank-th of as many equal parts as there are ranks."""

    def all_gather(self, output: Tensor, input: Tensor) -> None: ...

    def abort(self, reason: str) -> None:
        """Release ranks that wait in a collective."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class RankLayout:
    """The ranks of each host, and the position of this rank."""

    hosts: tuple[tuple[int, ...], ...]
    """Ranks of each host in rank order; hosts in the order of their lowest ranks."""
    rank: int
    is_hierarchical: bool
    """True if all hosts have the same number of ranks, more than one, each with its own device."""

    @classmethod
    def of(cls, records: Sequence[tuple[str, str]], rank: int) -> RankLayout:
        """Return the layout seen by ``rank``, from the host and the device of each rank."""
        by_host: dict[str, list[int]] = {}
        for each, (host, _) in enumerate(records):
            by_host.setdefault(host, []).append(each)
        hosts = tuple(tuple(ranks) for ranks in by_host.values())
        even = len({len(ranks) for ranks in hosts}) == 1 and len(hosts[0]) > 1
        own_device = all(len({records[each][1] for each in ranks}) == len(ranks) for ranks in hosts)
        return cls(hosts, rank, even and own_device)

    def host_of(self, rank: int) -> int:
        return next(index for index, ranks in enumerate(self.hosts) if rank in ranks)

    @property
    def host(self) -> int:
        return self.host_of(self.rank)

    @property
    def local(self) -> int:
        return self.hosts[self.host].index(self.rank)

    def rail_order(self) -> list[int]:
        """Return all ranks, grouped by rail."""
        return [ranks[local] for local in range(len(self.hosts[0])) for ranks in self.hosts]


@dataclass(kw_only=True)
class Route:
    """The route of a collective. ``source`` and ``target`` are [rows, width], sent in chunks of columns."""

    engine: CollectiveEngine | None
    """engine of the ranks that exchange the chunks; ``None`` if nothing leaves the host"""
    operation: Operation
    op: str = "sum"
    root: int = 0
    rank: int = 0
    size: int = 1
    source: Tensor
    target: Tensor
    sends: bool = True
    receives: bool = True
    begin: Step | None = None
    """device work before the first chunk is copied out"""
    end: Step | None = None
    """device work after the last chunk was copied back"""

    @property
    def rows(self) -> int:
        """Rows of a chunk in its host buffer."""
        if self.weights_are_apart:
            return 2
        return {"all_gather": self.size, "reduce_scatter": self.size + 1}.get(self.operation.kind, 1)

    @property
    def width(self) -> int:
        """Elements of a row of the whole tensor."""
        return self.operation.count if self.operation.is_served else self.source.shape[1]

    @property
    def weights_are_apart(self) -> bool:
        """Return whether a gradient and the weights after it have different sizes in a buffer."""
        return self.operation.kind == "update" and self.operation.weights != "float32"

    @property
    def buffered_rows(self) -> tuple[int, int]:
        """Return the first rows of the source and of the target in a chunk's host buffer."""
        kind = self.operation.kind
        if self.weights_are_apart:
            return 0, 1
        return self.rank if kind == "all_gather" else 0, self.size if kind == "reduce_scatter" else 0

    def columns(self, buffer_bytes: int) -> int:
        """Return the number of columns of a chunk, the same on all ranks."""
        if self.operation.is_served:
            return self._served_columns(buffer_bytes)
        column_bytes = self.rows * self.source.element_size()
        part_bytes = -(-self.source.shape[1] // _NUM_CHUNKS) * column_bytes
        columns = min(max(part_bytes, _MIN_CHUNK_BYTES), buffer_bytes) // column_bytes
        return columns // _COLUMN_ALIGNMENT * _COLUMN_ALIGNMENT or columns

    def _served_columns(self, buffer_bytes: int) -> int:
        """Return the columns of a chunk of weights, always the same: to the servers each is a tensor."""
        if self.operation.kind == "configure":
            return self.width
        block: int = native.core().SERVED_BLOCK
        blocks = min(_SERVED_CHUNK_BYTES, buffer_bytes // 2) // (4 * block)  # the buffer may have two rows
        if not blocks:
            raise UsageError(
                f"weights on servers: a buffer of {buffer_bytes} bytes holds no gradient and weights of "
                f"{block} numbers; EngineOptions.staging_bytes must be at least {8 * block}"
            )
        return blocks * block


def flat_route(operation: Operation, engine: CollectiveEngine | None, rank: int, size: int) -> Route:
    """Return the route of the whole tensor over an engine of all ranks, or none in a group of one."""
    source, target = operation.source.view(-1), operation.target.view(-1)
    if engine is None:
        same = source.data_ptr() == target.data_ptr()
        end = None if same else partial(target.copy_, source)
        return Route(engine=None, operation=operation, source=source[None], target=target[None], end=end)
    kind = operation.kind
    rooted = kind in ("reduce", "broadcast")
    return Route(
        engine=engine,
        operation=operation,
        op=operation.op,
        root=operation.root,
        rank=rank,
        size=size,
        source=source.view(size, -1) if kind == "reduce_scatter" else source[None],
        target=target.view(size, -1) if kind == "all_gather" else target[None],
        sends=kind != "broadcast" or rank == operation.root,
        receives=not rooted or (rank == operation.root) == (kind == "reduce"),
    )


def served_route(operation: Operation, engine: CollectiveEngine, rank: int, size: int) -> Route:
    """Return the route of an operation on weights that servers keep: whole tensors, of all ranks."""
    sends, receives = operation.source is not None, operation.target is not None
    source, target = operation.source, operation.target
    nothing = torch.empty(0)
    return Route(
        engine=engine, operation=operation, rank=rank, size=size, sends=sends, receives=receives,
        source=_as_row(source if sends else nothing), target=_as_row(target if receives else nothing),
    )  # fmt: skip


def message_route(operation: Operation, engine: CollectiveEngine | None) -> Route:
    """Return the route of messages: to the ranks that the operation names, or none in a group of one."""
    end = None if engine else partial(operation.memory[-1].copy_, operation.memory[0])
    nothing = torch.empty(0)
    return Route(engine=engine, operation=operation, source=nothing, target=nothing, end=end)


def _as_row(tensor: Tensor) -> Tensor:
    """Return the elements in the order of the memory."""
    return tensor.as_strided((1, tensor.numel()), (tensor.numel(), 1))


@dataclass(kw_only=True)
class HierarchicalRoutes:
    """Builds hierarchical routes.

    Attributes:
        layout: the ranks of each host.
        rail: engine of the ranks with this rank's index in their hosts; ``None`` with one host.
        d2h_ranks: the ranks of this host, for the stream of work before the copies to the host.
        h2d_ranks: the same ranks, for the stream of the copies back. Each group so sees its operations in one
            order on all ranks.
        widen: whether sums of 16-bit tensors leave the host in float32.
    """

    layout: RankLayout
    rail: CollectiveEngine | None
    d2h_ranks: IntraHostGroup
    h2d_ranks: IntraHostGroup
    widen: bool
    _order: Tensor | None = None

    def __post_init__(self) -> None:
        self._num_hosts, self._num_local = len(self.layout.hosts), len(self.layout.hosts[0])
        self._size = self._num_hosts * self._num_local

    def route(self, operation: Operation) -> Route:
        match operation.kind:
            case "broadcast":
                return self._broadcast(operation)
            case "all_gather":
                return self._all_gather(operation)
            case "reduce_scatter":
                return self._reduce_scatter(operation)
            case _:
                return self._reduce(operation)

    def _rail_route(self, operation: Operation, source: Tensor, target: Tensor, **more: Any) -> Route:
        if self.rail is None:
            more["sends"] = more["receives"] = False
        return Route(
            engine=self.rail, operation=operation, source=source, target=target,
            rank=self.layout.host, size=self._num_hosts, **more,
        )  # fmt: skip

    def _accumulation_dtype(self, operation: Operation) -> tuple[torch.dtype, str]:
        """Return the dtype of partial results and the operation that combines them."""
        averages = operation.op == "avg"
        widened = operation.source.dtype in SIXTEEN_BITS and operation.op in ("sum", "avg", "prod")
        dtype = torch.float32 if widened and (self.widen or averages) else operation.source.dtype
        return dtype, "sum" if averages else operation.op

    def _divisor(self, operation: Operation, like: Tensor) -> Tensor | None:
        # A tensor: division by a Python number multiplies by the reciprocal on a GPU, which rounds once more.
        if operation.op != "avg":
            return None
        return torch.full((), self._size, dtype=like.dtype, device=like.device)

    def _reduce(self, operation: Operation) -> Route:
        count, local = operation.source.numel(), self._num_local
        width = -(-count // local)
        dtype, op = self._accumulation_dtype(operation)
        source, target = operation.source.view(-1), operation.target.view(-1)
        fits = count == width * local
        padded = source if fits and dtype == source.dtype else source.new_empty(width * local, dtype=dtype)
        part = source.new_empty(width, dtype=dtype)
        result = part if dtype == source.dtype else part.new_empty(width, dtype=source.dtype)
        divisor = self._divisor(operation, part)
        root = self.layout.host_of(operation.root)
        writes = operation.kind == "all_reduce" or operation.root == self.layout.rank
        ends = operation.kind == "all_reduce" or root == self.layout.host
        gathered = target if fits and writes else result.new_empty(width * local)

        def begin() -> None:
            if padded is not source:
                padded[:count].copy_(source)
                padded[count:].zero_()
            self.d2h_ranks.reduce_scatter(part, padded, op)

        def end() -> None:
            if divisor is not None:
                part.div_(divisor)
            if result is not part:
                result.copy_(part)
            self.h2d_ranks.all_gather(gathered, result)
            if gathered is not target and writes:
                target.copy_(gathered[:count])

        table = part[None]
        return self._rail_route(
            operation, table, table,
            op=op, root=root, receives=ends, begin=begin, end=end if ends else None,
        )  # fmt: skip

    def _broadcast(self, operation: Operation) -> Route:
        source, target = (each.view(-1).view(torch.uint8) for each in (operation.source, operation.target))
        count, local = source.numel(), self._num_local
        width = -(-count // local)
        host, root = self.layout.host, self.layout.host_of(operation.root)
        is_root = operation.root == self.layout.rank
        whole, part = source.new_empty(width * local), source.new_empty(width)

        def begin() -> None:  # all other ranks add zero bytes: the sum has the bits of the root
            whole.zero_()
            if is_root:
                whole[:count].copy_(source)
            self.d2h_ranks.reduce_scatter(part, whole, "sum")

        def end() -> None:
            self.h2d_ranks.all_gather(whole, part)
            if not is_root:
                target.copy_(whole[:count])

        return self._rail_route(
            operation, part[None], part[None],
            root=root, sends=host == root, receives=host != root,
            begin=begin if host == root else None, end=end,
        )  # fmt: skip

    def _all_gather(self, operation: Operation) -> Route:
        source, target = operation.source.view(-1), operation.target.view(self._size, -1)
        rows = source.new_empty(self._num_hosts, source.numel())
        whole = source.new_empty(self._size, source.numel())
        order = self._row_order(source)

        def end() -> None:
            self.h2d_ranks.all_gather(whole.view(-1), rows.view(-1))
            target.index_copy_(0, order, whole)

        begin = partial(rows[0].copy_, source) if self.rail is None else None
        return self._rail_route(operation, source[None], rows, begin=begin, end=end)

    def _reduce_scatter(self, operation: Operation) -> Route:
        source, target = operation.source.view(self._size, -1), operation.target.view(-1)
        dtype, op = self._accumulation_dtype(operation)
        order = self._row_order(source)
        ordered = source.new_empty(source.shape, dtype=dtype)
        part = ordered.new_empty(self._num_hosts, target.numel())
        total = part[:1] if self.rail is None else ordered.new_empty(1, target.numel())
        divisor = self._divisor(operation, part)

        def begin() -> None:
            ordered.copy_(source.index_select(0, order))
            self.d2h_ranks.reduce_scatter(part.view(-1), ordered.view(-1), op)

        def end() -> None:
            if divisor is not None:
                total.div_(divisor)
            target.copy_(total[0])

        return self._rail_route(operation, part, total, op=op, begin=begin, end=end)

    def _row_order(self, like: Tensor) -> Tensor:
        if self._order is None:
            self._order = torch.tensor(self.layout.rail_order(), device=like.device)
        return self._order
