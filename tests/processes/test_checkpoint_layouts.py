"""A checkpoint of any pipeline x data layout goes on in any other, with the optimizer's state."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_workers import run_workers
from staged_parameters import ALIASES, OPTIMIZERS, SHAPES, check_parts, make_parameters, set_gradient
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from shoal.errors import UsageError
from shoal.optim.lamb import parameter_groups
from shoal.pipelining.state_dict import ModelPart
from shoal.train.checkpoint import Checkpointer, load_model
from shoal.train.checkpoint_files import CONTENTS, list_checkpoints

SPLITS: dict[int, list[tuple[str, ...]]] = {
    1: [tuple(SHAPES)],
    2: [
        ("shared.weight", "first.weight", "first.bias"),
        ("second.weight", "second.scale", "second.filters", "shared.weight"),
    ],
    4: [
        ("shared.weight", "first.weight"),
        ("first.bias",),  # no group of weights that decay here
        (),
        ("second.weight", "second.scale", "second.filters", "shared.weight"),
    ],
}
KINDS = ("adamw", "adafactor, factored", "lamb")


class Tied(nn.Module):
    """The whole model as a user wrote it; ``first`` says which name of the tied weight comes first."""

    def __init__(self, first: str = "shared") -> None:
        super().__init__()
        weight = nn.Parameter(torch.zeros(SHAPES["shared.weight"]))
        for name in sorted(("shared", "decoder"), key=lambda name: name != first):
            self.add_module(name, nn.Module())
            self.get_submodule(name).register_parameter("weight", weight)
        for name, shape in SHAPES.items():
            if not name.startswith("shared"):
                module, _, own_name = name.partition(".")
                if module not in self._modules:
                    self.add_module(module, nn.Module())
                self.get_submodule(module).register_parameter(own_name, nn.Parameter(torch.zeros(shape)))


def make_state(layout: tuple[int, int], kind: str, *, shard: bool) -> tuple[nn.Module, Optimizer]:
    """Return what this worker holds in a layout of (pipeline, data), parameters of zeros."""
    num_stages, num_replicas = layout
    if layout == (1, 1):
        model: nn.Module = Tied()
    else:
        mesh = init_device_mesh("cpu", (num_replicas, num_stages), mesh_dim_names=("dp", "pp"))
        stage = mesh.get_local_rank("pp")
        parameters = make_parameters(SPLITS[num_stages][stage])
        model = ModelPart(parameters, aliases=ALIASES)
        if shard and num_replicas > 1:
            # as where several stages of one worker use it: whole there, in shards elsewhere
            whole = {parameters["shared.weight"]} if (stage, num_stages) == (0, 2) else set()
            fully_shard(model, mesh=mesh["dp"], ignored_params=whole)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    return model, OPTIMIZERS[kind](parameter_groups(model.named_parameters(), 0.02))


def take_steps(named: Mapping[str, nn.Parameter], optimizer: Optimizer, first: int, last: int) -> None:
    for step in range(first, last + 1):
        for name, parameter in named.items():
            set_gradient(name, parameter, step)
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / step
        optimizer.step()
        optimizer.zero_grad()


def begin_and_save(rank: int, run_dir: Path, layout: tuple[int, int], shard: bool) -> None:
    for kind in KINDS:
        model, optimizer = make_state(layout, kind, shard=shard)
        take_steps(dict(model.named_parameters()), optimizer, 1, 3)
        state = {"model": model, "optimizer": optimizer, "samples": 24 + rank}
        Checkpointer(run_dir / kind).save(3, state, wait=True)


def go_on(rank: int, run_dir: Path, layout: tuple[int, int], shard: bool) -> None:
    for kind in KINDS:
        model, optimizer = make_state(layout, kind, shard=shard)
        restored = Checkpointer(run_dir / kind).restore({"model": model, "optimizer": optimizer})
        assert restored is not None
        assert restored.values == {"samples": 24}
        named = dict(model.named_parameters())
        assert not named or {group["lr"] for group in optimizer.param_groups} == {0.05 / 3}
        take_steps(named, optimizer, 4, 6)
        check_parts(named, uninterrupted(kind))


def uninterrupted(kind: str) -> dict[str, nn.Parameter]:
    named = dict(Tied().named_parameters())
    take_steps(named, OPTIMIZERS[kind](parameter_groups(named.items(), 0.02)), 1, 6)
    return named


@pytest.mark.parametrize(
    "shard", [pytest.param(False, marks=pytest.mark.slow), True], ids=["replicated", "sharded"]
)
def test_saved_by_2_by_2_goes_on_in_every_other_layout(tmp_path: Path, shard: bool) -> None:
    assert run_workers(begin_and_save, 4, tmp_path / "meet", tmp_path, (2, 2), shard) == [0] * 4
    for kind in KINDS:
        stored_once(list_checkpoints(tmp_path / kind)[0], SHAPES)
    for layout in [(4, 1), (1, 4), (1, 1)]:
        num_workers = math.prod(layout)
        meeting = tmp_path / f"meet-{layout[0]}-{layout[1]}"
        assert run_workers(go_on, num_workers, meeting, tmp_path, layout, shard) == [0] * num_workers, layout


def stored_once(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that names are the model's own, without stages, and that every element is in one file only."""
    contents = json.loads((path / CONTENTS).read_text())
    tensors = {
        name.removeprefix("model."): t for name, t in contents["tensors"].items() if name.startswith("model.")
    }
    assert {name: tuple(tensor["size"]) for name, tensor in tensors.items()} == shapes
    for name, tensor in tensors.items():
        assert sum(math.prod(chunk["sizes"]) for chunk in tensor["chunks"]) == math.prod(shapes[name])
    assert contents["values"]["model"] == {"aliases": ALIASES}
    (decayed, plain) = sorted(
        contents["values"]["optimizer"]["param_groups"], key=lambda g: -g["weight_decay"]
    )
    assert sorted(decayed["params"]) == sorted(n for n, shape in shapes.items() if len(shape) > 1)
    assert sorted(plain["params"]) == ["first.bias", "second.scale"]


