"""Checkpoints of several workers: bitwise, with another number of workers, sharded, after failures."""

from __future__ import annotations

import resource
import shutil
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_workers import run_workers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shoal.errors import ShoalError
from shoal.train import checkpoint
from shoal.train.checkpoint import Checkpointer, Restored
from shoal.train.checkpoint_files import CONTENTS, find_damage, list_checkpoints
from shoal.train.world import run_on_all

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs forked workers and resource limits")


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    # 7 rows do not divide by 2 or 3, and 2 rows leave a third worker without any
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2), nn.BatchNorm1d(2))


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    """Take optimizer steps on batches that depend on the step alone, the same on each worker."""
    for step in range(first, last + 1):
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(12, 5, generator=generator)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return all values of a training state, whole, by name."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    names = {parameter: name for name, parameter in inner.named_parameters()}
    tensors = {f"model.{name}": value for name, value in inner.state_dict().items()}
    for parameter, entries in optimizer.state.items():
        tensors |= {f"optimizer.{names[parameter]}.{entry}": value for entry, value in entries.items()}
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in tensors.items()
    }


def make_training(kind: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model: nn.Module = make_model(seed)
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.99))


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert torch.equal(actual[name], value), name


def save_three_steps(rank: int, run_dir: Path, kind: str) -> None:
    model, optimizer = make_training(kind)
    take_steps(model, optimizer, 1, 3)
    checkpointer = Checkpointer(run_dir)
    checkpointer.save(3, {"model": model, "optimizer": optimizer, "progress": {"step": 3, "scale": 2.0**16}})
    checkpointer.finish()
    (completed,) = checkpointer.poll()
    assert completed.step == 3
    assert completed.num_bytes == sum(file.stat().st_size for file in Path(completed.path).iterdir())
    whole = everything(model, optimizer)  # collective for DTensors
    if rank == 0:
        torch.save(whole, run_dir / "expected.pt")


def load_and_compare(rank: int, run_dir: Path, kind: str) -> None:
    model, optimizer = make_training(kind, seed=1)
    restored = Checkpointer(run_dir).restore({"model": model, "optimizer": optimizer})
    assert restored == Restored(
        step=3,
        path=run_dir / "checkpoints" / "step-00000003",
        values={"progress": {"step": 3, "scale": 2.0**16}},
        damaged=[],
    )
    assert_same(everything(model, optimizer), torch.load(run_dir / "expected.pt", weights_only=True))
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"]) == (1e-2, (0.8, 0.99))
    take_steps(model, optimizer, 4, 4)


@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [
        (("ddp", 2), [("plain", 1), ("ddp", 2), ("ddp", 3), ("fsdp", 3)]),
        (("fsdp", 3), [("plain", 1), ("ddp", 2), ("fsdp", 2)]),
    ],
    ids=["ddp", "fsdp"],
)
def test_any_number_of_workers_loads_bitwise_what_was_saved(
    tmp_path: Path, saved_by: tuple[str, int], loaded_by: list[tuple[str, int]]
) -> None:
    kind, num_workers = saved_by
    assert run_workers(save_three_steps, num_workers, tmp_path / "meet", tmp_path, kind) == [0] * num_workers
    written = sorted(path.stat().st_size for path in tmp_path.glob("checkpoints/*/*.safetensors"))
    assert len(written) == num_workers
    for index, (kind, num_workers) in enumerate(loaded_by):
        meeting = tmp_path / f"meet-{index}"
        assert run_workers(load_and_compare, num_workers, meeting, tmp_path, kind) == [0] * num_workers


def test_several_workers_adopt_what_a_kill_has_left_without_its_name(tmp_path: Path) -> None:
    assert run_workers(save_three_steps, 2, tmp_path / "meet", tmp_path, "ddp") == [0, 0]
    final = tmp_path / "checkpoints" / "step-00000003"
    shutil.copytree(final, final.with_name("step-00000003.old"))
    final.rename(final.with_name("step-00000003.1.tmp"))
    victim = final.with_name("step-00000003.1.tmp") / "worker-00001.safetensors"
    victim.write_bytes(victim.read_bytes()[:-1])  # looked at by the second worker
    assert run_workers(load_and_compare, 2, tmp_path / "meet-2", tmp_path, "ddp") == [0, 0]
    assert [path.name for path in final.parent.iterdir()] == ["step-00000003"]


