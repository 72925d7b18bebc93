"""Tests backend "shoal" on CUDA tensors: several processes, as several hosts, on one device.

Most checks are those of ``device_checks``, which ``processes/test_staged_work.py`` runs without a GPU.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "processes"))
from device_checks import (
    DTYPES,
    Gpu,
    check_bounded,
    check_captures_beside_collectives,
    check_collectives,
    check_eight_bits,
    check_local,
    check_lost,
    check_messages,
    check_no_servers,
    check_rails,
    check_rails_of_one_rank,
    check_rounded,
    check_served,
    check_streams,
    check_training,
    part,
)
from shoal_workers import exit_codes, is_native, run_group, shoal_group
from test_backend_work import raises

from shoal.errors import UsageError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

COUNT = 300_001


@pytest.mark.parametrize("hosts", [("a", "a", "b"), ("a", "b", "c"), ("a", "a", "a")], ids="".join)
def test_collectives_give_what_gloo_gives(hosts: tuple[str, ...], tmp_path: Path) -> None:
    run_group(check_collectives, len(hosts), tmp_path, Gpu(), len(hosts), False, hosts=hosts)


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


def test_graphs_are_replayed_between_collectives(tmp_path: Path) -> None:
    run_group(check_graphs, 2, tmp_path, hosts=("a", "b"))


@pytest.mark.parametrize(
    "check",
    [check_streams, check_messages, check_captures_beside_collectives, check_training, check_eight_bits],
)
def test_order_with_streams_captures_and_training(check: Any, tmp_path: Path) -> None:
    run_group(check, 2, tmp_path, Gpu(), hosts=("a", "b"))


def test_a_lost_rank_is_named(tmp_path: Path) -> None:
    codes = exit_codes(check_lost, 2, tmp_path, Gpu(), 2, hosts=("a", "b"))
    assert codes == [0, -signal.SIGKILL]


@pytest.mark.parametrize("check", [check_served, check_rounded, check_bounded, check_local])
def test_servers_update_weights_that_stay_on_the_gpu(check: Any, tmp_path: Path) -> None:
    run_group(check, 2, tmp_path, Gpu(), hosts=("a", "b"))


def test_servers_of_a_single_host_are_refused(tmp_path: Path) -> None:
    run_group(check_no_servers, 2, tmp_path, Gpu(), hosts=("a", "a"))


# ---- several devices in a host, with one in each ----------------------------------------------------------


def test_rails_of_a_device_in_each_host(tmp_path: Path) -> None:
    run_group(check_rails, 2, tmp_path, Gpu(), 2, hosts=("a", "b"))
    run_group(check_rails_of_one_rank, 1, tmp_path, Gpu())


# ---- several devices ----------------------------------------------------------------------------------


def check_parts(rank: int) -> None:
    torch.cuda.set_device(rank % 2)
    for dtype in DTYPES:
        tensor = part(rank, dtype, COUNT).cuda()
        dist.all_reduce(tensor)
        total = sum(part(each, dtype, COUNT).double() for each in range(dist.get_world_size()))
        assert torch.equal(tensor.cpu().double(), Tensor(total))
    assert shoal_group().device_groups[tensor.device]._hierarchical is not None


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("hosts", [("a", "a"), ("a", "a", "b", "b")], ids="".join)
def test_ranks_of_a_host_add_up_through_nccl(hosts: tuple[str, ...], tmp_path: Path) -> None:
    run_group(check_parts, len(hosts), tmp_path, hosts=hosts)
