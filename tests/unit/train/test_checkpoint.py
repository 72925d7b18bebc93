"""Checkpoints of one worker: what is kept, what is refused, and what damage does."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from shoal.errors import ShoalError, UsageError
from shoal.train import checkpoint_files
from shoal.train.checkpoint import Checkpointer, load_model
from shoal.train.checkpoint_files import COMPLETE, CONTENTS, list_checkpoints, read_contents, superseded


class Tied(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.decoder = nn.Linear(width, 11)
        self.decoder.weight = self.embedding.weight
        self.register_buffer("kept", torch.arange(4.0))
        self.register_buffer("dropped", torch.zeros(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.decoder(self.embedding(tokens))
        return logits


def trained(model: nn.Module, optimizer: Optimizer, num_steps: int = 2) -> None:
    for step in range(num_steps):
        model(torch.arange(11)).sub(step).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def saved_run(run_dir: Path, steps: tuple[int, ...] = (1, 2)) -> dict[int, dict[str, torch.Tensor]]:
    """Save a model at each of ``steps`` and return what it was then."""
    model = Tied()
    checkpointer = Checkpointer(run_dir, keep=9)
    values = {}
    for step in steps:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step)
        checkpointer.save(step, {"model": model, "progress": {"step": step}}, wait=True)
        values[step] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return values


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), betas=(0.7, 0.95)),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.Adagrad(p),
        lambda p: torch.optim.Adafactor(p),
    ],
)
def test_an_optimizer_goes_on_bitwise(tmp_path: Path, make_optimizer: Any) -> None:
    def build() -> tuple[nn.Module, Optimizer]:
        model = Tied()
        groups = [{"params": [model.embedding.weight]}, {"params": [model.decoder.bias], "lr": 0.05}]
        return model, make_optimizer(groups)

    torch.manual_seed(0)
    model, optimizer = build()
    trained(model, optimizer)
    Checkpointer(tmp_path).save(2, {"model": model, "optimizer": optimizer}, wait=True)
    trained(model, optimizer)

    other, other_optimizer = build()
    assert Checkpointer(tmp_path).restore({"model": other, "optimizer": other_optimizer}) is not None
    assert other.decoder.weight is other.embedding.weight
    trained(other, other_optimizer)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    for group, expected in zip(other_optimizer.param_groups, optimizer.param_groups, strict=True):
        assert {k: type(v) for k, v in group.items()} == {k: type(v) for k, v in expected.items()}


def test_an_optimizer_before_its_first_step_is_not_touched(tmp_path: Path) -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    Checkpointer(tmp_path).save(0, {"model": model, "optimizer": optimizer}, wait=True)
    assert not optimizer.state
    other = torch.optim.AdamW(model.parameters())
    trained(model, other)
    assert Checkpointer(tmp_path).restore({"model": model, "optimizer": other}) is not None
    assert not other.state


def test_moments_keep_their_type_beside_bf16_parameters(tmp_path: Path) -> None:
    model = Tied().to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, 1 / 3, dtype=torch.float32)
    Checkpointer(tmp_path).save(1, {"model": model, "optimizer": optimizer}, wait=True)
    other = torch.optim.SGD(model.parameters(), momentum=0.9)
    Checkpointer(tmp_path).restore({"model": model, "optimizer": other})
    for entries in other.state.values():
        assert entries["momentum_buffer"].dtype == torch.float32
        assert entries["momentum_buffer"].eq(torch.tensor(1 / 3)).all()


def test_names_know_neither_compilation_nor_wrappers(tmp_path: Path) -> None:
    model = Tied()
    compiled = torch.compile(model, backend="eager")
    Checkpointer(tmp_path).save(1, {"model": compiled}, wait=True)
    names = json.loads((list_checkpoints(tmp_path)[0] / CONTENTS).read_text())["tensors"]
    assert sorted(names) == ["model.decoder.bias", "model.embedding.weight", "model.kept"]


def test_what_is_saved_is_the_value_at_the_time_of_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    write_file = checkpoint_files.write_file

    def write_late(*args: Any) -> checkpoint_files.WrittenFile:
        assert may_write.wait(30)
        return write_file(*args)

    monkeypatch.setattr("shoal.train.checkpoint.write_file", write_late)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer)
    progress = {"step": 1, "seen": [1, 2]}
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    moments = [entry["exp_avg"].clone() for entry in optimizer.state.values()]
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"model": model, "optimizer": optimizer, "progress": progress})
    assert checkpointer.poll() == []
    trained(model, optimizer)
    progress["seen"].append(3)  # type: ignore[attr-defined]
    may_write.set()
    checkpointer.finish()

    other = Tied()
    other_optimizer = torch.optim.AdamW(other.parameters())
    restored = Checkpointer(tmp_path).restore({"model": other, "optimizer": other_optimizer})
    assert restored is not None
    assert restored.values == {"progress": {"step": 1, "seen": [1, 2]}}
    for name, value in expected.items():
        assert torch.equal(other.state_dict()[name], value)
    for entry, value in zip(other_optimizer.state.values(), moments, strict=True):
        assert torch.equal(entry["exp_avg"], value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_element_types_scalars_and_empty_tensors(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {
        "many": torch.arange(7).to(dtype),
        "scalar": torch.tensor(1).to(dtype),
        "none": torch.empty(0, 3, dtype=dtype),
        "strided": torch.arange(12).reshape(3, 4).t().to(dtype),
        "odd": torch.arange(3, dtype=torch.uint8),
    }
    Checkpointer(tmp_path).save(1, state, wait=True)
    empty = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    assert Checkpointer(tmp_path).restore(empty) is not None
    for name, tensor in state.items():
        assert torch.equal(empty[name], tensor), name


def flip_a_bit(path: Path) -> str:
    data = bytearray((path / "worker-00000.safetensors").read_bytes())
    data[-9] ^= 16
    (path / "worker-00000.safetensors").write_bytes(data)
    return r"worker-00000.safetensors has the checksum [0-9a-f]{8} instead of [0-9a-f]{8}"


def cut_short(path: Path) -> str:
    data = (path / "worker-00000.safetensors").read_bytes()
    (path / "worker-00000.safetensors").write_bytes(data[:100])
    return rf"worker-00000.safetensors has 100 bytes instead of {len(data)}"


def lose_a_file(path: Path) -> str:
    (path / "worker-00000.safetensors").unlink()
    return "worker-00000.safetensors is missing"


def lose_the_mark(path: Path) -> str:
    (path / COMPLETE).unlink()
    return "complete.json is missing"


def garble_the_mark(path: Path) -> str:
    (path / COMPLETE).write_bytes(b"\x00\xff not json")
    return "complete.json is malformed"


def other_json(path: Path) -> str:
    (path / COMPLETE).write_text('["step"]')
    return "complete.json is malformed"


def change_the_mark(path: Path) -> str:
    text = (path / COMPLETE).read_text()
    (path / COMPLETE).write_text(text.replace('"step": 3', '"step": 4'))
    return "complete.json has the checksum [0-9a-f]{8} instead of [0-9a-f]{8}"


def change_the_values(path: Path) -> str:
    text = (path / CONTENTS).read_text()
    (path / CONTENTS).write_text(text.replace('{"step": 3}', '{"step": 4}'))
    return "contents.json has the checksum"


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_bit,
        cut_short,
        lose_a_file,
        lose_the_mark,
        garble_the_mark,
        other_json,
        change_the_mark,
        change_the_values,
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, damage: Any) -> None:
    values = saved_run(tmp_path, (1, 2, 3))
    newest = list_checkpoints(tmp_path)[-1]
    reason = damage(newest)
    model = Tied()
    checkpointer = Checkpointer(tmp_path, keep=2)
    restored = checkpointer.restore({"model": model})
    assert restored is not None
    assert (restored.step, restored.values) == (2, {"progress": {"step": 2}})
    assert torch.equal(model.embedding.weight, values[2]["embedding.weight"])
    (text,) = restored.damaged
    assert re.search(f"step-00000003: {reason}", text)
    with pytest.raises(ShoalError, match=rf"step-00000003 is damaged: {reason}"):
        load_model(newest, model)

    # the damaged one counts as none of the last two, and goes when the run has overtaken it
    checkpointer.save(3, {"model": model}, wait=True)
    assert [path.name[-1] for path in list_checkpoints(tmp_path)] == ["2", "3"]
    assert load_model(tmp_path, model) == 3


def test_a_run_with_only_damaged_checkpoints_lists_them(tmp_path: Path) -> None:
    saved_run(tmp_path)
    for path in list_checkpoints(tmp_path):
        lose_a_file(path)
    with pytest.raises(ShoalError, match=r"(?s)every checkpoint.*step-00000002: .*step-00000001: .*another"):
        Checkpointer(tmp_path).restore({"model": Tied()})


@pytest.mark.parametrize(("number", "writer"), [(1, "an older"), (9, "a newer")])
@pytest.mark.parametrize("name", ["step-00000002", "step-00000002.7.tmp"])
def test_another_format_is_refused_and_nothing_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, writer: str, name: str
) -> None:
    saved_run(tmp_path, (1,))
    with monkeypatch.context() as other:
        other.setattr(checkpoint_files, "FORMAT", number)
        saved_run(tmp_path, (2,))
    folder = tmp_path / "checkpoints"
    (folder / "step-00000002").rename(folder / name)
    before = sorted(path.name for path in folder.rglob("*"))
    message = rf"{name} has format {number}, of {writer} shoal, and this one reads 2: .* another --run\.dir"
    with pytest.raises(ShoalError, match=message):
        Checkpointer(tmp_path).restore({"model": Tied()})
    if name == "step-00000002":
        with pytest.raises(ShoalError, match=message):
            load_model(tmp_path, Tied())
    assert sorted(path.name for path in folder.rglob("*")) == before


def test_a_run_without_checkpoints_starts_anew(tmp_path: Path) -> None:
    assert Checkpointer(tmp_path).restore({"model": Tied()}) is None
    with pytest.raises(ShoalError, match="neither a checkpoint nor the directory of a run"):
        load_model(tmp_path, Tied())


class Exploit:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", [".metadata", COMPLETE, CONTENTS, "worker-00000.safetensors"])
def test_a_planted_pickle_is_never_run(tmp_path: Path, name: str) -> None:
    saved_run(tmp_path, (1,))
    ran = tmp_path / "ran"
    planted = pickle.dumps(Exploit(ran))
    (list_checkpoints(tmp_path)[0] / name).write_bytes(planted)
    if name == ".metadata":
        assert Checkpointer(tmp_path).restore({"model": Tied()}) is not None
    else:
        with pytest.raises(ShoalError, match=f"step-00000001: {name}"):
            Checkpointer(tmp_path).restore({"model": Tied()})
    assert not ran.exists()
    pickle.loads(planted)
    assert ran.exists(), "the planted pickle does nothing: the test tests nothing"


def test_another_model_is_refused_by_name_and_shapes_and_nothing_changes(tmp_path: Path) -> None:
    saved_run(tmp_path)
    wider = Tied(width=8)
    before = {name: tensor.clone() for name, tensor in wider.state_dict().items()}
    with pytest.raises(
        UsageError, match=r"model\.embedding\.weight has shape \(11, 8\), but \(11, 6\) in the"
    ):
        Checkpointer(tmp_path).restore({"model": wider})
    assert all(torch.equal(wider.state_dict()[name], value) for name, value in before.items())

    more = Tied()
    more.extra = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"does not hold model\.extra\.weight, model\.extra\.bias"):
        Checkpointer(tmp_path).restore({"model": more})
    fewer = nn.Module()
    fewer.embedding = nn.Embedding(11, 6)
    with pytest.raises(UsageError, match=r"holds model\.\w+(\.bias)?, .*which the model does not have"):
        Checkpointer(tmp_path).restore({"model": fewer})


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer)
    Checkpointer(tmp_path).save(1, {"model": model, "optimizer": optimizer}, wait=True)
    with pytest.raises(UsageError, match="written with AdamW, and optimizer is SGD now"):
        Checkpointer(tmp_path).restore({"model": model, "optimizer": torch.optim.SGD(model.parameters())})
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    with pytest.raises(UsageError, match="parameter groups of optimizer differ from"):
        Checkpointer(tmp_path).restore({"model": model, "optimizer": torch.optim.AdamW(groups)})
    with pytest.raises(UsageError, match="holds no opt:"):
        Checkpointer(tmp_path).restore({"model": model, "opt": optimizer})


def test_a_value_that_json_cannot_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(ShoalError, match="'progress' cannot be stored as JSON"):
        Checkpointer(tmp_path).save(1, {"progress": {"when": object()}})
    with pytest.raises(ShoalError, match=r"z is of type torch\.complex64"):
        Checkpointer(tmp_path).save(1, {"z": torch.zeros(1, dtype=torch.complex64)})
    with pytest.raises(ShoalError, match=r"updates a parameter of shape \(3,\) of no model"):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3))])
        Checkpointer(tmp_path).save(1, {"optimizer": optimizer})


def test_retention_keeps_the_last(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep=2)
    state = {"x": torch.zeros(3)}
    for step in range(50, 351, 50):
        checkpointer.save(step, state)
    checkpointer.finish()
    assert [int(path.name[5:]) for path in list_checkpoints(tmp_path)] == [300, 350]
    with pytest.raises(UsageError, match="keep=0 must be at least 1"):
        Checkpointer(tmp_path, keep=0)


@pytest.mark.parametrize(
    ("steps", "newest", "keep", "damaged", "gone"),
    [
        ([1, 2, 3], 3, 3, [], []),
        ([1, 2, 3], 3, 1, [], [1, 2]),
        ([1, 2, 3, 9], 3, 1, [], [1, 2]),  # 9 is of an attempt that went further
        ([1, 2, 3], 3, 2, [2], [2]),
        ([1, 2, 3], 3, 2, [3], [1]),  # 3 was damaged and has been written again
    ],
)
def test_what_retention_lets_go(
    steps: list[int], newest: int, keep: int, damaged: list[int], gone: list[int]
) -> None:
    assert superseded(steps, newest=newest, keep=keep, damaged=damaged) == gone


def test_leftovers_of_killed_runs_are_removed(tmp_path: Path) -> None:
    saved_run(tmp_path, (1,))
    folder = tmp_path / "checkpoints"
    for name in ("step-00000002.tmp", "step-00000003.7.tmp"):
        (folder / name).mkdir()
        (folder / name / "worker-00000.safetensors").write_bytes(b"half")
    for name in ("step-00000001.tmp", "step-00000001.old", "step-00000004.gone"):
        shutil.copytree(folder / "step-00000001", folder / name)
    before = (folder / "step-00000001" / COMPLETE).stat().st_ino
    Checkpointer(tmp_path)
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]
    assert (folder / "step-00000001" / COMPLETE).stat().st_ino == before


@pytest.mark.parametrize("damage", [None, flip_a_bit, lose_a_file, garble_the_mark, change_the_mark])
def test_a_whole_checkpoint_without_its_name_is_adopted(tmp_path: Path, damage: Any) -> None:
    """The newest one that is whole, or what it was to replace."""
    values = saved_run(tmp_path, (2, 3))
    saved_run(tmp_path / "other", (3,))
    folder = tmp_path / "checkpoints"
    (folder / "step-00000003").rename(folder / "step-00000003.old")
    newest = folder / "step-00000003.12.tmp"
    shutil.copytree(tmp_path / "other" / "checkpoints" / "step-00000003", newest)
    shutil.copytree(newest, folder / "step-00000003.9.tmp")
    lose_a_file(folder / "step-00000003.9.tmp")
    expected = (newest if damage is None else folder / "step-00000003.old").stat().st_ino
    if damage is not None:
        damage(newest)

    model = Tied()
    restored = Checkpointer(tmp_path).restore({"model": model})
    assert restored is not None and (restored.step, restored.damaged) == (3, [])
    assert torch.equal(model.embedding.weight, values[3]["embedding.weight"])
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000002", "step-00000003"]
    assert len(list(folder.iterdir())) == 2
    assert (folder / "step-00000003").stat().st_ino == expected


def test_a_failed_save_is_raised_by_the_next_poll(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of a run polls: a full disk is said at the next one, not at the next save."""

    def full(*args: Any) -> checkpoint_files.WrittenFile:
        raise ShoalError("cannot write: No space left on device")

    model = Tied()
    checkpointer = Checkpointer(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("shoal.train.checkpoint.write_file", full)
        checkpointer.save(1, {"model": model})
        pending = checkpointer._pending
        assert pending is not None and pending.thread is not None
        pending.thread.join()
    with pytest.raises(ShoalError, match="No space left on device"):
        checkpointer.poll()
    assert checkpointer.poll() == []
    checkpointer.save(2, {"model": model}, wait=True)
    assert [row.step for row in checkpointer.poll()] == [2]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder on a file system of 256 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def fill(path: Path) -> None:
    """Write a file until the disk is full."""
    with pytest.raises(OSError, match="No space left on device"), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system is mounted by root")
def test_a_full_disk_is_named_and_the_checkpoints_before_stay(small_disk: Path) -> None:
    values = saved_run(small_disk, (1,))
    model, filler = Tied(), small_disk / "filler"
    checkpointer = Checkpointer(small_disk, keep=9)
    fill(filler)
    with pytest.raises(ShoalError, match=r"cannot write .*step-00000002.*No space left on device"):
        checkpointer.save(2, {"model": model}, wait=True)
    restored = Checkpointer(small_disk).restore({"model": model})
    assert restored is not None and (restored.step, restored.damaged) == (1, [])
    assert torch.equal(model.embedding.weight, values[1]["embedding.weight"])
    filler.unlink()
    checkpointer.save(2, {"model": model}, wait=True)
    assert [path.name for path in list_checkpoints(small_disk)] == ["step-00000001", "step-00000002"]


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system is mounted by root")
def test_a_run_that_begins_on_a_full_disk_names_the_file_and_leaves_none(small_disk: Path) -> None:
    filler = small_disk / "filler"
    fill(filler)
    with pytest.raises(ShoalError, match=r"No space left on device: .*small"):
        Checkpointer(small_disk)
    filler.unlink()
    Checkpointer(small_disk).save(1, {"model": Tied()}, wait=True)


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    saved_run(tmp_path, (1,))
    checkpointer = Checkpointer(tmp_path)
    model = Tied()
    checkpointer.restore({"model": model})
    before = (list_checkpoints(tmp_path)[0] / COMPLETE).stat().st_ino
    checkpointer.save(1, {"model": model}, wait=True)
    assert checkpointer.poll() == []
    assert (list_checkpoints(tmp_path)[0] / COMPLETE).stat().st_ino == before


OUTSIDE = ["../step-00000002/worker-00000.safetensors", "/etc/passwd", "a/b", "..", "", 7]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_mark_that_leads_out_of_its_folder_is_malformed(tmp_path: Path, name: object) -> None:
    saved_run(tmp_path)
    path = list_checkpoints(tmp_path)[0]
    record = json.loads((path / COMPLETE).read_text())
    record["files"][0]["name"] = name
    del record["crc32"]
    mark = record | {"crc32": checkpoint_files._crc32_of(record)}
    (path / COMPLETE).write_text(json.dumps(mark))
    assert checkpoint_files.find_damage(path) == "complete.json is malformed"


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_table_that_leads_out_of_its_folder_is_refused(tmp_path: Path, name: object) -> None:
    saved_run(tmp_path)
    path = list_checkpoints(tmp_path)[0]
    table = json.loads((path / CONTENTS).read_text())
    next(iter(table["tensors"].values()))["chunks"][0]["file"] = name
    (path / CONTENTS).write_text(json.dumps(table))
    with pytest.raises(ShoalError, match=rf"{CONTENTS} cannot be read"):
        read_contents(path)
