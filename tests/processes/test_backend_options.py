"""Tests ``pg_options`` of backend ``"shoal"``: the order of addition, and options that differ by rank."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shoal_workers import is_native, run_group

from shoal import native
from shoal.comm.engine import EngineOptions
from shoal.env.settings import MOST_NETWORK_THREADS
from shoal.errors import UsageError

pytestmark = pytest.mark.usefixtures("both_groups")

HOSTS = ("a", "b", "a", "b")  # so that plain rank order differs from host order


def contribution(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(100_003, generator=generator) * 10.0 ** (rank % 3)


def check_order(rank: int, order: str) -> None:
    group = dist.new_group(backend="shoal", pg_options=EngineOptions(order=order))
    tensor = contribution(rank)
    dist.all_reduce(tensor, group=group)
    x = [contribution(other) for other in range(4)]
    by_host, by_rank = (x[0] + x[2]) + (x[1] + x[3]), ((x[0] + x[1]) + x[2]) + x[3]
    assert not torch.equal(by_host, by_rank), "the two orders must differ for the test to tell them apart"
    assert torch.equal(tensor, by_host if order == "host" else by_rank)


@pytest.mark.parametrize("order", ["host", "rank"])
def test_order_of_addition(tmp_path: Path, order: str) -> None:
    run_group(check_order, 4, tmp_path, order, hosts=HOSTS)


def check_threads(rank: int, folder: Path) -> None:
    options = EngineOptions(chunk_bytes=16 << 10)
    group = dist.new_group(backend="shoal", pg_options=options)
    tensors = [contribution(rank) * (k + 1) for k in range(4)]
    for work in [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]:
        work.wait()
    num_threads = len(list(Path("/proc/self/task").iterdir()))
    torch.save((tensors, num_threads), folder / f"{rank}.pt")


def test_network_threads_give_the_same_bits(tmp_path: Path) -> None:
    found = []
    for number in ("1", "3"):
        folder = tmp_path / number
        folder.mkdir()
        run_group(
            check_threads, 4, tmp_path, folder, hosts=HOSTS, environment={"SHOAL_NETWORK_THREADS": number}
        )
        found.append([torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(4)])
    for one, three in zip(*found, strict=True):
        assert all(map(torch.equal, one[0], three[0]))
        assert three[1] >= one[1] + 2, "the process has no further threads"


def check_different_options(rank: int) -> None:
    with pytest.raises(Exception, match="other pg_options than rank 0"):
        dist.new_group(backend="shoal", pg_options=EngineOptions(chunk_bytes=(1 + rank) << 14))


def test_options_that_differ_are_an_error_on_all_ranks(tmp_path: Path) -> None:
    run_group(check_different_options, 2, tmp_path)


@pytest.mark.parametrize(
    "given",
    [
        *({"order": "size"}, {"partial_dtype": "bf16"}, {"chunk_bytes": 100}, {"chunk_bytes": 32 << 20}),
        *({"shared_chunk_bytes": size} for size in (0, 1000, 65_000, 100_000, 32 << 20)),
        *({"num_slots": slots} for slots in (0, 65, 400)),
        *(
            {"window_bytes": 0},
            {"target_rtt_s": 0.0},
            {"connections_per_peer": -1},
            {"network_threads": 17},
            {"send_buffer_bytes": -1},
        ),
        *(
            {"staging_bytes": 0},
            {"staging_buffers": 1},
            {"peer_grace_s": float("nan")},
            {"unexpected_bytes": -1},
        ),
    ],
    ids=str,
)
def test_impossible_options_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=f"EngineOptions.{next(iter(given))} is"):
        EngineOptions(**given)  # type: ignore[arg-type]


def test_the_environment_and_the_core_allow_the_same_threads() -> None:
    most = {name: most for name, _, most, _ in native.core().option_ranges()}
    assert most["network_threads"] == MOST_NETWORK_THREADS


def check_mix(rank: int) -> None:
    group: Any = dist.new_group(backend="cpu:gloo,cuda:shoal")
    if is_native():
        assert group._get_backend(torch.device("cpu")).name() == "gloo"
    else:
        begun = time.monotonic()
        with pytest.raises(UsageError, match=r"mixes shoal and nccl.*write \"shoal\".*or make two groups"):
            mixed = dist.new_group(backend="cpu:shoal,cuda:nccl")
            dist.all_reduce(contribution(rank), group=mixed)  # with torch 2.11 it is found here
        assert time.monotonic() - begun < 3 * 1.0
        assert type(group).__name__ == "ShoalProcessGroup", "the documentation says that shoal serves both"
    tensor = contribution(rank)
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, contribution(0) + contribution(1))


def test_cuda_tensors_are_not_silently_taken_from_nccl(tmp_path: Path) -> None:
    run_group(check_mix, 2, tmp_path, hosts=("a", "b"))


@pytest.mark.parametrize("backend", ["shoal", "cpu:shoal", "cpu:shoal,cuda:shoal"])
def test_backends_that_are_no_mix(tmp_path: Path, backend: str) -> None:
    run_group(check_sum_of_two, 2, tmp_path, backend=backend, hosts=("a", "b"))


def check_sum_of_two(rank: int) -> None:
    tensor = contribution(rank)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, contribution(0) + contribution(1))
