"""Tests works and futures, subgroups, and errors."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shoal_workers import (
    exit_codes,
    in_both_groups,
    is_native,
    num_pending,
    run_group,
    sequence_number,
    shoal_group,
)
from torch.distributed.device_mesh import init_device_mesh

from shoal.comm.engine import CommError

pytestmark = pytest.mark.usefixtures("both_groups")
ONE_GROUP = pytest.mark.parametrize("both_groups", ["native"], indirect=True)
"""For programs of which the kind of group changes nothing."""


def _is_at_least_2_15() -> bool:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return (major, minor) >= (2, 15)


@contextlib.contextmanager
def raises(kind: type[Exception], *words: str) -> Any:
    with pytest.raises(kind) as caught:
        yield
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, (missing, str(caught.value))


# ---- asynchronous work --------------------------------------------------------------------------------


def check_async(rank: int) -> None:
    tensors = [torch.full((1000,), float(rank + i)) for i in range(50)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for i, work in reversed(list(enumerate(works))):
        assert work is not None
        assert work.wait()
        assert (tensors[i] == 3 + 3 * i).all()
        assert work.is_completed()
        assert work.is_success()
    # a future, and a chain of callbacks behind it
    tensor = torch.full((10,), float(rank))
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    future = work.get_future()
    halved = future.then(lambda done: done.value()[0] / 2)
    assert halved.then(lambda done: done.value().sum().item()).wait() == 15
    assert future.wait()[0] is tensor or torch.equal(future.wait()[0], tensor)
    assert is_native() or work.get_future() is future  # torch wraps a C++ future in a new object each time
    assert work.wait(timedelta(seconds=5))
    # without any wait: also a result that must be copied back arrives
    strided = torch.full((4, 4), float(rank)).t()[1:]
    work = dist.all_reduce(strided, async_op=True)
    assert work is not None
    while not work.is_completed():
        time.sleep(0.001)
    assert (strided == 3).all()
    # what has been waited for is let go before another operation
    tensor = torch.full((10,), 1.0)
    seen, work = weakref.ref(tensor), dist.all_reduce(tensor, async_op=True)
    assert work is not None and work.wait()
    del work, tensor
    assert not is_native() or seen() is None
    # dropping work and tensors disturbs nothing
    for _ in range(20):
        dist.all_reduce(torch.full((5000,), 1.0), async_op=True)
    gc.collect()
    dist.barrier()
    dist.barrier()
    assert num_pending() <= 1, "what is done is let go"
    objects: Any = dist.barrier(async_op=True)
    objects.get_future().wait()


def test_async_works_and_futures(tmp_path: Path) -> None:
    run_group(check_async, 3, tmp_path)


def check_wait_timeout(rank: int) -> None:
    tensor = torch.full((3,), float(rank))
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        with raises(CommError, "all_reduce", "0.2 s"):
            work.wait(timedelta(seconds=0.2))
        assert not work.is_completed()
        work.wait()
    else:
        time.sleep(0.6)
        dist.all_reduce(tensor)
    assert tensor.tolist() == [1, 1, 1]


def test_a_wait_may_end_before_its_operation(tmp_path: Path) -> None:
    run_group(check_wait_timeout, 2, tmp_path)


def check_operation_timeouts(rank: int) -> None:
    """Rank 0 begins each operation, in a group of its own, and rank 1 never does."""
    kinds, tensor, rows = torch._C._distributed_c10d, torch.ones(4), list(torch.ones(2, 4))
    begins: dict[str, tuple[str, Any]] = {
        "all_reduce": ("AllreduceOptions", lambda group, o: group.allreduce([tensor], o)),
        "all_reduce_coalesced": (
            "AllreduceCoalescedOptions", lambda group, o: group.allreduce_coalesced([tensor, tensor], o)
        ),
        "reduce": ("ReduceOptions", lambda group, o: group.reduce([tensor], o)),
        "broadcast": ("BroadcastOptions", lambda group, o: group.broadcast([tensor], o)),
        "all_gather": ("AllgatherOptions", lambda group, o: group.allgather([rows], [tensor], o)),
        "all_gather of rows": (
            "AllgatherOptions", lambda group, o: group._allgather_base(torch.ones(8), tensor, o)
        ),
        "gather": ("GatherOptions", lambda group, o: group.gather([rows], [tensor], o)),
        "scatter": ("ScatterOptions", lambda group, o: group.scatter([tensor], [], o)),
        "reduce_scatter": (
            "ReduceScatterOptions", lambda group, o: group._reduce_scatter_base(tensor, torch.ones(8), o)
        ),
        "all_to_all": (
            "AllToAllOptions",
            lambda group, o: group.alltoall_base(torch.ones(8), torch.ones(8), [], [], o),
        ),
        "barrier": ("BarrierOptions", lambda group, o: group.barrier(o)),
    }  # fmt: skip
    for kind, (options_kind, begin) in begins.items():
        for milliseconds in (0, -5000) if kind in ("all_reduce", "barrier") else (0,):
            group: Any = dist.new_group()
            if rank == 0:
                options = getattr(kinds, options_kind)()
                options.timeout = timedelta(milliseconds=milliseconds)
                if kind in ("broadcast", "scatter"):
                    options.rootRank = 1
                with raises(CommError, "the timeout of 0.0 s passed", "rank 1"):
                    begin(group, options).wait(timedelta(seconds=20))
    for limit_s, message in (
        (0.2, "timeout of 0.2 s"),
        (0.0, "timeout of 0.0 s"),
        (-0.001, "timeout of 0.0 s"),
    ):
        group = dist.new_group()
        group.set_timeout(timedelta(seconds=limit_s))
        if rank == 0:  # without a timeout of its own
            with raises(CommError, message):
                group.allreduce([tensor], kinds.AllreduceOptions()).wait(timedelta(seconds=20))
    dist.barrier()


@pytest.mark.parametrize(
    "both_groups", [pytest.param("python", marks=pytest.mark.slow), "native"], indirect=True
)
def test_a_timeout_of_zero_or_less_has_passed(tmp_path: Path) -> None:
    """As in gloo. -1 ms is torch's for operations that have none of their own."""
    run_group(check_operation_timeouts, 2, tmp_path, hosts=("a", "b"))


