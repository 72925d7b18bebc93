"""Tests every collective of torch.distributed on CPU tensors against exact results, without a gloo group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shoal_workers import group_counters, in_both_groups, is_native, ops, run_group
from torch import Tensor

pytestmark = pytest.mark.usefixtures("both_groups")

SIZE = 3
HOSTS = ("a", "a", "b")
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.int8, torch.uint8, torch.int32, torch.int64)
REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def part(rank: int, dtype: torch.dtype, count: int = 1001) -> Tensor:
    """Return the operand of ``rank``: floats whose sum depends on the order of addition."""
    random = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point:
        return (torch.randn(count, generator=random) * 10 ** (rank % 3)).to(dtype)
    return torch.randint(0, 5, (count,), generator=random).to(dtype)


def in_rank_order(op: str, dtype: torch.dtype, count: int = 1001) -> Tensor:
    """The exact result: in rank order, 16-bit elements in fp32 and rounded once."""
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = part(0, dtype, count).to(wide)
    for rank in range(1, SIZE):
        total = REDUCTIONS["SUM" if op == "AVG" else op](total, part(rank, dtype, count).to(wide))
    if op == "AVG":
        total = total / SIZE if dtype.is_floating_point else torch.div(total, SIZE, rounding_mode="trunc")
    return total.to(dtype)


def check_reductions(rank: int) -> None:
    for dtype in FLOATS + WHOLE:
        names = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", *(() if dtype in FLOATS else ("BAND", "BOR", "BXOR"))]
        for name in names:
            op, wanted = getattr(dist.ReduceOp, name), in_rank_order(name, dtype)
            tensor = part(rank, dtype)
            dist.all_reduce(tensor, op)
            assert torch.equal(tensor, wanted), (dtype, name)
            tensor = part(rank, dtype)
            dist.reduce(tensor, 1, op)
            kept = wanted if rank == 1 else part(rank, dtype)  # only the root's tensor changes
            assert torch.equal(tensor, kept), (dtype, name)
            rows = part(rank, dtype, 3 * 50)
            mine = torch.empty(50, dtype=dtype)
            dist.reduce_scatter_tensor(mine, rows, op)
            whole = in_rank_order(name, dtype, 3 * 50).view(3, 50)[rank]
            assert torch.equal(mine, whole), (dtype, name)
            assert torch.equal(rows, part(rank, dtype, 150)), "the input stays as it was"
    assert not any(ops(kind) for kind in ("scatter", "gather", "all_to_all", "all_to_all_single"))
    assert min(ops("all_reduce"), ops("reduce"), ops("reduce_scatter")) == 4 * 5 + 4 * 8


@in_both_groups("hosts", ["aaa", "aab", "abc"], python=["aab"])
def test_reductions_are_exact_in_rank_order(tmp_path: Path, hosts: str) -> None:
    run_group(check_reductions, SIZE, tmp_path, hosts=hosts)


def check_whole_averages(rank: int, size: int) -> None:
    world: Any = dist.group.WORLD
    avg = dist.ReduceOp.AVG
    for dtype in WHOLE:

        def given(rank: int, *shape: int, dtype: torch.dtype = dtype) -> Tensor:
            """Values of the whole range: sums are negative, no multiples of the size, and wrap around."""
            least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
            random = torch.Generator().manual_seed(rank)
            return torch.randint(least, most, shape, generator=random, dtype=dtype)

        def wanted(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            total = sum((given(r, *shape) for r in range(size)), torch.zeros(shape, dtype=dtype))
            return torch.div(total, size, rounding_mode="trunc")

        table, rows = wanted(6, 10), wanted(size, 20)
        tensor = given(rank, 6, 10)
        work = dist.all_reduce(tensor, avg, async_op=True)
        assert work is not None
        seen = work.get_future().then(lambda future: future.value()[0].clone())
        assert torch.equal(seen.wait(), table), dtype
        assert torch.equal(tensor, table)
        turned = given(rank, 6, 10).t()
        dist.all_reduce(turned, avg)
        assert torch.equal(turned, table.t())
        tensor = given(rank, 6, 10)
        dist.reduce(tensor, 1, avg)
        assert torch.equal(tensor, table if rank == 1 else given(rank, 6, 10))
        several = [given(rank, 6, 10), given(rank, size, 20), torch.full((3,), float(rank))]
        opts = dist.AllreduceCoalescedOptions()
        opts.reduceOp = avg
        world.allreduce_coalesced(several, opts).wait()
        assert torch.equal(several[0], table)
        assert torch.equal(several[1], rows)
        assert several[2].tolist() == [(size - 1) / 2] * 3
        mine = torch.empty(20, dtype=dtype)
        dist.reduce_scatter_tensor(mine, given(rank, size, 20), avg)
        assert torch.equal(mine, rows[rank])
        dist.reduce_scatter(mine.zero_(), list(given(rank, size, 20)), avg)
        assert torch.equal(mine, rows[rank])
        overlap = given(rank, size, 20)
        dist.reduce_scatter_tensor(overlap[0], overlap, avg)
        assert torch.equal(overlap[0], rows[rank])
        options = dist.ReduceScatterOptions()
        options.reduceOp = avg
        pair = [torch.empty(10, dtype=dtype), torch.empty(20, dtype=dtype)]
        sources = [given(rank, size, 10), given(rank, size, 20)]
        world.reduce_scatter_tensor_coalesced(pair, sources, options).wait()
        assert torch.equal(pair[0], wanted(size, 10)[rank])
        assert torch.equal(pair[1], rows[rank])
        assert torch.equal(sources[1], given(rank, size, 20)), "the input stays as it was"
    epochs = torch.tensor([-(rank + 3)])
    for work in [dist.all_reduce(epochs.clone(), avg, async_op=True) for _ in range(3)]:
        assert work is not None
        work.get_future().wait()
    dist.all_reduce(epochs, avg)
    assert epochs.tolist() == [-3 if size == 2 else -4]


@in_both_groups("hosts", ["aa", "ab", "aaa", "aab", "abc"], python=["aab"], native=["aab", "abc"])
def test_averages_of_whole_numbers_are_truncated(tmp_path: Path, hosts: str) -> None:
    run_group(check_whole_averages, len(hosts), tmp_path, len(hosts), hosts=tuple(hosts))


def check_moves(rank: int) -> None:
    every = (*FLOATS, *WHOLE, torch.bool, torch.complex64, torch.int16, torch.float8_e4m3fn)
    for dtype in every:
        sources = [part(r, torch.float32, 64).mul(3).to(dtype) for r in range(SIZE)]

        def same(one: Tensor, other: Tensor) -> bool:
            return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))

        tensor = sources[rank].clone()
        dist.broadcast(tensor, 2)
        assert same(tensor, sources[2]), dtype
        outputs = [torch.empty_like(tensor) for _ in range(SIZE)]
        dist.all_gather(outputs, sources[rank])
        assert all(map(same, outputs, sources)), dtype
        flat = torch.empty(3 * 64, dtype=dtype)
        dist.all_gather_into_tensor(flat, sources[rank])
        assert same(flat, torch.cat(sources)), dtype
        rows = torch.empty(3, 64, dtype=dtype)
        rows[rank] = sources[rank]
        dist.all_gather_into_tensor(rows, rows[rank])  # in place, as FSDP does
        assert same(rows.view(-1), torch.cat(sources)), dtype
    objects: list[Any] = [None] * SIZE
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(SIZE)]
    objects = [rank, "from", rank]
    dist.broadcast_object_list(objects, 1)
    assert objects == [1, "from", 1]
    dist.barrier()
    assert ops("broadcast") == len(every) + 2


def test_broadcast_and_all_gather_take_every_dtype(tmp_path: Path) -> None:
    run_group(check_moves, SIZE, tmp_path, hosts=HOSTS)


def check_layouts(rank: int) -> None:
    table = torch.arange(12.0).view(3, 4)
    strided = (table + rank).t()
    dist.all_reduce(strided)
    assert torch.equal(strided, (3 * table + 3).t())
    assert not strided.is_contiguous()
    empty = torch.empty(0, 5)
    dist.all_reduce(empty)
    dist.broadcast(empty, 0)
    dist.all_gather([torch.empty(0) for _ in range(SIZE)], torch.empty(0))
    dist.reduce_scatter_tensor(torch.empty(0), torch.empty(0))
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar)
    assert scalar.item() == 3
    turned = torch.complex(torch.ones(4), torch.full((4,), float(rank)))
    dist.all_reduce(turned)
    assert torch.equal(turned, torch.complex(torch.full((4,), 3.0), torch.full((4,), 3.0)))
    conjugate = torch.complex(torch.ones(4), torch.full((4,), float(rank))).conj()
    group: Any = dist.group.WORLD
    if (
        not is_native()
    ):  # torch hands a copy to C++ backends, gloo too, and copies it back before the sum is there
        group.allreduce([conjugate]).wait()
        wanted = torch.complex(torch.full((4,), 3.0), torch.full((4,), -3.0))
        assert torch.equal(conjugate.resolve_conj(), wanted)
    truth = torch.tensor([rank == 0, False, True])
    dist.all_reduce(truth)
    assert truth.tolist() == [True, False, True]
    dist.all_reduce(truth, dist.ReduceOp.PRODUCT)
    assert truth.tolist() == [True, False, True]
    leaf = torch.full((3,), float(rank), requires_grad=True)
    dist.broadcast(leaf, 2)
    assert leaf.tolist() == [2, 2, 2]
    scaled = torch.full((3,), 2.0)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
    assert scaled.tolist() == [3, 3, 3]
    overlap = torch.arange(6.0)
    dist.reduce_scatter_tensor(overlap[:2], overlap)
    assert overlap[:2].tolist() == [3 * (2 * rank), 3 * (2 * rank + 1)]
    # lists whose tensors differ in size
    outputs = [torch.empty(r + 1, 2) for r in range(SIZE)]
    dist.all_gather(outputs, torch.full((rank + 1, 2), float(rank)))
    assert all(torch.equal(out, torch.full((r + 1, 2), float(r))) for r, out in enumerate(outputs))
    mine = torch.empty(rank + 1)
    dist.reduce_scatter(mine, [torch.full((r + 1,), float(r + rank)) for r in range(SIZE)])
    assert torch.equal(mine, torch.full((rank + 1,), 3.0 * rank + 3))


def test_any_layout_of_memory(tmp_path: Path) -> None:
    run_group(check_layouts, SIZE, tmp_path, hosts=HOSTS)


def check_fusion(rank: int) -> None:
    world: Any = dist.group.WORLD
    tensors = [torch.full((size,), float(rank)) for size in (5, 1, 0, 8)]
    tensors[3] = torch.full((8, 2), float(rank)).t()
    dist.all_reduce_coalesced(tensors)
    assert all((tensor == 3).all() for tensor in tensors)
    assert ops("all_reduce") == 1, "fused into one operation"
    mixed = [torch.ones(3), torch.ones(2, dtype=torch.int64), torch.ones(2)]
    world.allreduce_coalesced(mixed).wait()
    assert [tensor.tolist() for tensor in mixed] == [[3, 3, 3], [3, 3], [3, 3]]
    assert ops("all_reduce") == 3, "one operation a dtype"
    inputs = [torch.full((2, 3), rank), torch.full((4,), rank + 10.0)]
    outputs = [torch.empty(6, 3, dtype=torch.int64), torch.empty(3, 4)]
    world.allgather_into_tensor_coalesced(outputs, inputs).wait()
    assert torch.equal(outputs[0], torch.arange(3).repeat_interleave(2).view(6, 1).expand(6, 3))
    assert torch.equal(outputs[1], torch.arange(10.0, 13).view(3, 1).expand(3, 4))
    assert ops("all_gather") == 1
    inputs = [torch.arange(6.0), torch.arange(3.0) + rank]
    outputs = [torch.empty(2), torch.empty(1)]
    world.reduce_scatter_tensor_coalesced(outputs, inputs).wait()
    assert outputs[0].tolist() == [6 * rank, 6 * rank + 3]
    assert outputs[1].tolist() == [3 * rank + 3]
    assert ops("reduce_scatter") == 1
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        first, second = torch.ones(4), torch.ones(2)
        dist.all_reduce(first)
        dist.all_reduce(second)
    manager.wait()
    assert (first.sum(), second.sum()) == (12, 6)


def test_coalesced_collectives_are_fused(tmp_path: Path) -> None:
    run_group(check_fusion, SIZE, tmp_path, hosts=HOSTS)


# ---- views whose memory is negated or conjugated --------------------------------------------------------

LAZY: dict[str, Callable[[Tensor], Tensor]] = {
    "negated": lambda values: torch._neg_view(-values),
    "conjugated": lambda values: torch.complex(values, values).conj(),
    "imaginary part of a conjugated one": lambda values: torch.complex(values, -values).conj().imag,
    "real part": lambda values: torch.complex(values, -values).real,
    "imaginary part": lambda values: torch.complex(-values, values).imag,
}
"""Tensors of given real numbers; the conjugated one has (1 - i) times these."""


def four(number: int) -> Tensor:
    return torch.arange(1.0, 5) * (number + 1)


def collectives_of(rank: int, lazy: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """By name: what runs a collective on lazy tensors and returns what has come, and what should."""
    world: Any = dist.group.WORLD
    total, empty = 6 * four(0), torch.zeros(4)
    whole = torch.cat([four(0), four(1), four(2)])
    parts = [four(rank) + 10 * to for to in range(SIZE)]
    mine = total + 30 * rank

    def into(count: int, run: Callable[[list[Tensor]], Any], numel: int = 4) -> Callable[[], list[Tensor]]:
        def begin() -> list[Tensor]:
            outputs = [lazy(torch.zeros(numel)) for _ in range(count)]
            run(outputs)
            return outputs

        return begin

    def given(run: Callable[[Tensor], Any]) -> Callable[[], list[Tensor]]:
        def begin() -> list[Tensor]:
            tensor = lazy(four(rank))
            run(tensor)
            return [tensor]

        return begin

    def inputs() -> list[Tensor]:
        return [lazy(part) for part in parts]

    def message(tensor: Tensor, source: int | None) -> None:
        if rank == 0:
            dist.send(tensor, 1)
        elif rank == 1:
            dist.recv(tensor, source)

    def coalesced() -> list[Tensor]:
        tensors = [lazy(four(rank)), lazy(four(rank) + 1)]
        world.allreduce_coalesced(tensors).wait()
        return tensors

    own, to_one = lazy(four(rank)), 1 if rank == 1 else None
    received = [four(0 if rank == 1 else rank)]
    return {
        "all_reduce": (given(dist.all_reduce), [total]),
        "the group's all_reduce": (given(lambda t: world.allreduce([t]).wait()), [total]),
        "reduce": (given(lambda t: dist.reduce(t, 1)), [total if rank == 1 else four(rank)]),
        "broadcast": (given(lambda t: dist.broadcast(t, 1)), [four(1)]),
        "the group's broadcast": (given(lambda t: world.broadcast(t, 1).wait()), [four(1)]),
        "all_gather": (into(SIZE, lambda o: dist.all_gather(o, own)), [four(r) for r in range(SIZE)]),
        "all_gather_into_tensor": (into(1, lambda o: dist.all_gather_into_tensor(o[0], own), 12), [whole]),
        "the group's all_gather of rows": (
            into(1, lambda o: world._allgather_base(o[0], own).wait(), 12), [whole]
        ),
        "gather": (
            into(SIZE, lambda o: dist.gather(own, o if to_one else None, 1)),
            [four(r) if to_one else empty for r in range(SIZE)],
        ),
        "scatter": (
            into(1, lambda o: dist.scatter(o[0], inputs() if to_one else None, 1)), [four(1) + 10 * rank]
        ),
        "reduce_scatter": (into(1, lambda o: dist.reduce_scatter(o[0], inputs())), [mine]),
        "reduce_scatter_tensor": (
            into(1, lambda o: dist.reduce_scatter_tensor(o[0], lazy(torch.cat(parts)))), [mine]
        ),
        "reduce_scatter_tensor_coalesced": (
            into(1, lambda o: world.reduce_scatter_tensor_coalesced(o, [lazy(torch.cat(parts))]).wait()),
            [mine],
        ),
        "all_gather_into_tensor_coalesced": (
            into(1, lambda o: world.allgather_into_tensor_coalesced(o, [own]).wait(), 12), [whole]
        ),
        "all_reduce_coalesced": (coalesced, [total, total + SIZE]),
        "all_to_all": (
            into(SIZE, lambda o: dist.all_to_all(o, inputs())), [four(r) + 10 * rank for r in range(SIZE)]
        ),
        "all_to_all_single": (
            into(1, lambda o: dist.all_to_all_single(o[0], lazy(torch.cat(parts))), 12),
            [torch.cat([four(r) + 10 * rank for r in range(SIZE)])],
        ),
        "send and recv": (given(lambda t: message(t, 0)), received),
        "recv from any": (given(lambda t: message(t, None)), received),
    }  # fmt: skip


def check_lazy_views(rank: int) -> None:
    for kind, lazy in LAZY.items():
        for name, (run, wanted) in collectives_of(rank, lazy).items():
            try:
                found = run()
            except RuntimeError as refused:  # by torch, before the group has it
                assert kind == "conjugated" and "view_as_real doesn't work on" in str(refused), (name, kind)
                continue
            for have, want in zip(found, wanted, strict=True):
                numbers = torch.complex(want, -want) if kind == "conjugated" else want
                assert torch.equal(have.resolve_conj().resolve_neg(), numbers), (name, kind, have, numbers)
    largest = LAZY["negated"](four(rank))
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    assert torch.equal(largest.resolve_neg(), four(SIZE - 1))


@in_both_groups("hosts", ["aab", "abc"], python=["aab"], native=["aab"])
def test_views_that_are_negated_or_conjugated_take_results(tmp_path: Path, hosts: str) -> None:
    run_group(check_lazy_views, SIZE, tmp_path, hosts=hosts)


def check_alone(rank: int) -> None:
    import socket

    def no_network(*_: Any, **__: Any) -> None:
        raise AssertionError("a group of one needs no socket")

    socket.socket = no_network  # type: ignore[assignment,misc]
    dist.destroy_process_group()
    dist.init_process_group("shoal", store=dist.HashStore(), rank=0, world_size=1)
    tensor, whole = torch.arange(3.0), torch.tensor([-3, 5])
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT):
        dist.all_reduce(tensor, op)
    dist.all_reduce(whole, dist.ReduceOp.AVG)
    assert whole.tolist() == [-3, 5]
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    assert torch.equal(work.get_future().wait()[0], torch.arange(3.0))
    out = torch.empty(3)
    dist.all_gather_into_tensor(out, tensor)
    assert torch.equal(out, tensor)
    dist.reduce_scatter_tensor(out.zero_(), tensor)
    assert torch.equal(out, tensor)
    dist.barrier()
    assert group_counters()["ops_all_reduce"] == 5


def test_world_of_one_needs_no_network(tmp_path: Path) -> None:
    run_group(check_alone, 1, tmp_path)
