"""Tests every collective on tensors without elements, alone and among others, as gloo has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shoal_workers import in_both_groups, run_group
from torch import Tensor

pytestmark = pytest.mark.usefixtures("both_groups")

SIZE = 3
SHAPES = ((0,), (0, 4), (3, 0))
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.complex64)
Collective = Callable[[], list[Tensor]]


def empty_collectives(
    group: Any, rank: int, shape: tuple[int, ...], dtype: torch.dtype
) -> dict[str, Collective]:
    """Return every collective of tensors of this shape, each as a function that returns its outputs."""
    own = torch.empty(shape, dtype=dtype)
    rows = torch.cat([own] * SIZE)
    is_root = rank == 1

    def several() -> list[Tensor]:
        return [torch.empty(shape, dtype=dtype) for _ in range(SIZE)]

    def into(run: Callable[[Any], Any], *outputs: Tensor) -> Collective:
        def done() -> list[Tensor]:
            work = run(outputs[0] if len(outputs) == 1 else list(outputs))
            if work is not None:
                work.wait()
            return list(outputs)

        return done

    def message() -> list[Tensor]:
        got = torch.empty(shape, dtype=dtype)
        if rank == 0:
            dist.send(own, 1, group)
        elif rank == 1:
            dist.recv(got, 0, group)
        return [got]

    def batch() -> list[Tensor]:
        got = torch.empty(shape, dtype=dtype)
        to, source = (rank + 1) % SIZE, (rank - 1) % SIZE
        operations = [dist.P2POp(dist.isend, own, to, group), dist.P2POp(dist.irecv, got, source, group)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return [got]

    return {
        "all_reduce": into(lambda o: dist.all_reduce(o, group=group), own.clone()),
        "all_reduce later": into(lambda o: dist.all_reduce(o, group=group, async_op=True), own.clone()),
        "reduce": into(lambda o: dist.reduce(o, 1, group=group), own.clone()),
        "broadcast": into(lambda o: dist.broadcast(o, 1, group=group), own.clone()),
        "all_gather": into(lambda o: dist.all_gather(o, own, group=group), *several()),
        "all_gather_into_tensor": into(lambda o: dist.all_gather_into_tensor(o, own, group), rows.clone()),
        "gather": into(lambda o: dist.gather(own, o if is_root else None, 1, group=group), *several()),
        "scatter": into(lambda o: dist.scatter(o, several() if is_root else None, 1, group), own.clone()),
        "reduce_scatter": into(lambda o: dist.reduce_scatter(o, several(), group=group), own.clone()),
        "reduce_scatter_tensor": into(lambda o: dist.reduce_scatter_tensor(o, rows, group=group), own[:]),
        "all_to_all": into(lambda o: dist.all_to_all(o, several(), group=group), *several()),
        "all_to_all_single": into(lambda o: dist.all_to_all_single(o, rows, group=group), rows.clone()),
        "send and recv": message,
        "batch_isend_irecv": batch,
    }  # fmt: skip


def outcome(run: Collective) -> list[tuple[torch.Size, torch.dtype]] | str:
    try:
        return [(tensor.shape, tensor.dtype) for tensor in run()]
    except (RuntimeError, ValueError, TypeError) as refused:
        return f"{type(refused).__name__}: {refused}"


def check_empty(rank: int) -> None:
    gloo = dist.new_group(backend="gloo")
    for dtype in DTYPES:
        for shape in SHAPES:
            by_gloo = empty_collectives(gloo, rank, shape, dtype)
            for name, run in empty_collectives(dist.group.WORLD, rank, shape, dtype).items():
                found, wanted = outcome(run), outcome(by_gloo[name])
                assert not isinstance(found, str), (name, shape, dtype, found, wanted)
                assert isinstance(wanted, str) or found == wanted, (name, shape, dtype, found, wanted)
    check_in_step(rank)


def check_in_step(rank: int) -> None:
    """Check that nothing of an empty operation is left: the next one has its own values."""
    ones = torch.full((5,), rank + 1.0)
    dist.all_reduce(ones)
    assert ones.tolist() == [6.0] * 5


@in_both_groups("hosts", ["aaa", "aab", "abc"], python=["aab"], native=["aab", "abc"])
def test_collectives_of_empty_tensors_are_those_of_gloo(tmp_path: Path, hosts: str) -> None:
    run_group(check_empty, SIZE, tmp_path, hosts=hosts)


def check_reductions(rank: int) -> None:
    for dtype, names in ((torch.float32, "SUM AVG PRODUCT MIN MAX"), (torch.int64, "AVG BAND BOR BXOR")):
        for name in names.split():
            op = getattr(dist.ReduceOp, name)
            for tensor in (torch.empty(0, dtype=dtype), torch.empty(4, 0, dtype=dtype)):
                dist.all_reduce(tensor, op)
                dist.reduce(tensor, 2, op)
                dist.reduce_scatter_tensor(torch.empty(0, dtype=dtype), tensor.view(-1), op)
    check_in_step(rank)


@in_both_groups("hosts", ["aab", "abc"], python=["aab"], native=["aab"])
def test_every_reduction_of_nothing_is_nothing(tmp_path: Path, hosts: str) -> None:
    run_group(check_reductions, SIZE, tmp_path, hosts=hosts)


def rows_of(rank: int, to: int) -> Tensor:
    """Return what ``rank`` sends to ``to``: nothing to itself and to rank 0."""
    count = 0 if to in (rank, 0) else rank + 1
    return torch.full((count, 2), 10.0 * rank + to)


def check_among_others(rank: int) -> None:
    """Parts of an operation are empty, others are not."""
    world: Any = dist.group.WORLD
    sent, wanted = (
        [rows_of(rank, to) for to in range(SIZE)],
        [rows_of(source, rank) for source in range(SIZE)],
    )
    got = [torch.empty_like(part) for part in wanted]
    dist.all_to_all(got, sent)
    assert all(torch.equal(part, want) for part, want in zip(got, wanted, strict=True))
    whole = torch.empty(sum(map(len, wanted)), 2)
    dist.all_to_all_single(whole, torch.cat(sent), list(map(len, wanted)), list(map(len, sent)))
    assert torch.equal(whole, torch.cat(wanted))

    mixed = [torch.empty(0), torch.full((3,), rank + 1.0), torch.empty(2, 0)]
    world.allreduce_coalesced(mixed).wait()
    assert mixed[1].tolist() == [6.0] * 3 and [len(each) for each in mixed] == [0, 3, 2]
    with dist._coalescing_manager():
        for tensor in mixed:
            dist.all_reduce(tensor)
    assert mixed[1].tolist() == [18.0] * 3

    outputs = [torch.empty(0, 4), torch.empty(SIZE * 2), torch.empty(0)]
    inputs = [torch.empty(0, 4), torch.full((2,), float(rank)), torch.empty(0)]
    world.allgather_into_tensor_coalesced(outputs, inputs).wait()
    assert outputs[1].tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    with dist._coalescing_manager():
        for output, given in zip(outputs, inputs, strict=True):
            dist.all_gather_into_tensor(output.zero_(), given)
    assert outputs[1].tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    summed = [torch.empty(0, 4), torch.empty(2), torch.empty(0)]
    world.reduce_scatter_tensor_coalesced(summed, [outputs[0], outputs[1], outputs[2]]).wait()
    assert summed[1].tolist() == [3.0 * rank] * 2
    with dist._coalescing_manager():
        for output, given in zip(summed, outputs, strict=True):
            dist.reduce_scatter_tensor(output.zero_(), given)
    assert summed[1].tolist() == [3.0 * rank] * 2
    check_in_step(rank)


@in_both_groups("hosts", ["aab", "abc"], python=["aab"], native=["abc"])
def test_empty_parts_among_others_change_nothing(tmp_path: Path, hosts: str) -> None:
    run_group(check_among_others, SIZE, tmp_path, hosts=hosts)
