"""Tests callbacks of futures that issue collectives of their group; PyTorch's PowerSGD hook."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shoal_workers import in_both_groups, run_group, thread_names
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.engine import EngineOptions

pytestmark = pytest.mark.usefixtures("both_groups")


def begun(tensor: Tensor, group: Any = None) -> Future[Any]:
    work: Any = dist.all_reduce(tensor, group=group, async_op=True)
    future: Future[Any] = work.get_future()
    return future


def num_threads() -> int:
    """Return how many threads set futures."""
    return thread_names().count("shoal-futures")


def check_nested(rank: int, size: int) -> None:
    def deeper(levels: int) -> Any:
        def callback(future: Future[Any]) -> Any:
            total = future.value()[0]
            if levels == 0:
                return total
            return begun(total.clone()).then(deeper(levels - 1)).wait()

        return callback

    for _ in range(20):
        found = begun(torch.ones(3)).then(deeper(3)).wait()
        assert found.tolist() == [size**4] * 3
    assert num_threads() <= 4, "they are used again"
    # a callback that waits for what was begun after its own operation, and for what hangs on that
    tensors = [torch.full((4,), float(i)) for i in range(3)]
    futures = [begun(tensor) for tensor in tensors]
    last = futures[2].then(lambda future: future.value()[0] + 1)
    total = futures[0].then(lambda future: future.value()[0] + futures[1].wait()[0] + last.wait())
    assert total.wait().tolist() == [3 * size + 1] * 4
    assert num_threads() <= 6


@in_both_groups("size", [2, 4], python=[2], native=[4])
def test_callbacks_may_wait_for_futures_of_their_group(tmp_path: Path, size: int) -> None:
    run_group(check_nested, size, tmp_path, size)


def check_order(rank: int) -> None:
    seen = []

    def note(i: int) -> Any:
        def callback(future: Future[Any]) -> None:
            time.sleep(0.005 * (i % 3))
            seen.append(i)

        return callback

    works: list[Any] = [dist.all_reduce(torch.ones(1 + 1000 * (i % 2)), async_op=True) for i in range(20)]
    for future in [work.get_future().then(note(i)) for i, work in enumerate(works)]:
        future.wait()
    assert seen == list(range(20)), "in the order of their operations"
    assert num_threads() == 1


def test_ordinary_callbacks_need_one_thread(tmp_path: Path) -> None:
    run_group(check_order, 2, tmp_path)


def check_overtaken(rank: int) -> None:
    if rank == 1:
        time.sleep(0.5)  # rank 0 has its callback by then
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))
        return
    go_on = threading.Event()

    def callback(future: Future[Any]) -> Any:
        go_on.wait()
        return begun(torch.ones(1)).wait()

    late = begun(torch.ones(1)).then(callback)
    dist.all_reduce(torch.ones(1))
    go_on.set()
    with pytest.raises(RuntimeError, match=r"has begun other collectives of this group.*ordered_callbacks"):
        late.wait()


def test_callbacks_that_the_program_has_overtaken_are_told(tmp_path: Path) -> None:
    run_group(check_overtaken, 2, tmp_path)


# ---- PowerSGD -----------------------------------------------------------------------------------------


def waited_for(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    """PowerSGD, done when the hook returns: otherwise gloo ends the process, with several buckets often."""
    done: Future[Tensor] = Future()
    done.set_result(powerSGD_hook.powerSGD_hook(state, bucket).wait())
    return done


def train(rank: int, cap_mb: float, folder: Path) -> None:
    is_ours = dist.get_backend() == "shoal"
    several = cap_mb < 1
    group: Any = dist.group.WORLD
    if is_ours and several:
        group = dist.new_group(pg_options=EngineOptions(ordered_callbacks=True))
    torch.manual_seed(0)
    layers = [layer for _ in range(5) for layer in (nn.Linear(48, 48), nn.Tanh())]
    module = DistributedDataParallel(
        nn.Sequential(*layers).double(), bucket_cap_mb=cap_mb, process_group=group
    )
    state = powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
    )
    # DDP accepts no annotations that are strings
    waiting = lambda state, bucket: waited_for(state, bucket)  # noqa: E731
    module.register_comm_hook(state, powerSGD_hook.powerSGD_hook if is_ours else waiting)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    random = torch.Generator().manual_seed(rank)
    for _ in range(8):
        optimizer.zero_grad()
        module(torch.randn(4, 48, generator=random, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    if rank == 0:
        assert len(state.p_memory_dict) == (5 if several else 1), "buckets"
        torch.save(module.module.state_dict(), folder / f"{dist.get_backend()}.pt")


@in_both_groups(
    "layout",
    [(size, buckets) for size in (2, 4) for buckets in ("one bucket", "many buckets")],
    python=[(2, "one bucket")],
    native=[(2, "one bucket"), (4, "many buckets")],
)
def test_powersgd_trains_as_on_gloo(tmp_path: Path, layout: tuple[int, str]) -> None:
    size, cap_mb = layout[0], 25 if layout[1] == "one bucket" else 1e-3
    for backend in ("gloo", "shoal"):
        run_group(train, size, tmp_path, cap_mb, tmp_path, backend=backend)
    wanted, found = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("gloo", "shoal"))
    for name, value in wanted.items():
        if size == 2:  # a sum of two numbers has one value
            assert torch.equal(found[name], value), name
        else:  # the order of addition differs: by roundings of fp64, which few steps magnify little
            torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-10)