def test_replicated_state_is_stored_once_and_shared_out(tmp_path: Path) -> None:
    assert run_workers(save_three_steps, 2, tmp_path / "meet", tmp_path, "ddp") == [0, 0]
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("checkpoints/*/*.safetensors"))]
    # parameters and two moments of 35 + 7 + 14 + 2 + 2 + 2 values, 6 steps, 4 + 1 values of batch norm
    num_data_bytes = 3 * 4 * 62 + 6 * 4 + 4 * 4 + 8
    header_sizes = [
        int.from_bytes(path.read_bytes()[:8], "little") + 8
        for path in sorted(tmp_path.glob("checkpoints/*/*.safetensors"))
    ]
    assert sum(sizes) - sum(header_sizes) == num_data_bytes
    assert all(size > header for size, header in zip(sizes, header_sizes, strict=True))


def resumed_equals_uninterrupted(rank: int, run_dir: Path) -> None:
    model, optimizer = make_training("ddp")
    take_steps(model, optimizer, 1, 8)
    uninterrupted = everything(model, optimizer)
    model, optimizer = make_training("ddp")
    take_steps(model, optimizer, 1, 3)
    checkpointer = Checkpointer(run_dir)
    checkpointer.save(3, {"model": model, "optimizer": optimizer})
    take_steps(model, optimizer, 4, 6)  # while it is being written, and lost afterwards
    checkpointer.finish()
    model, optimizer = make_training("ddp", seed=5)
    assert Checkpointer(run_dir).restore({"model": model, "optimizer": optimizer}) is not None
    take_steps(model, optimizer, 4, 8)
    assert_same(everything(model, optimizer), uninterrupted)


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path: Path) -> None:
    assert run_workers(resumed_equals_uninterrupted, 2, tmp_path / "meet", tmp_path) == [0, 0]


def save_beside_training_collectives(rank: int, run_dir: Path) -> None:
    state = {"weights": torch.zeros(1 << 18)}
    checkpointer = Checkpointer(run_dir, keep=2)
    for step in range(1, 9):
        state["weights"].fill_(step)
        checkpointer.save(step, state)
        for _ in range(50):  # must neither mix with the saver's own collectives nor wait for them
            total = torch.full((64,), float(rank + 1))
            dist.all_reduce(total)
            assert total.eq(6).all()
        state["weights"].fill_(-1)  # what is stored is the value at the time of the save
    checkpointer.finish()
    assert [completed.step for completed in checkpointer.poll()] == list(range(1, 9))


def resume_three_times(rank: int, folders: list[Path]) -> None:
    model, optimizer = make_training("ddp")
    take_steps(model, optimizer, 1, 3)
    Checkpointer(folders[0]).save(3, {"model": model, "optimizer": optimizer}, wait=True)
    for seed, (earlier, later) in enumerate(pairwise(folders), start=1):
        model, optimizer = make_training("ddp", seed)
        Checkpointer(earlier).restore({"model": model, "optimizer": optimizer})
        Checkpointer(later).save(3, {"model": model, "optimizer": optimizer}, wait=True)


def test_the_files_of_a_run_do_not_depend_on_how_often_it_was_resumed(tmp_path: Path) -> None:
    """A loaded optimizer has its state in another order, which must not choose the workers that write it."""
    folders = [tmp_path / str(number) for number in range(4)]
    for folder in folders:
        folder.mkdir()
    assert run_workers(resume_three_times, 2, tmp_path / "meet", folders) == [0, 0]
    first, *others = (
        {path.name: path.read_bytes() for path in folder.glob("checkpoints/*/*.safetensors")}
        for folder in folders
    )
    assert len(first) == 2
    for other in others:
        assert other == first


def test_saving_runs_beside_the_trainings_collectives(tmp_path: Path) -> None:
    assert run_workers(save_beside_training_collectives, 3, tmp_path / "meet", tmp_path) == [0, 0, 0]
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000007", "step-00000008"]
    state: dict[str, Any] = {"weights": torch.empty(1 << 18)}
    assert Checkpointer(tmp_path).restore(state) is not None
    assert state["weights"].eq(8).all()


def one_worker_finds_damage(rank: int, run_dir: Path) -> None:
    model, optimizer = make_training("ddp", seed=1)
    restored = Checkpointer(run_dir).restore({"model": model, "optimizer": optimizer})
    assert restored is not None
    assert restored.step == 3
    (reason,) = restored.damaged
    assert "step-00000009: worker-00001.safetensors has the checksum" in reason