@pytest.mark.parametrize("layout", [(1, 1), pytest.param((4, 1), marks=pytest.mark.slow)])
def test_from_one_process_and_from_four_stages_to_two(tmp_path: Path, layout: tuple[int, int]) -> None:
    num_workers = math.prod(layout)
    saved = run_workers(begin_and_save, num_workers, tmp_path / "meet", tmp_path, layout, False)
    assert saved == [0] * num_workers
    assert run_workers(go_on, 2, tmp_path / "meet-2", tmp_path, (2, 1), False) == [0, 0]


def test_a_tied_weight_is_found_by_any_of_its_names(tmp_path: Path) -> None:
    assert run_workers(begin_and_save, 2, tmp_path / "meet", tmp_path, (2, 1), False) == [0, 0]
    model = Tied(first="decoder")
    assert "shared.weight" not in dict(model.named_parameters())
    optimizer = OPTIMIZERS["adamw"](parameter_groups(model.named_parameters(), 0.02))
    Checkpointer(tmp_path / "adamw").restore({"model": model, "optimizer": optimizer})
    named = {ALIASES.get(name, name): parameter for name, parameter in model.named_parameters()}
    take_steps(named, optimizer, 4, 6)
    check_parts(named, uninterrupted("adamw"))
    other = Tied(first="decoder")
    assert load_model(tmp_path / "adamw", other) == 3
    assert float(other.get_parameter("shared.weight").detach().abs().sum()) > 0

    untied = Tied()
    untied.get_submodule("decoder").register_parameter("weight", nn.Parameter(torch.zeros(17, 12)))
    with pytest.raises(UsageError, match=r"does not hold model\.decoder\.weight: it is of another model"):
        load_model(tmp_path / "adamw", untied)


def refuse_another_division(rank: int, run_dir: Path) -> None:
    """A parameter that no worker has, one that the checkpoint has not, and other groups are all told."""
    mesh = init_device_mesh("cpu", (2,))
    names = list(SPLITS[2][mesh.get_local_rank()])
    checkpointer = Checkpointer(run_dir / "adamw")

    def state_of(names: list[str], weight_decay: float = 0.02) -> dict[str, Any]:
        part = ModelPart(make_parameters(names), aliases=ALIASES)
        groups = parameter_groups(part.named_parameters(), weight_decay)
        if weight_decay == 0:
            groups[0]["eps"] = 1e-3
        return {"model": part, "optimizer": OPTIMIZERS["adamw"](groups)}

    with pytest.raises(UsageError, match=r"holds model\.second\.scale, which the model does not have"):
        checkpointer.restore(state_of([name for name in names if name != "second.scale"]))
    everywhere = state_of(names)
    if rank == 1:
        everywhere["model"].register_parameter("extra", nn.Parameter(torch.zeros(1)))
    with pytest.raises(UsageError, match=r"does not hold model\.extra"):
        checkpointer.restore(everywhere)
    everywhere = state_of(names)
    if rank == 0:
        groups = everywhere["optimizer"].param_groups
        groups[0]["params"].append(groups[1]["params"].pop())
    with pytest.raises(UsageError, match="parameter groups of optimizer differ from"):
        checkpointer.restore(everywhere)


def test_another_model_is_refused_by_all_workers(tmp_path: Path) -> None:
    assert run_workers(begin_and_save, 2, tmp_path / "meet", tmp_path, (2, 1), False) == [0, 0]
    assert run_workers(refuse_another_division, 2, tmp_path / "meet-2", tmp_path) == [0, 0]


def one_stage_grows(rank: int, run_dir: Path) -> None:
    """Between two saves only the second stage's optimizer gets state: both must share it out again."""
    part = ModelPart(make_parameters(SPLITS[2][rank]), aliases=ALIASES)
    optimizer = OPTIMIZERS["adamw"](parameter_groups(part.named_parameters(), 0.02))
    checkpointer = Checkpointer(run_dir)
    checkpointer.save(1, {"model": part, "optimizer": optimizer})
    if rank == 1:
        take_steps(dict(part.named_parameters()), optimizer, 1, 1)
    checkpointer.save(2, {"model": part, "optimizer": optimizer}, wait=True)
    contents = json.loads((list_checkpoints(run_dir)[-1] / CONTENTS).read_text())
    entries = [name for name in contents["tensors"] if name.startswith("optimizer.state.second.scale.")]
    assert len(entries) == 3
    fresh = OPTIMIZERS["adamw"](parameter_groups(part.named_parameters(), 0.02))
    checkpointer.restore({"model": part, "optimizer": fresh})
    assert len(fresh.state) == (4 if rank == 1 else 1)


def test_state_that_grows_on_one_stage_only(tmp_path: Path) -> None:
    assert run_workers(one_stage_grows, 2, tmp_path / "meet", tmp_path, deadline_s=60) == [0, 0]
