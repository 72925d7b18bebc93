"""How a collective on a device's tensors travels: steps on the device, a part over the network, steps again.

With L ranks on each host, each with a device of its own, only 1/L of a tensor leaves each device:

    all_reduce       add up inside the host, each rank a part · sum it over hosts · gather inside the host
    reduce           the same, and only the root's host gathers
    broadcast        the root's host shares it out in parts · each part to all hosts · gather inside the host
    all_gather       this rank's rows of all hosts · gather inside the host · rows into the group's order
    reduce_scatter   rows into the hosts' order · add up inside the host · sum of this rank's rows over hosts

A *rail* is the engine of the ranks with the same place in their hosts. The ranks of a host add up first, then
hosts in the order of their lowest ranks, as the engine does with CPU tensors. 16-bit tensors are added in
float32 and rounded once. Otherwise (``straight``) the whole tensor goes through the engine of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.comm.devices import HostRanks
from shoal.comm.engine import Engine

SIXTEEN_BITS = (torch.float16, torch.bfloat16)
HOST_OPS = ("sum", "avg", "prod", "min", "max")
_LINE = 128
"""Chunks are multiples of this many elements."""

Step = Callable[[], object]


@dataclass(kw_only=True)
class Asked:
    """A collective as the group gives it: two blocks of the device's memory, and what is done."""

    kind: str
    input: Tensor
    output: Tensor
    dtype: str
    op: str = "sum"
    root: int = 0
    shape: Sequence[int] = ()
    priority: int = 0


@dataclass(frozen=True)
class Place:
    """Which ranks share a host, and where this one is among them."""

    hosts: tuple[tuple[int, ...], ...]
    """Ranks of each host in rank order; hosts in the order of their lowest ranks."""
    rank: int
    by_parts: bool
    """All hosts have as many ranks, more than one, each with a device of its own."""

    @classmethod
    def of(cls, records: Sequence[tuple[str, str]], rank: int) -> Place:
        """Return the place of ``rank`` from each rank's host and device; the same hosts on all ranks."""
        by_host: dict[str, list[int]] = {}
        for each, (host, _) in enumerate(records):
            by_host.setdefault(host, []).append(each)
        hosts = tuple(tuple(ranks) for ranks in by_host.values())
        alike = len({len(ranks) for ranks in hosts}) == 1 and len(hosts[0]) > 1
        alone = all(len({records[each][1] for each in ranks}) == len(ranks) for ranks in hosts)
        return cls(hosts, rank, alike and alone)

    def host_of(self, rank: int) -> int:
        return next(index for index, ranks in enumerate(self.hosts) if rank in ranks)

    @property
    def host(self) -> int:
        return self.host_of(self.rank)

    @property
    def local(self) -> int:
        return self.hosts[self.host].index(self.rank)

    def rails_first(self) -> list[int]:
        """Return all ranks, those of one rail together."""
        return [ranks[local] for local in range(len(self.hosts[0])) for ranks in self.hosts]


