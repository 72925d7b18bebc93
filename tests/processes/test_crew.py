"""Tests a training whose processes come and go: samples, weights, and who goes on."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shoal.comm
from forked import fork_process, wait_for
from shoal.comm.engine import CommError
from shoal.comm.folder_store import FolderStore
from shoal.errors import ShoalError
from shoal.train import crew as crew_state
from shoal.train.crew import Crew, give_state

pytestmark = pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"), reason=f"torch {torch.__version__} has no groups whose members change"
)
SAMPLES = 24


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))


def optimizer_of(module: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def samples(step: int) -> torch.Tensor:
    return torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(step))


def summed_loss(module: nn.Module, inputs: torch.Tensor) -> Any:
    return module(inputs).square().mean(dim=1).sum()


def expected(steps: int) -> list[torch.Tensor]:
    """Return the weights of one process that takes all samples of each step."""
    module = model()
    optimizer = optimizer_of(module)
    for step in range(1, steps + 1):
        (summed_loss(module, samples(step)) / SAMPLES).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach() for each in module.parameters()]


def work(
    folder: Path,
    rank: int,
    size: int,
    until: int,
    dies_at: int = 0,
    where: str = "",
    starts_at: int | None = None,
    others: int = 0,
    waits_at: int = 0,
) -> None:
    """Train; die where the test says, or start when the others are at a step; wait for ``others`` to ask.

    At ``waits_at`` the first member waits until one has asked.
    """
    shoal.comm.register()
    store = FolderStore(folder / "store", timedelta(minutes=5))
    dist.init_process_group(
        "shoal",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=30),
        enable_reconfigure=True,
    )
    if starts_at is not None:
        store.get(f"test/{starts_at}")
    module = model(seed=rank)
    optimizer = optimizer_of(module)
    crew = Crew({"model": module}, optimizer, at_least=2, patience_s=20)
    ddp = crew.data_parallel(module, bucket_cap_mb=0.0005)
    store.set("test/0", "1")
    while crew.rank == 0 and crew._members.num_waiting() < others:
        time.sleep(0.01)
    for step in crew.steps(until):
        while step.number == waits_at and crew.rank == 0 and not crew._members.num_waiting():
            time.sleep(0.01)
        with step:
            store.set(f"test/{step.number}", "1")
            rows = slice(*crew.share(SAMPLES))
            if step.number == dies_at and where == "forward":
                os.kill(os.getpid(), signal.SIGKILL)
            if step.number == dies_at and where == "backward":
                module[0].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            loss = summed_loss(ddp, samples(step.number)[rows])
            (loss * crew.size / SAMPLES).backward()
            if step.number == dies_at and where == "step":
                os.kill(os.getpid(), signal.SIGKILL)
    for own, other in zip(module.parameters(), expected(until), strict=True):
        torch.testing.assert_close(own.detach(), other, rtol=1e-5, atol=1e-6)
    flat = torch.cat([each.detach().flatten() for each in module.parameters()])
    sizes = "-".join(str(members) for _, members in crew.history)
    digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
    (folder / f"{rank}-{os.getpid()}").write_text(f"{digest} {crew.generation} {sizes}")
    dist.barrier()
    dist.destroy_process_group()


def results(folder: Path) -> list[list[str]]:
    return [each.read_text().split() for each in sorted(folder.glob("[0-9]-*"))]


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_a_lost_member_costs_no_sample(where: str, tmp_path: Path) -> None:
    processes = [fork_process(work, tmp_path, rank, 4, 8, 4 if rank == 1 else 0, where) for rank in range(4)]
    assert wait_for(processes, 60) == [0, -signal.SIGKILL, 0, 0]
    ended = results(tmp_path)
    assert len({digest for digest, _, _ in ended}) == 1, "the bits of all members are the same"
    for _, generation, sizes in ended:
        assert generation == "2"
        assert sizes in ("4-4-4-3-3-3-3-3", "4-4-4-4-3-3-3-3"), "the step came again, or all had its sums"


def test_a_process_joins_without_a_stop(tmp_path: Path) -> None:
    processes = [fork_process(work, tmp_path, rank, 2, 40, 0, "", None, 0, 20) for rank in range(2)]
    processes.append(fork_process(work, tmp_path, 2, 3, 40, 0, "", 5))
    assert wait_for(processes, 60) == [0, 0, 0]
    *old, joined = results(tmp_path)
    assert len({digest for digest, _, _ in (*old, joined)}) == 1
    assert {sizes for _, _, sizes in old} == {old[0][2]}
    assert {generation for _, generation, _ in (*old, joined)} == {"2"}, "a join is no loss"
    assert old[0][2].endswith(joined[2]) and set(joined[2].split("-")) == {"3"}


def test_a_process_that_joins_before_the_first_step_gets_the_weights(tmp_path: Path) -> None:
    processes = [fork_process(work, tmp_path, rank, 2, 8, 0, "", None, 1) for rank in range(2)]
    processes.append(fork_process(work, tmp_path, 2, 3, 8, 0, "", 0))
    assert wait_for(processes, 60) == [0, 0, 0]
    ended = results(tmp_path)
    assert len({digest for digest, _, _ in ended}) == 1
    assert {sizes for _, _, sizes in ended} == {"3-3-3-3-3-3-3-3"}


def test_first_rank_dies_and_another_one_takes_its_place(tmp_path: Path) -> None:
    processes = [
        fork_process(work, tmp_path, rank, 3, 60, 10 * (rank == 0), "backward", None, 0, 40)
        for rank in range(3)
    ]
    processes.append(fork_process(work, tmp_path, 0, 3, 60, 0, "", 15))
    assert wait_for(processes, 60) == [-signal.SIGKILL, 0, 0, 0]
    ended = results(tmp_path)
    assert len(ended) == 3
    assert len({digest for digest, _, _ in ended}) == 1
    assert ended[1][2].split("-")[-1] == "3"
    assert {generation for _, generation, _ in ended} == {"3"}


def test_an_error_of_the_script_is_no_loss(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), -1)
    shoal.comm.register()
    dist.init_process_group("shoal", store=store, rank=0, world_size=1, enable_reconfigure=True)
    try:
        module = model()
        crew = Crew({"model": module}, optimizer_of(module))
        with pytest.raises(ZeroDivisionError):
            for step in crew.steps(2):
                with step:
                    _ = 1 / 0
        assert crew.step == 0 and crew.generation == 1
    finally:
        dist.destroy_process_group()


def lonely(folder: Path, rank: int, size: int, until: int, dies_at: int) -> None:
    if rank == 0:
        with pytest.raises(CommError, match=r"1 of 2 members are left after step 3, .* start the job again"):
            work(folder, rank, size, until)
        return
    work(folder, rank, size, until, dies_at, "forward")


def test_too_few_do_not_go_on(tmp_path: Path) -> None:
    processes = [fork_process(lonely, tmp_path, rank, 2, 8, 4) for rank in range(2)]
    assert wait_for(processes, 60) == [0, -signal.SIGKILL]


def take_state(folder: Path, rank: int, differs: bool) -> None:
    """Give the state of ranks 0 and 1 to rank 2, in small pieces; write the weights or the error."""
    shoal.comm.register()
    store = dist.FileStore(str(folder / "store"), 3)
    dist.init_process_group("shoal", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=30))
    crew_state._PIECE_BYTES = 100
    module = model(seed=int(rank == 2))
    optimizer = optimizer_of(module)
    if rank < 2:
        summed_loss(module, samples(1)).backward()
        optimizer.step()
    if differs and rank == 1:
        module[2].weight.data[1, 31] += 1e-6
    try:
        values = give_state({"model": module, "optimizer": optimizer, "text": rank}, [True, True, False])
    except ShoalError as error:
        (folder / f"{rank}-error").write_text(str(error))
        return
    flat = [*module.parameters(), *(each["exp_avg_sq"] for each in optimizer.state.values())]
    digest = hashlib.sha256(torch.cat([each.detach().flatten() for each in flat]).numpy().tobytes())
    (folder / f"{rank}-state").write_text(f"{digest.hexdigest()} {values.get('text')}")
    dist.destroy_process_group()


def test_a_newcomer_gets_its_state_in_parts_from_all(tmp_path: Path) -> None:
    assert wait_for([fork_process(take_state, tmp_path, rank, False) for rank in range(3)], 60) == [0, 0, 0]
    ended = results(tmp_path)
    assert len({digest for digest, _ in ended}) == 1
    assert [text for _, text in ended] == ["None", "None", "0"]


def test_members_with_different_states_are_named(tmp_path: Path) -> None:
    wait_for([fork_process(take_state, tmp_path, rank, True) for rank in range(3)], 60)
    errors = {(tmp_path / f"{rank}-error").read_text() for rank in range(3)}
    assert len(errors) == 1
    assert "has another model.2.weight than rank 0" in errors.pop()
