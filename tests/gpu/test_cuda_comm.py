"""Tests backend "shoal" on CUDA tensors: several processes, as several hosts, on one device.

Numbers are small and whole: sums are exact in every dtype and order. gloo does the same on CPU copies.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1] / "processes"))
from shoal_workers import exit_codes, is_native, run_group, shoal_group
from staged_group import small_pieces
from test_backend_work import raises

from shoal.comm.engine import CommError
from shoal.errors import UsageError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HOSTS = ("a", "a", "b")
SIZE = len(HOSTS)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8)
COUNT = 300_001
CYCLES = 200_000_000
"""of the GPU's clock: about a tenth of a second"""


def part(rank: int, dtype: torch.dtype, count: int = COUNT) -> Tensor:
    return torch.randint(1, 4, (count,), generator=torch.Generator().manual_seed(rank)).to(dtype)


def same_as_gloo(gloo: Any, call: Any, *tensors: Tensor) -> None:
    cpu = [tensor.float() if tensor.dtype == torch.bfloat16 else tensor.clone() for tensor in tensors]
    call(*cpu, group=gloo)
    cuda = [tensor.cuda() for tensor in tensors]
    call(*cuda, group=dist.group.WORLD)
    for one, other in zip(cpu, cuda, strict=True):
        torch.testing.assert_close(other.cpu(), one.to(other.dtype), rtol=0, atol=0)


def check_collectives(rank: int) -> None:
    small_pieces(num_bytes=1 << 18)
    gloo = dist.new_group(backend="gloo")
    same = partial(same_as_gloo, gloo)
    for dtype in DTYPES:
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            same(partial(dist.all_reduce, op=op), part(rank, dtype))
            if dtype != torch.float64:  # gloo's reduce leaves partial sums on the other ranks
                mine = part(rank, dtype).cuda()
                dist.reduce(mine, 1, op)
                wanted = part(rank, dtype)
                if rank == 1:
                    wanted = torch.stack([part(each, dtype) for each in range(SIZE)]).double()
                    reduce = {
                        "SUM": wanted.sum,
                        "PRODUCT": wanted.prod,
                        "MIN": wanted.amin,
                        "MAX": wanted.amax,
                    }
                    wanted = reduce[op.name](0).to(dtype)
                assert torch.equal(mine.cpu(), wanted)
        for root in range(SIZE):
            same(lambda tensor, group, root=root: dist.broadcast(tensor, root, group), part(rank, dtype))
        same(dist.all_gather_into_tensor, torch.zeros(SIZE * COUNT, dtype=dtype), part(rank, dtype))
        rows = [torch.zeros(7, dtype=dtype)] * SIZE
        same(lambda mine, *rows, group: dist.all_gather(list(rows), mine, group), part(rank, dtype, 7), *rows)
        sums = torch.empty(1000, dtype=dtype, device="cuda")
        dist.reduce_scatter_tensor(sums, part(rank, dtype, SIZE * 1000).cuda())
        total = sum(part(each, dtype, SIZE * 1000).double() for each in range(SIZE))
        assert torch.equal(sums.cpu().double(), Tensor(total).view(SIZE, -1)[rank])
    average = part(rank, torch.float32).cuda()
    dist.all_reduce(average, dist.ReduceOp.AVG)
    wanted = torch.stack([part(each, torch.float32) for each in range(SIZE)]).sum(0) / SIZE
    assert torch.equal(average.cpu(), wanted)
    strided = part(rank, torch.float32, 12).view(3, 4)
    same(lambda tensor, group: dist.all_reduce(tensor.t(), group=group), strided)
    same(
        lambda to, given, group: dist.all_to_all_single(to, given, group=group),
        torch.zeros(SIZE),
        rows[0][:SIZE].float(),
    )
    received = torch.zeros(4, device="cuda")
    works: Any = [
        dist.isend(torch.full((4,), float(rank), device="cuda"), (rank + 1) % SIZE),
        dist.irecv(received, (rank - 1) % SIZE),
    ]
    for work in works:
        work.wait()
    assert received.tolist() == [(rank - 1) % SIZE] * 4
    objects: list[Any] = [None] * SIZE
    dist.all_gather_object(objects, rank)
    assert objects == list(range(SIZE))


@pytest.mark.parametrize("hosts", [HOSTS, ("a", "b", "c"), ("a", "a", "a")])
def test_collectives_give_what_gloo_gives(hosts: tuple[str, ...], tmp_path: Path) -> None:
    run_group(check_collectives, SIZE, tmp_path, hosts=hosts)


def test_devices_of_the_group(tmp_path: Path) -> None:
    run_group(check_devices, 2, tmp_path, backend="cpu:shoal,cuda:shoal")


def check_devices(rank: int) -> None:
    world: Any = dist.group.WORLD
    assert type(shoal_group()).__name__ == "ShoalProcessGroup"
    assert {device.type for device in world._device_types} == {"cpu", "cuda"}
    assert is_native() or world._get_backend(torch.device("cuda")) is world
    for device in ("cpu", "cuda"):
        tensor = torch.full((5,), float(rank), device=device)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [1] * 5


# ---- streams and graphs -------------------------------------------------------------------------------