@dataclass(kw_only=True)
class Route:
    """One collective's way. ``source`` and ``target`` are tables [rows, width]: columns travel in chunks."""

    engine: Engine | None
    """of the ranks between which it travels; ``None``: it does not leave the host"""
    asked: Asked
    op: str = "sum"
    dtype: str = ""
    root: int = 0
    rank: int = 0
    size: int = 1
    source: Tensor
    target: Tensor
    sends: bool = True
    receives: bool = True
    begin: Step | None = None
    """on the device, before the first chunk leaves it"""
    end: Step | None = None
    """on the device, after the last chunk has come back"""

    @property
    def rows(self) -> int:
        """Rows of a chunk in the host's memory."""
        return {"all_gather": self.size, "reduce_scatter": self.size + 1}.get(self.asked.kind, 1)

    def chunks(self, buffer_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield the columns of each chunk, from and to; the same on all ranks."""
        width = self.source.shape[1]
        most = buffer_bytes // (self.rows * self.source.element_size())
        most = most // _LINE * _LINE or most
        for first in range(0, width, most):
            yield first, min(first + most, width)


def straight(asked: Asked, engine: Engine | None, rank: int, size: int) -> Route:
    """Return the way of the whole tensor over an engine of all ranks; of a group of one, without any."""
    source, target = asked.input.view(-1), asked.output.view(-1)
    if engine is None:
        same = source.data_ptr() == target.data_ptr()
        end = None if same else partial(target.copy_, source)
        return Route(engine=None, asked=asked, source=source[None], target=target[None], end=end)
    kind = asked.kind
    rooted = kind in ("reduce", "broadcast")
    return Route(
        engine=engine,
        asked=asked,
        op=asked.op,
        dtype=asked.dtype,
        root=asked.root,
        rank=rank,
        size=size,
        source=source.view(size, -1) if kind == "reduce_scatter" else source[None],
        target=target.view(size, -1) if kind == "all_gather" else target[None],
        sends=kind != "broadcast" or rank == asked.root,
        receives=not rooted or (rank == asked.root) == (kind == "reduce"),
    )


class ByParts:
    """The ways of a group with several devices on each host.

    ``adding`` and ``gathering`` are the same ranks twice: the first goes with the lane that leaves the
    device, the second with the lane that comes back, and each sees its operations in one order on all ranks.
    """

    def __init__(
        self, place: Place, rail: Engine | None, adding: HostRanks, gathering: HostRanks, *, wide: bool
    ) -> None:
        self._place, self._rail = place, rail
        self._adding, self._gathering = adding, gathering
        self._wide = wide
        self._num_hosts, self._num_local = len(place.hosts), len(place.hosts[0])
        self._size = self._num_hosts * self._num_local
        self._order: Tensor | None = None

    def route(self, asked: Asked) -> Route:
        make: dict[str, Callable[[Asked], Route]] = {
            "all_reduce": self._reduce,
            "reduce": self._reduce,
            "broadcast": self._broadcast,
            "all_gather": self._all_gather,
            "reduce_scatter": self._reduce_scatter,
        }
        return make[asked.kind](asked)

    def _rail_route(self, asked: Asked, source: Tensor, target: Tensor, dtype: str, **more: Any) -> Route:
        if self._rail is None:
            more["sends"] = more["receives"] = False
        return Route(
            engine=self._rail, asked=asked, source=source, target=target, dtype=dtype,
            rank=self._place.host, size=self._num_hosts, **more,
        )  # fmt: skip

    def _added_in(self, asked: Asked) -> tuple[torch.dtype, str, str]:
        """Return the dtype in which partial sums are, its name, and what is done to them."""
        averages = asked.op == "avg"
        widened = asked.input.dtype in SIXTEEN_BITS and asked.op in ("sum", "avg", "prod")
        dtype = torch.float32 if widened and (self._wide or averages) else asked.input.dtype
        return dtype, str(dtype).removeprefix("torch."), "sum" if averages else asked.op

    def _divisor(self, asked: Asked, like: Tensor) -> Tensor | None:
        # A tensor: by a number, a GPU multiplies with the reciprocal, which rounds once more.
        return torch.full((), self._size, dtype=like.dtype, device=like.device) if asked.op == "avg" else None

    def _reduce(self, asked: Asked) -> Route:
        count, local = asked.input.numel(), self._num_local
        width = -(-count // local)
        dtype, name, op = self._added_in(asked)
        source, target = asked.input.view(-1), asked.output.view(-1)
        fits = count == width * local
        given = source if fits and dtype == source.dtype else source.new_empty(width * local, dtype=dtype)
        part = source.new_empty(width, dtype=dtype)
        result = part if dtype == source.dtype else part.new_empty(width, dtype=source.dtype)
        divisor = self._divisor(asked, part)
        root = self._place.host_of(asked.root)
        writes = asked.kind == "all_reduce" or asked.root == self._place.rank
        ends = asked.kind == "all_reduce" or root == self._place.host
        gathered = target if fits and writes else result.new_empty(width * local)

        def begin() -> None:
            if given is not source:
                given[:count].copy_(source)
                given[count:].zero_()
            self._adding.reduce_scatter(part, given, op)

        def end() -> None:
            if divisor is not None:
                part.div_(divisor)
            if result is not part:
                result.copy_(part)
            self._gathering.all_gather(gathered, result)
            if gathered is not target and writes:
                target.copy_(gathered[:count])

        table = part[None]
        return self._rail_route(
            asked, table, table, name,
            op=op, root=root, receives=ends, begin=begin, end=end if ends else None,
        )  # fmt: skip

    def _broadcast(self, asked: Asked) -> Route:
        source, target = (each.view(-1).view(torch.uint8) for each in (asked.input, asked.output))
        count, local = source.numel(), self._num_local
        width = -(-count // local)
        host, root = self._place.host, self._place.host_of(asked.root)
        is_root = asked.root == self._place.rank
        whole, part = source.new_empty(width * local), source.new_empty(width)

        def begin() -> None:  # bytes and zeros: the sum has the root's bits
            whole.zero_()
            if is_root:
                whole[:count].copy_(source)
            self._adding.reduce_scatter(part, whole, "sum")

        def end() -> None:
            self._gathering.all_gather(whole, part)
            if not is_root:
                target.copy_(whole[:count])

        return self._rail_route(
            asked, part[None], part[None], "uint8",
            root=root, sends=host == root, receives=host != root,
            begin=begin if host == root else None, end=end,
        )  # fmt: skip

    def _all_gather(self, asked: Asked) -> Route:
        source, target = asked.input.view(-1), asked.output.view(self._size, -1)
        rows = source.new_empty(self._num_hosts, source.numel())
        whole = source.new_empty(self._size, source.numel())
        order = self._rows(source)

        def end() -> None:
            self._gathering.all_gather(whole.view(-1), rows.view(-1))
            target.index_copy_(0, order, whole)

        begin = partial(rows[0].copy_, source) if self._rail is None else None
        return self._rail_route(asked, source[None], rows, asked.dtype, begin=begin, end=end)

    def _reduce_scatter(self, asked: Asked) -> Route:
        source, target = asked.input.view(self._size, -1), asked.output.view(-1)
        dtype, name, op = self._added_in(asked)
        order = self._rows(source)
        given = source.new_empty(source.shape, dtype=dtype)
        part = given.new_empty(self._num_hosts, target.numel())
        total = part[:1] if self._rail is None else given.new_empty(1, target.numel())
        divisor = self._divisor(asked, part)

        def begin() -> None:
            given.copy_(source.index_select(0, order))
            self._adding.reduce_scatter(part.view(-1), given.view(-1), op)

        def end() -> None:
            if divisor is not None:
                total.div_(divisor)
            target.copy_(total[0])

        return self._rail_route(asked, part, total, name, op=op, begin=begin, end=end)

    def _rows(self, like: Tensor) -> Tensor:
        if self._order is None:
            self._order = torch.tensor(self._place.rails_first(), device=like.device)
        return self._order
