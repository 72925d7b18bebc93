"""Tests torch.compile of collectives and DistributedDataParallel against the uncompiled code."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shoal_workers import ops, run_group
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.usefixtures("both_groups_or_native")

SIZE = 2
COUNT = 4


def broadcast(tensor: Tensor) -> Tensor:
    sent = tensor * 2
    dist.broadcast(sent, 1)
    return sent + 1


def all_gather(tensor: Tensor) -> Tensor:
    rows = torch.empty(SIZE * COUNT)
    dist.all_gather_into_tensor(rows, tensor * 2)
    return rows + 1


def all_gather_list(tensor: Tensor) -> Tensor:
    rows = [torch.empty(COUNT) for _ in range(SIZE)]
    dist.all_gather(rows, tensor * 2)
    return torch.cat(rows) + 1


def all_reduce(tensor: Tensor) -> Tensor:
    total, most = tensor * 2, tensor - 1
    dist.all_reduce(total)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return total + most + dist.get_rank() + dist.get_world_size()


def all_reduce_later(tensor: Tensor) -> Tensor:
    total = tensor * 2
    work: Any = dist.all_reduce(total, async_op=True)
    meanwhile = tensor + 1
    work.wait()
    return total + meanwhile


def reduce_scatter(tensor: Tensor) -> Tensor:
    mine = torch.empty(COUNT // SIZE)
    dist.reduce_scatter_tensor(mine, tensor * 2)
    return mine + 1


def reduce_to_one(tensor: Tensor) -> Tensor:
    total = tensor * 2
    dist.reduce(total, 1)
    dist.barrier()
    return total + 1


def exchange(tensor: Tensor) -> Tensor:
    rows = torch.empty(COUNT)
    dist.all_to_all_single(rows, tensor * 2)
    if dist.get_rank() == 0:
        dist.send(rows, 1)
    else:
        dist.recv(rows, 0)
    return rows + 1


FUNCTIONS = (
    broadcast,
    all_gather,
    all_gather_list,
    all_reduce,
    all_reduce_later,
    reduce_scatter,
    reduce_to_one,
    exchange,
)


def check_functions(rank: int, compiler: str) -> None:
    given = torch.arange(float(COUNT)) + rank
    for function in FUNCTIONS:
        torch._dynamo.reset()
        wanted = function(given)
        before = sum(map(ops, ("broadcast", "all_gather", "all_reduce", "reduce_scatter", "reduce")))
        found = torch.compile(function, backend=compiler)(given)
        assert torch.equal(found, wanted), function.__name__
        after = sum(map(ops, ("broadcast", "all_gather", "all_reduce", "reduce_scatter", "reduce")))
        assert after > before or function is exchange, "the engine did it"


@pytest.mark.parametrize("compiler", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
def test_compiled_functions_around_collectives(tmp_path: Path, compiler: str) -> None:
    run_group(check_functions, SIZE, tmp_path, compiler)


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 8))


def outside(module: DistributedDataParallel, compiler: str) -> nn.Module:
    compiled: nn.Module = torch.compile(module, backend=compiler)
    return compiled


def in_place(module: DistributedDataParallel, compiler: str) -> nn.Module:
    module.compile(backend=compiler)
    return module


def trained(rank: int, forward: Callable[[Tensor], Tensor], module: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    random = torch.Generator().manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        forward(torch.randn(4, 8, generator=random)).square().sum().backward()
        optimizer.step()
    return list(module.state_dict().values())


def check_ddp(rank: int, compiler: str, folder: Path) -> None:
    os.environ.update(TORCHINDUCTOR_COMPILE_THREADS="1", TORCHINDUCTOR_CACHE_DIR=str(folder / str(rank)))
    for buffers in (True, False):
        plain = DistributedDataParallel(model(), broadcast_buffers=buffers)
        wanted = trained(rank, plain, plain)
        for way in (outside, in_place):
            torch._dynamo.reset()
            module = DistributedDataParallel(model(), broadcast_buffers=buffers)
            found = trained(rank, way(module, compiler), module)
            for one, other in zip(found, wanted, strict=True):
                if compiler == "inductor":  # fuses, and so rounds otherwise
                    torch.testing.assert_close(one, other)
                else:
                    assert torch.equal(one, other)


@pytest.mark.parametrize(
    "compiler", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("eager", "aot_eager")), "inductor"]
)
def test_compiled_ddp(tmp_path: Path, compiler: str) -> None:
    if compiler == "inductor" and shutil.which("g++") is None:
        pytest.skip("no C++ compiler for inductor")
    run_group(check_ddp, SIZE, tmp_path, compiler, tmp_path, deadline_s=240)
