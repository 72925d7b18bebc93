"""Tests all_to_all, gather, scatter, send and recv: exact results beside gloo's, and what goes wrong."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shoal_workers import (
    exit_codes,
    group_counters,
    in_both_groups,
    num_pending,
    ops,
    run_group,
    sequence_number,
)
from test_backend_work import raises
from torch import Tensor

from shoal.comm.engine import CommError

pytestmark = pytest.mark.usefixtures("both_groups")

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32,
    torch.int64, torch.bool, torch.complex64,
]  # fmt: skip
SIZE = 3
HOSTS = ("a", "a", "b")
SPLITS: dict[str, Callable[[int, int], int]] = {
    "even": lambda source, target: 2,
    "uneven": lambda source, target: 1 + (source + 2 * target) % 4,
    "some empty": lambda source, target: 5 * ((source + target) % 2),
    "all empty": lambda source, target: 0,
    "large": lambda source, target: 90_000 + 1000 * source + target,
}
"""Rows that a rank sends to another."""


def data(dtype: torch.dtype, rows: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(-100, 100, (rows, 3), generator=random).to(dtype)


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def check_exchanges(rank: int) -> None:
    gloo = dist.new_group(backend="gloo")
    for number, dtype in enumerate(DTYPES):
        for name, rows in SPLITS.items():
            if name == "large" and number % 5:
                continue
            given = [rows(rank, peer) for peer in range(SIZE)]
            taken = [rows(peer, rank) for peer in range(SIZE)]
            sent = data(dtype, sum(given), 10 * number + rank)
            parts = list(sent.split(given))
            found: list[list[Tensor]] = []
            for group in (None, gloo):
                whole = torch.zeros((sum(taken), 3), dtype=dtype)
                dist.all_to_all_single(whole, sent, taken, given, group=group)
                each = [torch.zeros((count, 3), dtype=dtype) for count in taken]
                if group is None:
                    dist.all_to_all(each, parts)
                else:  # gloo takes no lists
                    each = [part.clone() for part in whole.split(taken)]
                found.append([whole, *each])
            assert same(*found), (name, dtype)
    even = torch.arange(SIZE * 2.0) + 10 * rank
    for group in (None, gloo):
        got = torch.empty(SIZE * 2)
        dist.all_to_all_single(got, even, group=group)
        assert got.tolist() == [10.0 * peer + 2 * rank + k for peer in range(SIZE) for k in range(2)]
    # neither input nor output is contiguous
    columns = (torch.arange(SIZE * 4.0).view(4, SIZE) + 100 * rank).t()
    target = torch.zeros(4, SIZE).t()
    dist.all_to_all_single(target, columns)
    assert torch.equal(
        target, torch.stack([torch.arange(4.0) * SIZE + rank + 100 * peer for peer in range(SIZE)])
    )


def check_rooted(rank: int) -> None:
    gloo = dist.new_group(backend="gloo")
    for dtype, count, root in itertools.product(DTYPES, (0, 1, 30_001), range(SIZE)):
        mine = data(dtype, count, 5 + rank)
        rows = [data(dtype, count, 50 + root + peer) for peer in range(SIZE)]
        wanted = [data(dtype, count, 5 + peer) for peer in range(SIZE)] if rank == root else []
        for group in (None, gloo):
            if group is gloo and (dtype.is_complex or count == 0):  # which gloo does not take
                continue
            gathered = [torch.zeros_like(mine) for _ in wanted]
            dist.gather(mine, gathered if rank == root else None, root, group)
            part = torch.zeros_like(mine)
            dist.scatter(part, rows if rank == root else None, root, group)
            assert same([*gathered, part], [*wanted, rows[rank]]), (dtype, count, root, group)
    objects: list[Any] | None = [None] * SIZE if rank == 0 else None
    dist.gather_object(rank * 10, objects)
    assert objects in (None, [0, 10, 20])
    taken: list[Any] = [None]
    dist.scatter_object_list(taken, [["for", peer] for peer in range(SIZE)], src=1)
    assert taken == [["for", rank]]


def check_messages(rank: int) -> None:
    gloo = dist.new_group(backend="gloo")
    following, previous = (rank + 1) % SIZE, (rank - 1) % SIZE
    for dtype, count in itertools.product(DTYPES, (0, 1, 40_000)):
        found: list[list[Tensor]] = []
        for group in (None, gloo):
            # a ring in which everybody sends first; taken in another order than sent, by tag
            works = [dist.isend(data(dtype, count, rank + tag), following, group, tag) for tag in (1, 2)]
            taken = {tag: torch.zeros((count, 3), dtype=dtype) for tag in (2, 1)}
            works += [dist.irecv(tensor, previous, group, tag) for tag, tensor in taken.items()]
            for work in works:
                assert work is not None
                work.wait()
            found.append(list(taken.values()))
        assert same(*found), (dtype, count)
    before = sequence_number()
    strided = torch.zeros(4, 2).t()
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.full((2, 4), float(rank)).t().contiguous().t(), following),
            dist.P2POp(dist.irecv, strided, previous),
        ]
    )
    for work in works:
        work.wait()
    assert (strided == previous).all()
    after = sequence_number()
    assert after == before, "messages have no number"
    if rank == 0:  # from anybody: each comes once, with its source
        seen = {}
        for _ in range(SIZE - 1):
            tensor = torch.empty(1)
            source = dist.recv(tensor)
            seen[source] = tensor.item()
        assert seen == {peer: 10.0 * peer for peer in range(1, SIZE)}
    else:
        dist.send(torch.tensor([10.0 * rank]), 0)
    if rank == 1:
        dist.send_object_list([{"of": rank}], dst=2)
    if rank == 2:
        objects: list[Any] = [None]
        assert dist.recv_object_list(objects, src=1) == 1
        assert objects == [{"of": 1}]


def check_sparse(rank: int) -> None:
    gloo = dist.new_group(backend="gloo")
    for count, dense in ((SIZE, ()), (0, ()), (rank, (2,)), (4, (2, 3))):
        found = []
        for group in (None, gloo):
            rows = torch.tensor([[(rank + 2 * k) % 5 for k in range(count)]], dtype=torch.int64).view(
                1, count
            )
            values = torch.arange(1.0, 1 + rows.shape[1]).view(-1, *[1] * len(dense)).expand(-1, *dense)
            tensor = torch.sparse_coo_tensor(rows, values.clone(), (5, *dense))
            dist.all_reduce(tensor, group=group)
            found.append(tensor.to_dense())
        assert same(found[:1], found[1:]), (count, dense, found)
    with raises(ValueError, "sparse tensors can only be summed"):
        dist.all_reduce(torch.sparse_coo_tensor([[0]], [1.0], (2,)), dist.ReduceOp.MAX)


def check_counts(rank: int) -> None:
    dist.all_to_all_single(torch.empty(SIZE), torch.ones(SIZE))
    dist.gather(torch.ones(2), [torch.empty(2) for _ in range(SIZE)] if rank == 1 else None, 1)
    dist.scatter(torch.empty(2), [torch.ones(2)] * SIZE if rank == 1 else None, 1)
    assert [ops(kind) for kind in ("all_to_all", "gather", "scatter", "delegated")] == [1, 1, 1, 0]
    counted = sum(n for name, n in group_counters().items() if name.startswith("ops_"))
    world: Any = dist.group.WORLD
    assert counted == sequence_number(world)
    # what nobody waits for arrives, and is let go
    works = [dist.all_to_all_single(torch.empty(SIZE), torch.ones(SIZE), async_op=True) for _ in range(20)]
    pending = dist.irecv(torch.empty(1), (rank - 1) % SIZE, tag=9)
    for _ in range(20):
        dist.all_reduce(torch.ones(100), async_op=True)
    del works
    dist.barrier()
    dist.barrier()
    deadline = time.monotonic() + 10  # a thread lets go of them
    while num_pending() > 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert num_pending() <= 2, "a receive that waits holds nothing else"
    dist.send(torch.ones(1), (rank + 1) % SIZE, tag=9)
    assert pending is not None
    pending.wait()


CHECKS = [check_exchanges, check_rooted, check_messages, check_sparse, check_counts]


@pytest.mark.parametrize("check", CHECKS)
def test_results_are_those_of_gloo(tmp_path: Path, check: Callable[[int], None]) -> None:
    run_group(check, SIZE, tmp_path, hosts=HOSTS)


@pytest.mark.parametrize("check", [check_exchanges, check_rooted, check_counts])
def test_results_are_those_of_gloo_on_one_host(tmp_path: Path, check: Callable[[int], None]) -> None:
    run_group(check, SIZE, tmp_path)


def check_apart(rank: int) -> None:
    if rank == 0:
        send: Any = dist.isend(torch.full((100_000,), 5.0), 1)  # nobody is there to take it yet
        with raises(CommError, "send", "waited 0.1 s", "still pending"):
            send.wait(timedelta(seconds=0.1))
        dist.barrier()
        send.wait()
        found = torch.empty(1)
        assert dist.recv(found) == 1
        assert found.item() == 7
    elif rank == 1:
        dist.barrier()
        taken = torch.empty(100_000)
        dist.recv(taken, 0)
        assert (taken == 5).all()
        dist.send(torch.tensor([7.0]), 0)
    else:
        dist.barrier()
    dist.barrier()


def test_two_ranks_talk_while_others_are_elsewhere(tmp_path: Path) -> None:
    run_group(check_apart, SIZE, tmp_path)


def check_refused(rank: int) -> None:
    world: Any = dist.group.WORLD
    with raises(ValueError, "shape (3,)", "split sizes [1, 1]", "add up to its first dimension"):
        dist.all_to_all_single(torch.empty(3), torch.ones(3), [1, 1], [1, 2])
    with raises(ValueError, "all_to_all", "overlaps an input"):
        both = torch.ones(4)
        dist.all_to_all_single(both, both)
    with raises(ValueError, "1 output tensors for 2 ranks"):
        world.alltoall([torch.ones(1)], [torch.ones(1)] * 2, dist.AllToAllOptions()).wait()
    with raises(ValueError, "all dtypes must be the same"):
        whole = [torch.empty(1, dtype=torch.int32) for _ in range(2)]
        world.alltoall(whole, [torch.ones(1)] * 2, dist.AllToAllOptions()).wait()
    with raises(ValueError, f"a message between rank {rank} and rank 2 of a group of 2"):
        world.send([torch.ones(1)], 2, 0)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2, 2], "nothing of this has harmed the group"


def test_what_cannot_be_is_refused_at_once(tmp_path: Path) -> None:
    run_group(check_refused, 2, tmp_path)


def check_sizes_differ(rank: int) -> None:
    with raises(
        CommError, "do not agree about the part of operation #0, all_to_all", "sends 1 elements of float32"
    ):
        dist.all_to_all_single(
            torch.empty(2), torch.ones(2), [1, 1], [1, 1]
        ) if rank else dist.all_to_all_single(torch.empty(4), torch.ones(2), [1, 3], [1, 1])
        dist.barrier()


def test_sizes_that_do_not_fit_name_both_ranks(tmp_path: Path) -> None:
    run_group(check_sizes_differ, 2, tmp_path)


def check_lost(rank: int, kind: str) -> None:
    count = 3_000_000
    whole, parts = torch.ones(SIZE * count), [torch.ones(count) for _ in range(SIZE)]
    if rank == 2:
        dist.barrier()
        if kind in ("all_to_all", "gather"):  # it dies while its data is on the way
            dist.all_to_all_single(
                torch.empty_like(whole), whole, async_op=True
            ) if kind == "all_to_all" else dist.gather(parts[0], None, 0, async_op=True)
        os.kill(os.getpid(), signal.SIGKILL)
    with raises(CommError, "rank 2"):
        dist.barrier()  # the loss may be seen before its end
        for _ in range(3):
            if kind == "all_to_all":
                dist.all_to_all_single(torch.empty_like(whole), whole)
            elif kind == "gather":
                dist.gather(parts[0], parts[:] if rank == 0 else None, 0)
            elif kind == "scatter":
                dist.scatter(torch.empty(count), parts if rank == 0 else None, 0)
            else:
                dist.recv(torch.empty(1), 2 if rank == 0 else None)
            dist.barrier()
    os._exit(0)


@in_both_groups("kind", ["all_to_all", "gather", "scatter", "recv"], python=["all_to_all"])
def test_a_rank_is_lost_in_the_middle(tmp_path: Path, kind: str) -> None:
    codes = exit_codes(check_lost, SIZE, tmp_path, kind, hosts=HOSTS)
    assert codes == [0, 0, -signal.SIGKILL]


@pytest.mark.parametrize("kind", ["all_to_all", pytest.param("gather", marks=pytest.mark.slow)])
def test_a_rank_of_the_same_host_is_lost_in_the_middle(tmp_path: Path, kind: str) -> None:
    codes = exit_codes(check_lost, SIZE, tmp_path, kind)
    assert codes == [0, 0, -signal.SIGKILL]
