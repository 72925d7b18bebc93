"""A model that is split on the meta device: its stages get the same weights in every layout."""

from __future__ import annotations

import pytest
import torch
from stage_runs import largest_error, run_eager, run_stages
from torch import nn
from transformers import T5ForConditionalGeneration

from pipeline_models import cases
from shoal.errors import UsageError
from shoal.pipelining.device_placement import move_stages
from shoal.pipelining.export_graph import export_model
from shoal.pipelining.init_meta import init_meta, init_whole
from shoal.pipelining.split import split
from shoal.pipelining.units import units_of

CPU = torch.device("cpu")


def test_stages_of_a_meta_model_train_alike_in_every_layout() -> None:
    real, batch = cases()["t5"]()
    batch = {name: value[:2] for name, value in batch.items()}
    results, weights = [], []
    for num_stages in (1, 3):
        with torch.device("meta"):
            model = T5ForConditionalGeneration(real.config).train()
        shapes = {name: value.to("meta") for name, value in batch.items()}
        exported = export_model(model, shapes, True)
        units = units_of(exported)
        cuts = [index * len(units) // num_stages for index in range(1, num_stages)]
        stages = split(exported, cuts, units=units)
        assert all(p.is_meta for stage in stages for p in stage.parameters())
        init_meta(stages, model, CPU, seed=3)
        assert not any(p.is_meta for p in model.parameters())
        weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
        results.append(run_stages(model, stages, exported.unflatten, batch))
    for other in weights[1:]:
        assert all(torch.equal(other[name], value) for name, value in weights[0].items())
    assert weights[0]["shared.weight"].std() > 0
    assert max(largest_error(result, results[0]) for result in results[1:]) <= 1e-6
    real.load_state_dict(model.state_dict())
    assert largest_error(results[0], run_eager(real, batch)) <= 1e-6


def test_only_the_stages_given_are_allocated() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        batch = {"input": torch.zeros(2, 4)}
    stages = split(export_model(model, batch, True), [2])
    init_meta(stages[1:], model, CPU)
    assert [parameter.is_meta for parameter in model.parameters()] == [True] * 4 + [False] * 4


class Placed(nn.Module):
    """Adds positions that it makes while it runs, between two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        positions = torch.arange(4, device=hidden.device)
        return self.second(hidden + positions)


@pytest.mark.parametrize("move", ["init_meta", "move_stages", "to_empty"])
def test_a_stage_without_weights_makes_its_tensors_on_the_device(move: str) -> None:
    with torch.device("meta"):
        model, batch = Placed(), {"x": torch.zeros(2, 4)}
    exported = export_model(model, batch, True)
    first, middle, last = split(exported, [1, len(units_of(exported)) - 1])
    assert not list(middle.parameters())
    if move == "init_meta":
        init_meta([first, middle, last], model, CPU)
    elif move == "move_stages":
        move_stages(CPU, [middle])
    else:
        middle.to_empty(device=CPU)
    (found,) = middle(torch.ones(2, 4))
    assert torch.equal(found, torch.ones(2, 4) + torch.arange(4))


class Pair(nn.Module):
    """Draws both of its weights in one call, as transformers' attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def reset_parameters(self) -> None:
        for linear in (self.first, self.second):
            linear.weight.data.normal_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def test_a_cut_inside_a_module_that_draws_for_two_weights_changes_neither() -> None:
    def weights(*stages_made: int) -> dict[str, torch.Tensor]:
        with torch.device("meta"):
            model, batch = Pair(), {"x": torch.zeros(2, 4)}
        exported = export_model(model, batch, True)
        stages = split(exported, [len(units_of(exported)) - 1])
        init_meta([stages[index] for index in stages_made], model, CPU, seed=5)
        return {name: p.detach() for name, p in model.named_parameters() if not p.is_meta}

    both, first, second = weights(0, 1), weights(0), weights(1)
    assert (set(first), set(second)) == ({"first.weight"}, {"second.weight"})
    assert all(torch.equal(both[name], value) for name, value in (first | second).items())
    assert not torch.equal(both["first.weight"], both["second.weight"])


def test_a_whole_model_gets_the_weights_of_its_stages() -> None:
    with torch.device("meta"):
        model, other, batch = Pair(), Pair(), {"x": torch.zeros(2, 4)}
    init_meta(split(export_model(model, batch, True), []), model, CPU, seed=5)
    init_whole(other, CPU, seed=5)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_weights_that_nobody_initialises_are_refused() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    with torch.device("meta"):
        model, batch = nn.Sequential(Bare(), Bare()), {"input": torch.zeros(2, 3)}
    stages = split(export_model(model, batch, True), [1])
    with pytest.raises(UsageError, match="cannot initialise 'scale' of module '1'"):
        init_meta(stages, model, CPU)
    init_meta(stages, model, CPU, initialise=lambda module: None)