def check_streams(rank: int) -> None:
    small_pieces(num_bytes=1 << 18)
    tensor = torch.zeros(1 << 20, device="cuda")
    dist.all_reduce(tensor)  # the first one meets the others
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for step in range(5):
                torch.cuda._sleep(CYCLES)
                tensor.fill_(step + rank)
                work: Any = dist.all_reduce(tensor, async_op=True)
                assert not torch.cuda.current_stream().query(), (
                    "the call does not wait for the kernels before it"
                )
                work.wait()
                seen = tensor * 2
                tensor.fill_(-1)  # must not overtake the copy back
                assert (seen == 2 * (2 * step + 1)).all()
        stream.synchronize()
    # an input that nobody keeps is not given away while it is read
    rows = [torch.empty(2 << 20, device="cuda") for _ in range(20)]
    works: list[Any] = []
    for step, row in enumerate(rows):
        given = torch.full((1 << 20,), float(step), device="cuda")
        works.append(dist.all_gather_into_tensor(row, given, async_op=True))
        del given
        torch.full((1 << 20,), float("nan"), device="cuda")
    for step, (work, row) in enumerate(zip(works, rows, strict=True)):
        work.wait()
        assert (row == step).all()
    last = torch.full((1 << 20,), 1.0, device="cuda")
    work = dist.all_reduce(last, async_op=True)
    future = work.get_future().then(lambda done: done.value()[0] * 3)
    assert (future.wait() == 6).all()


def check_graphs(rank: int) -> None:
    weight = torch.full((1000,), 2.0, device="cuda")
    given, gradient = torch.zeros(1000, device="cuda"), torch.zeros(1000, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gradient.copy_(given * weight)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradient.copy_(given * weight)
    for step in range(5):
        given.fill_(step + rank)
        graph.replay()
        dist.all_reduce(gradient)
        assert (gradient == 2 * (2 * step + 1)).all()
    refused = torch.cuda.CUDAGraph()
    with torch.cuda.graph(refused):
        gradient.add_(1)
        with raises(UsageError, "while a graph is captured"):
            dist.all_reduce(gradient)


def check_captures_beside_collectives(rank: int) -> None:
    """The threads that copy wait for events and allocate while another thread captures."""
    weight, out = torch.full((1000,), 2.0, device="cuda"), torch.zeros(1000, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        out.copy_(weight * 3)  # loads the kernels
    torch.cuda.synchronize()
    for step in range(5):
        large = torch.full((8 << 20,), float(rank + step), device="cuda")
        torch.cuda._sleep(CYCLES)  # copies wait for it, so the sum is under way during the capture
        work: Any = dist.all_reduce(large, async_op=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):  # torch.cuda.graph would synchronize the device first
            graph.capture_begin()
            out.copy_(weight * 3)
            graph.capture_end()
        assert not work.is_completed()
        work.wait()
        out.zero_()
        graph.replay()
        assert (out == 6).all() and (large == 2 * step + 1).all()


@pytest.mark.parametrize("check", [check_streams, check_graphs, check_captures_beside_collectives])
def test_order_with_streams_and_graphs(check: Any, tmp_path: Path) -> None:
    run_group(check, 2, tmp_path, hosts=("a", "b"))


# ---- training -----------------------------------------------------------------------------------------


def trained(rank: int, device: str, wrap: str) -> list[Tensor]:
    torch.manual_seed(5)
    module: Any = nn.Sequential(nn.Linear(200, 600), nn.ReLU(), nn.Linear(600, 30)).to(device)
    if wrap == "fsdp":
        module = fully_shard(module, mesh=dist.init_device_mesh(device, (2,)))
    else:
        module = DistributedDataParallel(module, bucket_cap_mb=0.3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(10):
        inputs = torch.randn(8, 200, generator=torch.Generator().manual_seed(100 * step + rank)).to(device)
        optimizer.zero_grad()
        module(inputs).square().mean().backward()
        optimizer.step()
    return [
        getattr(each, "full_tensor", lambda each=each: each)().detach().cpu() for each in module.parameters()
    ]


def check_training(rank: int) -> None:
    small_pieces(num_bytes=1 << 16)
    for wrap in ("ddp", "fsdp"):
        for cpu, cuda in zip(trained(rank, "cpu", wrap), trained(rank, "cuda", wrap), strict=True):
            torch.testing.assert_close(cuda, cpu, rtol=1e-4, atol=1e-5)


def test_training_comes_to_the_cpus_weights(tmp_path: Path) -> None:
    run_group(check_training, 2, tmp_path, hosts=("a", "b"))


def check_lost(rank: int) -> None:
    tensor = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(tensor)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with raises(CommError, "rank 1", "was lost"):
        for _ in range(1000):
            dist.all_reduce(tensor)
    dist.destroy_process_group()


def test_a_lost_rank_is_named(tmp_path: Path) -> None:
    assert exit_codes(check_lost, 2, tmp_path, hosts=("a", "b")) == [0, -signal.SIGKILL]


# ---- several devices ----------------------------------------------------------------------------------


def check_parts(rank: int) -> None:
    torch.cuda.set_device(rank % 2)
    for dtype in DTYPES:
        tensor = part(rank, dtype).cuda()
        dist.all_reduce(tensor)
        total = sum(part(each, dtype).double() for each in range(dist.get_world_size()))
        assert torch.equal(tensor.cpu().double(), Tensor(total))
    assert shoal_group().device_groups[tensor.device]._hierarchical is not None


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("hosts", [("a", "a"), ("a", "a", "b", "b")])
def test_ranks_of_a_host_add_up_through_nccl(hosts: tuple[str, ...], tmp_path: Path) -> None:
    run_group(check_parts, len(hosts), tmp_path, hosts=hosts)
