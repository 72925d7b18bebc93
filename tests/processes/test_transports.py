"""Tests backend ``"shoal"`` over libfabric: the same sums and errors, and messages where it is missing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic
from typing import Any

import comm_stranger as stranger
import pytest
import torch
import torch.distributed as dist
from comm_group import SECRET, Group, HelperProcess, expected, stream
from shoal_workers import group_counters, run_group
from torch.nn.parallel import DistributedDataParallel

from shoal import native
from shoal.comm.engine import EngineOptions, fabric_providers
from shoal.doctor import fabric_check
from shoal.env import settings
from shoal.errors import UsageError

OVER_FABRIC = "ofi:tcp;ofi_rxm"
COUNT = 100_000


@pytest.fixture(scope="module")
def libfabric() -> None:
    """Skip where it is not there; asked in a process of its own, as tests fork from this one."""
    ask = "from shoal import native; print(native.fabric('127.0.0.1').providers)"
    told = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout
    if "'tcp;ofi_rxm': ''" not in told:
        pytest.skip(f"this shoal was built without libfabric, or it is not installed: it offers {told}")


needs_libfabric = pytest.mark.usefixtures("libfabric")


@pytest.mark.parametrize(
    ("transport", "providers"),
    [(None, ""), ("tcp", ""), ("ofi:efa", "efa"), ("ofi:tcp;ofi_rxm,shm", "tcp;ofi_rxm,shm")],
)
def test_words_for_transports(transport: str | None, providers: str) -> None:
    assert fabric_providers(transport) == providers


@pytest.mark.parametrize("transport", ["", "efa", "ofi", "ofi:", "ofi:efa,", "ofi:efa, shm", "TCP"])
def test_other_words_are_refused(transport: str) -> None:
    with pytest.raises(UsageError, match="it is tcp, or ofi:"):
        EngineOptions(transport=transport)


def test_the_environment_names_a_transport() -> None:
    assert settings.transport({}) is None
    assert settings.transport({"SHOAL_TRANSPORT": OVER_FABRIC}) == OVER_FABRIC


def test_a_transport_that_is_not_there_is_one_line_and_exit_code_1() -> None:
    command = [sys.executable, "-m", "shoal.comm.server", "--address", "127.0.0.1", "--port", "0"]
    ended = subprocess.run(
        [*command, "--transport", "ofi:nonesuch"],
        capture_output=True, text=True, env={**os.environ, "SHOAL_SECRET": SECRET}, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert "nonesuch" in line and "libfabric" in line


def test_the_doctor_says_what_can_be_used() -> None:
    def state(**given: object) -> native.Fabric:
        return native.Fabric(**{"built": True, "version": "1.17", "problem": "", "providers": {}, **given})  # type: ignore[arg-type]

    check = fabric_check(state(providers={"efa": "", "psm3": "no device", "shm": ""}))
    assert check.state == "ok"
    assert check.finding == "1.17, usable providers: efa, shm; psm3 does not open (no device)"
    assert "libfabric-dev" in fabric_check(state(built=False)).remedy
    missing = fabric_check(state(version="", problem="libfabric.so.1: cannot open"))
    assert missing.state == "note" and "libfabric.so.1: cannot open" in missing.finding
    assert fabric_check(state()).state == "note"


def train(rank: int, transport: str, saved: Path) -> None:
    os.environ["SHOAL_TRANSPORT"] = transport  # read when a group is made
    group: Any = dist.new_group(backend="shoal")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8))
    replica = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        replica(torch.randn(16, 64, generator=generator)).square().mean().backward()
        optimizer.step()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    rows = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, weights)
    assert all(torch.equal(row, rows[0]) for row in rows)
    over_fabric = group_counters(group).get("fabric_bytes_sent", 0)
    assert (over_fabric > 0) == (transport != "tcp")
    if rank == 0:
        torch.save(weights, saved)


@needs_libfabric
def test_training_gives_the_same_bits_as_over_tcp(tmp_path: Path) -> None:
    weights = []
    for number, transport in enumerate(("tcp", OVER_FABRIC)):
        saved = tmp_path / f"{number}.pt"
        run_group(train, 3, tmp_path / f"group{number}", transport, saved, hosts=("a", "b", "a"))
        weights.append(torch.load(saved, weights_only=True))
    assert torch.equal(*weights)


@needs_libfabric
@pytest.mark.parametrize(
    "transport", [pytest.param(OVER_FABRIC, marks=pytest.mark.slow), f"{OVER_FABRIC},tcp;ofi_rxm"]
)
def test_a_killed_worker_is_named_over_libfabric(transport: str) -> None:
    with Group(stream, "abc", 100_000, COUNT, options=EngineOptions(transport=transport)) as group:
        group.expect(0, "sum", count=5)
        since = group.signal(1, signal.SIGKILL)
        for text in group.errors([0, 2], since):
            assert f"{group.name(1)} was lost" in text
            assert f"all_reduce of float32[{COUNT}] (sum)" in text
        steps = [len(group.values(rank, "sum")) for rank in (0, 2)]
        want = expected("abc", max(steps), COUNT)
        for rank, done in zip((0, 2), steps, strict=True):
            assert group.values(rank, "sum") == want[:done]


@needs_libfabric
def test_control_connections_have_tags_over_libfabric() -> None:
    with Group(stream, "ab", 100_000, COUNT, options=EngineOptions(transport=OVER_FABRIC)) as group:
        group.expect(0, "sum", count=2)
        peer, who, since = group.peers[0], group.who(1), monotonic()
        connection, seal, is_in = stranger.session(peer.address, peer.port, SECRET, who, "", protection=1)
        with connection:
            assert is_in
            connection.sendall(seal.close(who.join()) + who.encode(stranger.Frame()))
            assert "a frame header does not match its tag" in group.errors([0], since)[0]
            assert group.name(1) in group.errors([1], since)[0]


@needs_libfabric
def test_sums_keep_their_bits_when_a_helper_is_killed_over_libfabric() -> None:
    hosts, steps = "aab", 30
    with HelperProcess("h0", arguments=("--transport", OVER_FABRIC)) as helper:
        options = EngineOptions(transport=OVER_FABRIC)
        with Group(stream, hosts, steps, COUNT, helpers=[helper], options=options) as group:
            group.expect(0, "sum", count=7)
            helper.kill()
            for rank in range(len(hosts)):
                counters = group.expect(rank, "done").value
                assert group.values(rank, "sum") == expected(hosts, steps, COUNT)
                assert "helper h0 was lost" in "\n".join(group.values(rank, "events")[0])
                assert counters["fabric_bytes_sent"] > 7 * COUNT
