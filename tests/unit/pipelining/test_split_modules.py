"""Stages from lists of module names: exact for a chain of modules, refused with the reason otherwise."""

from __future__ import annotations

import copy
from typing import NamedTuple

import pytest
import torch
from stage_runs import largest_error, run_eager, run_stages
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.pipelining.random_streams import streams
from shoal.pipelining.split_modules import split_by_modules


class Output(NamedTuple):
    loss: Tensor


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Linear(6, 3)

    def forward(self, hidden: Tensor, labels: Tensor) -> Output:
        return Output(loss=nn.functional.cross_entropy(self.classes(hidden), labels))


class Branches(nn.Module):
    """A module that no graph can hold: control flow that depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(6, 6), nn.Dropout(0.4)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.dropout(self.layer(hidden)) if hidden.sum() > -1e9 else hidden


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.blocks = nn.ModuleList([Branches(), Branches()])
        self.head = Head()

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        hidden = self.stem(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden, labels)


class WithSkip(Chain):
    def forward(self, x: Tensor, labels: Tensor) -> Output:
        hidden = self.stem(x)
        return self.head(self.blocks[1](self.blocks[0](hidden)) + hidden, labels)


NAMES = ["stem", "blocks.0", "blocks.1", "head"]


def build(kind: type[Chain] = Chain) -> tuple[Chain, dict[str, Tensor]]:
    torch.manual_seed(5)
    return kind().train(), {"x": torch.randn(4, 6), "labels": torch.tensor([0, 2, 1, 1])}


@pytest.mark.parametrize("stages", [[NAMES], [NAMES[:2], NAMES[2:]], [[name] for name in NAMES]])
def test_chain_is_exact(stages: list[list[str]]) -> None:
    model, batch = build()
    for block in model.blocks:
        block.dropout.p = 0.0
    expected = run_eager(copy.deepcopy(model), batch)
    made = split_by_modules(model, stages, batch)
    result = run_stages(model, made, lambda outputs: Output(*outputs), batch)
    assert largest_error(result, expected) == 0
    names = {name for stage in made for name in stage.parameter_names.values()}
    assert names == dict(model.named_parameters()).keys()


def test_dropout_of_modules_does_not_depend_on_the_layout() -> None:
    model, batch = build()
    results = []
    for stages in ([NAMES], [NAMES[:1], NAMES[1:2], NAMES[2:]]):
        with streams(1, 2, range(3, 5)):
            made = split_by_modules(model, stages, batch)
            results.append(run_stages(model, made, lambda outputs: Output(*outputs), batch))
    assert torch.equal(results[0].loss, results[1].loss)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([["stem"], ["blocks.0", "blocks.1", "had"]], "no module 'had'. Did you mean 'head'"),
        ([["stem", "blocks.0"], ["blocks.0", "blocks.1", "head"]], "'blocks.0' is named twice"),
        (
            [["stem", "stem.0"], ["blocks.0", "blocks.1", "head"]],
            "'stem' is named twice, with 'stem.0' in it",
        ),
        ([["stem", "blocks.0"], ["head"]], "parameter 'blocks.1.layer.weight' is in none of the modules"),
        ([["stem", "blocks.0", "blocks.1", "head"], []], "stage 1 has no modules"),
        ([["stem"], ["blocks", "head"]], "'blocks' does not take what 'stem' returns"),
        ([["head"], ["stem", "blocks.0", "blocks.1"]], "'head' does not take the model's inputs"),
    ],
)
def test_wrong_lists_are_refused(stages: list[list[str]], message: str) -> None:
    model, batch = build()
    with pytest.raises(UsageError, match=message):
        split_by_modules(model, stages, batch)


def test_more_than_a_chain_is_refused() -> None:
    model, batch = build(WithSkip)
    with pytest.raises(UsageError, match="do not return what WithSkip returns"):
        split_by_modules(model, [NAMES[:2], NAMES[2:]], batch)
