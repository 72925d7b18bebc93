"""Tests groups whose members change, through torch's interface (2.14): who they are, and what they sum."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shoal_workers import exit_codes, is_native, run_group, shoal_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.engine import CommError
from shoal.env.settings import NATIVE_GROUP
from shoal.errors import UsageError

pytestmark = pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"), reason=f"torch {torch.__version__} has no groups whose members change"
)
LIMIT = timedelta(seconds=20)
BOUND_S = 3 * 1.0
GROUPS = pytest.mark.parametrize("native", ["1", "0"], ids=["native", "python"])


def run(function: Callable[..., None], size: int, folder: Path, *args: Any, **given: Any) -> None:
    run_group(function, size, folder, *args, enable_reconfigure=True, **given)


def store() -> Any:
    return dist.distributed_c10d._get_default_store()


def handles(ranks: Sequence[int], key: str) -> list[str]:
    """Return the handles of these ranks, who all call it."""
    store().set(f"{key}/{os.environ['FIRST_RANK']}", dist._get_reconfigure_handle())
    return [store().get(f"{key}/{rank}").decode() for rank in ranks]


def meet(key: str, size: int) -> None:
    """Wait until so many processes have called it."""
    store().add(key, 1)
    while store().add(key, 0) < size:
        time.sleep(0.01)


def become(ranks: Sequence[int], uuid: int) -> None:
    dist._reconfigure(uuid, handles(ranks, f"generation/{uuid}"), timeout=LIMIT).wait()


def check_collectives(ranks: Sequence[int], first_rank: int) -> None:
    """Compare with what the members of this generation must get; numbers are those of the first ranks."""
    assert dist.get_world_size() == len(ranks)
    assert dist.get_rank() == ranks.index(first_rank)
    total = torch.full((1000,), float(first_rank))
    dist.all_reduce(total)
    assert total.eq(sum(ranks)).all()
    rows = torch.empty(len(ranks))
    dist.all_gather_into_tensor(rows, torch.tensor([float(first_rank)]))
    assert rows.tolist() == list(ranks)
    root = torch.full((3,), float(first_rank))
    dist.broadcast(root, group_src=len(ranks) - 1)
    assert root.tolist() == [ranks[-1]] * 3
    if len(ranks) == 1:
        return
    received = torch.zeros(4)
    after, before = (dist.get_rank() + 1) % len(ranks), (dist.get_rank() - 1) % len(ranks)
    sent = dist.isend(torch.full((4,), float(first_rank)), group_dst=after)
    dist.recv(received, group_src=before)
    assert sent is not None
    sent.wait()
    assert received.tolist() == [ranks[before]] * 4


def check_generations(rank: int, generations: Sequence[Sequence[int]]) -> None:
    os.environ["FIRST_RANK"] = str(rank)
    assert dist._supports_reconfigure()
    assert is_native() == (os.environ[NATIVE_GROUP] == "1")
    for number, ranks in enumerate(generations):
        if rank in ranks:
            become(ranks, 100 + number)
            check_collectives(ranks, rank)
        meet(f"met/{number}", max(map(max, generations)) + 1)


@GROUPS
@pytest.mark.parametrize(
    "generations",
    [
        [(0, 1, 2), (0, 1), (0, 2), (2, 1, 0), (1,), (0, 1, 2), (0, 1, 2)],
        [(4,), (4, 0, 3), (1, 2), (0, 1, 2, 3, 4)],
    ],
    ids=["3", "5"],
)
def test_members_leave_and_come(native: str, generations: list[tuple[int, ...]], tmp_path: Path) -> None:
    size = max(map(max, generations)) + 1
    run(check_generations, size, tmp_path, generations, environment={NATIVE_GROUP: native})


def test_members_on_several_hosts(tmp_path: Path) -> None:
    generations = [(0, 1, 2, 3), (0, 2, 3), (3, 0), (1, 3, 0, 2)]
    run(
        check_generations,
        4,
        tmp_path,
        generations,
        hosts=["a", "b", "b", "c"],
        environment={NATIVE_GROUP: "1"},
    )


def check_disjoint(rank: int) -> None:
    os.environ["FIRST_RANK"] = str(rank)
    ranks = (0, 2) if rank in (0, 2) else (1,)
    become(ranks, 10 + ranks[0])
    check_collectives(ranks, rank)
    members = set(handles(range(3), "merge"))
    dist._reconfigure(20, members, timeout=LIMIT).wait()
    check_collectives((0, 1, 2), rank)


def test_parts_become_one_group_in_the_order_of_their_first_ranks(tmp_path: Path) -> None:
    run(check_disjoint, 3, tmp_path)


def check_refusals(rank: int) -> None:
    os.environ["FIRST_RANK"] = str(rank)
    with pytest.raises(CommError, match=r"no members yet: call torch\.distributed\._reconfigure first"):
        dist.all_reduce(torch.ones(4))
    own = dist._get_reconfigure_handle()
    for wrong in ([], [own, own], [f"{1 - rank}-{'0' * 16}"]):
        with pytest.raises(UsageError, match="among them"):
            dist._reconfigure(1, wrong)
    with pytest.raises(UsageError, match="'gloo' is no handle"):
        dist._reconfigure(1, {own, "gloo"})
    dist._reconfigure(2 + rank, [own]).wait()
    with pytest.raises(CommError, match=f"uuid {2 + rank} was already used"):
        dist._reconfigure(2 + rank, [own])
    become((0, 1), 5)
    if rank == 0:
        with pytest.raises(CommError, match="rank 1"):  # which does not come
            dist._reconfigure(6, handles((0, 1), "lonely"), timeout=timedelta(seconds=1))
    else:
        handles((0, 1), "lonely")
    check_collectives((0, 1), rank)  # the former members remain


@GROUPS
def test_wrong_members_are_refused_and_the_former_ones_remain(native: str, tmp_path: Path) -> None:
    run(check_refusals, 2, tmp_path, environment={NATIVE_GROUP: native})


def check_abort(rank: int) -> None:
    os.environ["FIRST_RANK"] = str(rank)
    become((0, 1, 2), 1)
    pending = dist.all_reduce(torch.ones(4), async_op=True) if rank == 0 else None
    meet("begun", 3)
    if rank == 1:
        shoal_group().abort()
    meet("aborted", 3)
    if pending is not None:
        with pytest.raises(CommError, match="aborted it"):
            pending.wait()
    become((0, 1, 2), 2)
    check_collectives((0, 1, 2), rank)


@GROUPS
def test_an_aborted_group_goes_on(native: str, tmp_path: Path) -> None:
    run(check_abort, 3, tmp_path, environment={NATIVE_GROUP: native})


def sockets() -> set[str]:
    """Return the names of this process's open sockets."""
    files = [str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return {each for each in files if each.startswith("socket:")}


def check_killed(rank: int) -> None:
    os.environ["FIRST_RANK"] = str(rank)
    become((0, 1, 2, 3), 1)
    check_collectives((0, 1, 2, 3), rank)
    before = sockets()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(CommError, match="rank 1"):
        while True:
            dist.all_reduce(torch.ones(1000))
    become((0, 2, 3), 2)
    check_collectives((0, 2, 3), rank)
    assert time.monotonic() - begin < BOUND_S
    assert sockets() < before, "those to the survivors, and no others"


@pytest.mark.parametrize("hosts", [None, ["a", "b", "c", "c"]], ids=["one host", "three hosts"])
def test_survivors_of_a_killed_rank_go_on(hosts: list[str] | None, tmp_path: Path) -> None:
    codes = exit_codes(check_killed, 4, tmp_path, hosts=hosts, enable_reconfigure=True)
    assert codes == [0, -signal.SIGKILL, 0, 0]


# ---- DistributedDataParallel --------------------------------------------------------------------------


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))


def loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))
    result: torch.Tensor = module(inputs).square().mean()
    return result


def check_ddp(rank: int, generations: Sequence[Sequence[int]]) -> None:
    os.environ["FIRST_RANK"] = str(rank)
    become(generations[0], 100)
    trained, expected = model(), model()
    ddp = DistributedDataParallel(trained)
    for step, ranks in enumerate(generations):
        if step:
            become(ranks, 100 + step)
            ddp._update_process_group(dist.group.WORLD)
        for module in (trained, expected):
            module.zero_grad()
        loss(ddp, rank, step).backward()
        for each in ranks:
            (loss(expected, each, step) / len(ranks)).backward()
        for one, other in zip(trained.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
            one.data -= 0.1 * other.grad
            other.data.copy_(one.data)
        if step + 1 < len(generations) and rank not in generations[step + 1]:
            return


def test_ddp_averages_over_the_members_that_are_left(tmp_path: Path) -> None:
    run(check_ddp, 4, tmp_path, [(0, 1, 2, 3), (0, 1, 3), (3, 1)])