def check_other_waits(rank: int) -> None:
    tensor = torch.ones(2)
    if rank == 1:
        time.sleep(0.3)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    if rank == 0:
        for passed in (timedelta(milliseconds=-1), timedelta(seconds=-5)):
            with raises(CommError, "still pending"):
                work.wait(passed)
        assert not work.is_completed()
    work.wait(timedelta(days=365 * 200))
    assert tensor.tolist() == [2, 2]
    world: Any = dist.group.WORLD
    options = torch._C._distributed_c10d.AllreduceOptions()
    options.timeout = timedelta(days=365 * 200)
    world.allreduce([tensor], options).wait(timedelta(0))
    assert tensor.tolist() == [4, 4]
    if _is_at_least_2_15():
        world.monitored_barrier(timedelta(days=365 * 200))
        if rank == 0:
            for passed in (timedelta(0), timedelta(seconds=-5)):
                with raises(CommError, "Rank 0 timed out in monitoredBarrier"):
                    world.monitored_barrier(passed)


def test_waits_without_end_or_beginning(tmp_path: Path) -> None:
    run_group(check_other_waits, 2, tmp_path)


# ---- groups -------------------------------------------------------------------------------------------


def check_groups(rank: int) -> None:
    world: Any = dist.group.WORLD
    assert dist.get_backend() == "shoal"
    assert is_native() or world.name() == "shoal"  # of a C++ backend that torch does not know: "custom"
    assert world.group_name == dist.distributed_c10d._world.pg_names[world]
    before = sequence_number(world)
    dist.barrier()
    assert sequence_number(world) == before + 1
    odd, even = dist.new_group([1, 3]), dist.new_group([0, 2])
    mine: Any = odd if rank % 2 else even
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=mine)
    assert tensor.item() == (4 if rank % 2 else 2)
    assert sequence_number(world) == before + 1, "each group has its own numbers"
    subgroup, _ = dist.new_subgroups(2)
    tensor = torch.tensor([float(rank)])
    dist.broadcast(tensor, rank // 2 * 2 + 1, group=subgroup)
    assert tensor.item() == rank // 2 * 2 + 1
    if _is_at_least_2_15():  # before, torch splits groups of accelerators only
        part: Any = dist.split_group(split_ranks=[[0, 1, 2], [3]])
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=part)
        assert tensor.item() == (1 if rank == 3 else 3)
        dist.destroy_process_group(part)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=mesh.get_group("columns"))
    assert tensor.item() == [1, 5][rank // 2]
    dist.all_reduce(tensor, group=mesh.get_group("rows"))
    assert tensor.item() == 6
    gloo = dist.new_group(backend="gloo")
    dist.all_reduce(tensor, group=gloo)
    assert tensor.item() == 24
    world.set_timeout(timedelta(seconds=77))
    assert shoal_group().operations.timeout == timedelta(seconds=77)


def test_groups_and_meshes(tmp_path: Path) -> None:
    run_group(check_groups, 4, tmp_path)


def check_again(rank: int, folder: Path) -> None:
    for attempt in range(3):
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == 2
        dist.destroy_process_group()
        dist.init_process_group(
            "cpu:shoal", init_method=f"file://{folder}/again{attempt}", rank=rank, world_size=2
        )
        assert type(shoal_group()).__name__ == "ShoalProcessGroup"


def test_groups_end_and_begin_again_in_one_process(tmp_path: Path) -> None:
    run_group(check_again, 2, tmp_path, tmp_path)


@ONE_GROUP
def test_name_is_known_without_an_import() -> None:
    """Neither ``import torch`` nor the entry point loads the backend itself; the first group does."""
    program = """
import sys, torch, torch.distributed as dist
assert "shoal.comm.backend" not in sys.modules, "import torch must not load it"
dist.init_process_group("shoal", store=dist.HashStore(), rank=0, world_size=1)
assert "shoal.comm.backend" in sys.modules
dist.all_reduce(torch.ones(1))
assert "shoal.comm.cuda_device" not in sys.modules, "only a CUDA tensor needs it"
assert dist.Backend.backend_capability["shoal"] == ["cpu", "cuda"]
assert dist.Backend.default_device_backend_map["cuda"] == "nccl"
dist.destroy_process_group()
"""
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr


@ONE_GROUP
def test_package_without_frameworks() -> None:
    program = """
import sys
sys.modules |= dict.fromkeys(("torch", "jax", "tensorflow", "keras"))
import shoal.comm
assert "numpy" not in sys.modules
import shoal.comm.job_group, shoal.comm.server
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def check_monitored(rank: int) -> None:
    dist.monitored_barrier()
    if rank == 0:
        with raises(CommError, "Ranks 1, 2 failed to pass monitoredBarrier"):
            dist.monitored_barrier(timeout=timedelta(seconds=0.3), wait_all_ranks=True)


def test_monitored_barrier_names_who_is_missing(tmp_path: Path) -> None:
    if not _is_at_least_2_15():
        pytest.skip("torch locks monitored_barrier to the name gloo before 2.15")
    run_group(check_monitored, 3, tmp_path)


# ---- errors -------------------------------------------------------------------------------------------


def check_refused(rank: int) -> None:
    world: Any = dist.group.WORLD
    tensor = torch.ones(2)
    with raises(ValueError, "band of a torch.float32 tensor"):
        dist.all_reduce(tensor, dist.ReduceOp.BAND)
    with raises(ValueError, "int16"):
        dist.all_reduce(tensor.short())
    with raises(ValueError, "avg of a torch.bool"):
        dist.all_reduce(tensor.bool(), dist.ReduceOp.AVG)
    if not is_native():  # with a C++ backend torch itself takes tensors without data, and does nothing
        with raises(ValueError, "meta", "CPU and CUDA tensors"):
            dist.all_reduce(tensor.to("meta"))
    with raises(ValueError, "share memory"):
        dist.all_reduce(torch.ones(1).expand(5))
    with raises(ValueError, "(5,)", "(2,)", "2 (the ranks of the group) times"):
        gather = getattr(world, "all_gather_single", None) or world._allgather_base  # torch 2.11
        gather(torch.empty(5), tensor).wait()
    with raises(ValueError, "3 output tensors for 2 ranks"):
        dist.all_gather([tensor.clone() for _ in range(3)], tensor)
    with raises(ValueError, "pg_options"):
        dist.new_group(pg_options=dist.ProcessGroupGloo._Options())
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2, 2], "nothing of this has harmed the group"


def test_what_cannot_be_is_refused_at_once(tmp_path: Path) -> None:
    run_group(check_refused, 2, tmp_path)


MISMATCHES = {
    "shape": ("all_reduce of float32[3]", "all_reduce of float32[4]"),
    "dtype": ("all_reduce of int32[3]", "all_reduce of float32[3]"),
    "order": ("broadcast of float32[3]", "all_reduce of float32[3]"),
    "op": ("float32[3] (sum)", "float32[3] (max)"),
    "messages": ("scatter of float32[3] from rank 0", "all_reduce of float32[3]"),
}
"""The collectives of the two ranks in the message."""


def check_mismatch(rank: int, case: str) -> None:
    tensor, store = torch.ones(3), dist.distributed_c10d._get_default_store()
    with raises(CommError, "the ranks do not agree", *MISMATCHES[case]):
        if case == "shape":
            dist.all_reduce(torch.ones(3 + rank))
        elif case == "dtype":
            dist.all_reduce(tensor if rank else tensor.int())
        elif case == "order":
            dist.all_reduce(tensor) if rank else dist.broadcast(tensor, 0)
        elif case == "op":
            dist.all_reduce(tensor, dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)
        elif case == "messages":
            dist.all_reduce(tensor) if rank else dist.scatter(tensor, [tensor.clone(), tensor.clone()], src=0)
            store.wait(["rank 1 knows"])  # the root's part of a scatter may be over before
            dist.barrier()
    store.set(f"rank {rank} knows", "")
    with raises(CommError, "the ranks do not agree", *MISMATCHES[case]):
        dist.barrier()  # a group that has failed stays so


@in_both_groups("case", list(MISMATCHES), python=["messages"])
def test_ranks_that_do_not_do_the_same_are_told(tmp_path: Path, case: str) -> None:
    run_group(check_mismatch, 2, tmp_path, case)


def check_death(rank: int, kind: str, folder: Path) -> None:
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with raises(CommError, "rank 2"):
        if kind == "engine":
            dist.all_reduce(torch.ones(1000))
        elif kind == "messages":
            dist.all_to_all_single(torch.empty(3), torch.ones(3))
        elif rank == 0:
            dist.recv(torch.empty(1), 2)
        else:
            dist.barrier()
    assert time.monotonic() - begin < 9, "3 times the 3 s in which a death is named"
    (folder / f"survived{rank}").touch()
    os._exit(0)


@in_both_groups("kind", ["engine", "messages", "message"], python=["messages"])
def test_a_dead_rank_is_named(tmp_path: Path, kind: str) -> None:
    codes = exit_codes(check_death, 3, tmp_path, kind, tmp_path)
    assert codes == [0, 0, -signal.SIGKILL]
    assert (tmp_path / "survived0").exists()
    assert (tmp_path / "survived1").exists()


def check_abort(rank: int) -> None:
    world: Any = dist.group.WORLD
    if rank == 0:
        time.sleep(0.3)
        world.abort()
    else:
        with raises(CommError, "rank 0", "aborted"):
            dist.all_reduce(torch.ones(1))


def test_abort_frees_all_waiters(tmp_path: Path) -> None:
    run_group(check_abort, 3, tmp_path)
