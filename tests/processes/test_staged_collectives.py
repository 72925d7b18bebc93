"""Tests staging with CPU tensors: the bits of the CPU path of the same placement."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shoal_workers import group_counters, ops, run_group
from staged_group import PYTHON_GROUP, small_pieces, staged
from torch import Tensor

REDUCTIONS = {
    torch.float32: ("SUM", "AVG", "PRODUCT", "MAX"),
    torch.bfloat16: ("SUM", "AVG", "PRODUCT", "MIN"),
    torch.float16: ("AVG",),
    torch.float64: ("SUM",),
    torch.int64: ("SUM", "AVG", "BXOR"),
    torch.uint8: ("MAX", "AVG"),
}
MOVED = (torch.float32, torch.bool, torch.complex128, torch.int16)

# hosts of the ranks; the device that ranks of a host share, if they do; whether each has a part then
PLACEMENTS: dict[str, tuple[tuple[str, ...], str | None, bool]] = {
    "uneven": (("a", "a", "b"), None, False),
    "parts": (("b", "a", "a", "b"), None, True),
    "one host": (("a", "a"), None, True),
    "one device": (("a", "a", "b", "b"), "the only one", False),
}


def part(rank: int, dtype: torch.dtype, count: int) -> Tensor:
    """Return the operand of ``rank``: floats whose sum depends on the order of addition."""
    random = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point:
        return (torch.randn(count, generator=random) * 10 ** (rank % 3)).to(dtype)
    if dtype.is_complex:
        return torch.randn(count, dtype=dtype, generator=random)
    return torch.randint(0 if dtype == torch.uint8 else -5, 5, (count,), generator=random).to(dtype)


class BothWays:
    """Calls on copies of tensors, plain and staged: all of them must have the same bits afterwards."""

    def __init__(self, identity: str | None) -> None:
        self._identity = identity

    def __call__(self, call: Callable[..., Any], *tensors: Tensor) -> None:
        plain, found = ([tensor.clone() for tensor in tensors] for _ in range(2))
        call(*plain)
        with staged(self._identity):
            call(*found)
        for one, other in zip(plain, found, strict=True):
            assert torch.equal(one, other), (one, other)


def all_at_once(*tensors: Tensor) -> None:
    works: list[Any] = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()


def check_reductions(rank: int, size: int, same: BothWays) -> None:
    for dtype, names in REDUCTIONS.items():
        for op in (getattr(dist.ReduceOp, name) for name in names):
            same(partial(dist.all_reduce, op=op), part(rank, dtype, 301))
            same(partial(dist.reduce, dst=1, op=op), part(rank, dtype, 40))
            mine, rows = torch.zeros(100, dtype=dtype), part(rank, dtype, size * 100)
            same(partial(dist.reduce_scatter_tensor, op=op), mine, rows)
    # layouts: strides, several tensors at once, lists, a factor, a scalar, nothing
    group: Any = dist.group.WORLD
    table = part(rank, torch.float32, 60).view(6, 10)
    same(lambda tensor: dist.all_reduce(tensor.t()), table)
    same(lambda *tensors: group.allreduce_coalesced(list(tensors)).wait(), table, table[0], table.bfloat16())
    halves = dist._make_nccl_premul_sum(0.25)
    same(lambda tensor: dist.all_reduce(tensor, halves), table)
    same(lambda mine, *rows: dist.reduce_scatter(mine, list(rows)), table[0].clone(), *[table[1]] * size)
    same(dist.all_reduce, torch.tensor(float(rank)))
    same(dist.all_reduce, torch.empty(0))
    same(dist.all_reduce, torch.tensor([rank == 0, False, True]))
    same(dist.all_reduce, part(rank, torch.complex128, 9))
    # one leaves the device while another comes back
    same(all_at_once, *[part(rank + each, torch.float32, 301) for each in range(20)])
    announced = sum(n for name, n in group_counters().items() if name.startswith("ops_cpu_all_reduce"))
    assert announced == ops("all_reduce"), "one for each that was done both ways"


def check_moves(rank: int, size: int, same: BothWays) -> None:
    for dtype in MOVED:
        tensor, mine = part(rank, dtype, 301), part(rank, dtype, 77)
        for root in (0, size - 1):
            same(lambda tensor, root=root: dist.broadcast(tensor, root), tensor)
        same(dist.all_gather_into_tensor, torch.zeros(size * 77, dtype=dtype), mine)
        same(lambda mine, *rows: dist.all_gather(list(rows), mine), mine, *[torch.zeros_like(mine)] * size)
    group: Any = dist.group.WORLD
    lists = [torch.zeros(5) for _ in range(2 * size)]

    def lists_of_each(one: Tensor, other: Tensor, *rows: Tensor) -> None:
        group.allgather_coalesced(
            [list(pair) for pair in zip(rows[::2], rows[1::2], strict=True)], [one, other]
        ).wait()

    same(lists_of_each, torch.full((5,), rank + 0.5), torch.full((5,), -rank - 0.5), *lists)
    # in place: this rank's row of the output is its input
    same(
        lambda rows: dist.all_gather_into_tensor(rows, rows[rank]),
        part(rank, torch.float32, size * 30).view(size, 30),
    )
    # by messages
    rows = [torch.full((3,), float(i + rank)) for i in range(size)]
    same(lambda mine, *rows: dist.scatter(mine, list(rows) if rank == 1 else None, 1), torch.zeros(3), *rows)
    same(lambda mine, *rows: dist.gather(mine, list(rows) if rank == 0 else None, 0), rows[0], *rows)
    same(
        lambda to, given: dist.all_to_all_single(to, given),
        torch.zeros(size),
        torch.arange(size) + 10.0 * rank,
    )
    same(lambda mine, *rows: dist.all_to_all(list(rows[:size]), list(rows[size:])), mine, *rows, *rows)

    def pass_on(given: Tensor, taken: Tensor) -> None:
        works: Any = [dist.isend(given, (rank + 1) % size), dist.irecv(taken, (rank - 1) % size)]
        works[0].wait()
        works[1].wait()

    same(pass_on, torch.full((4,), float(rank)), torch.zeros(4))


def check_all(rank: int, size: int, identity: str | None, is_hierarchical: bool) -> None:
    small_pieces()
    check_reductions(rank, size, BothWays(identity))
    check_moves(rank, size, BothWays(identity))
    with staged(identity) as side:
        assert (side._hierarchical is not None) == is_hierarchical


slow = pytest.mark.slow


@pytest.mark.parametrize(
    "placement",
    ["uneven", "parts", pytest.param("one host", marks=slow), pytest.param("one device", marks=slow)],
)
def test_collectives_have_the_bits_of_the_plain_way(placement: str, tmp_path: Path) -> None:
    hosts, identity, is_hierarchical = PLACEMENTS[placement]
    run_group(
        check_all,
        len(hosts),
        tmp_path,
        len(hosts),
        identity,
        is_hierarchical,
        hosts=hosts,
        environment=PYTHON_GROUP,
    )