def test_all_workers_pass_over_what_one_finds_damaged(tmp_path: Path) -> None:
    assert run_workers(save_three_steps, 2, tmp_path / "meet", tmp_path, "ddp") == [0, 0]
    assert run_workers(save_step_nine, 2, tmp_path / "meet-9", tmp_path) == [0, 0]
    victim = tmp_path / "checkpoints" / "step-00000009" / "worker-00001.safetensors"
    data = bytearray(victim.read_bytes())
    data[-3] ^= 4
    victim.write_bytes(data)
    assert run_workers(one_worker_finds_damage, 2, tmp_path / "meet-d", tmp_path) == [0, 0]


def save_step_nine(rank: int, run_dir: Path) -> None:
    model, optimizer = make_training("ddp")
    take_steps(model, optimizer, 1, 1)
    Checkpointer(run_dir).save(9, {"model": model, "optimizer": optimizer}, wait=True)


def fail_on_one_worker(rank: int, run_dir: Path) -> None:
    state = {"a": torch.ones(1 << 16), "b": torch.ones(1 << 16)}
    checkpointer = Checkpointer(run_dir)
    checkpointer.save(1, state, wait=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    checkpointer.save(2, state)
    with pytest.raises(ShoalError, match=rf"{run_dir}.*step-00000002.*File too large.*\(worker 1\)"):
        checkpointer.save(3, state)
    assert [completed.step for completed in checkpointer.poll()] == [1]
    assert not list(run_dir.glob("checkpoints/*.tmp"))
    dist.barrier()  # before the next save makes a temporary folder again
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    checkpointer.save(3, state)  # the state is not lost: with room again, it can be saved
    checkpointer.finish()
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    checkpointer.save(4, state)
    while any(thread.name == "checkpoint" for thread in threading.enumerate()):
        time.sleep(0.01)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    checkpointer.save(5, state, wait=True)  # the last save of a run is tried whatever became of the others


def test_a_full_disk_of_one_worker_is_everyones_clear_error(tmp_path: Path) -> None:
    assert run_workers(fail_on_one_worker, 2, tmp_path / "meet", tmp_path) == [0, 0]
    assert [path.name[-1] for path in list_checkpoints(tmp_path)] == ["1", "3", "5"]
    assert all(find_damage(path) is None for path in list_checkpoints(tmp_path))
    assert (list_checkpoints(tmp_path)[-1] / CONTENTS).is_file()


DEFECTS: list[tuple[type[Exception], str]] = [
    (TypeError, "TypeError: Object of type object is not JSON serializable (worker 1)"),
    (MemoryError, "MemoryError: no room (worker 1)"),
    (KeyError, "KeyError: 'gone' (worker 1)"),
]


def fail_with_a_defect(rank: int) -> None:
    """Fail on worker 1 in ways that nobody foresees; the group's deadline of 30 min is never waited for."""

    def defect(kind: type[Exception]) -> object:
        if kind is TypeError:
            return object()
        raise kind("gone" if kind is KeyError else "no room")

    group = dist.group.WORLD
    for kind, told in DEFECTS:
        with pytest.raises(ShoalError if rank == 0 else kind) as caught:
            run_on_all(group, lambda kind=kind: defect(kind) if rank == 1 else "well")  # type: ignore[misc]
        if rank == 0:
            assert str(caught.value) == told
        else:
            assert type(caught.value) is kind
            assert kind is TypeError or caught.traceback[-1].name == "defect"
        assert run_on_all(group, lambda: rank) == [0, 1]


def test_a_defect_of_one_worker_is_everyones_error_at_once(tmp_path: Path) -> None:
    assert run_workers(fail_with_a_defect, 2, tmp_path / "meet", deadline_s=60) == [0, 0]


def fail_in_the_writing_thread(rank: int, run_dir: Path) -> None:
    state = {"a": torch.ones(1 << 10), "b": torch.ones(1 << 10)}
    checkpointer = Checkpointer(run_dir)
    write_file = checkpoint.write_file

    def without_memory(path: Path, pieces: Any) -> Any:
        raise MemoryError("no room")

    if rank == 1:
        checkpoint.write_file = without_memory
    checkpointer.save(1, state)
    with pytest.raises(ShoalError if rank == 0 else MemoryError, match="no room") as caught:
        checkpointer.finish()
    if rank == 0:
        assert str(caught.value) == "MemoryError: no room (worker 1)"
    else:
        assert caught.traceback[-1].name == "without_memory"
    checkpoint.write_file = write_file
    checkpointer.save(2, state, wait=True)


def test_a_defect_in_one_writing_thread_is_everyones_error_at_once(tmp_path: Path) -> None:
    assert run_workers(fail_in_the_writing_thread, 2, tmp_path / "meet", tmp_path, deadline_s=60) == [0, 0]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
