"""Random models with skip connections over any distance, at random cuts (property test)."""

from __future__ import annotations

import copy
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_runs import largest_error, run_eager, run_stages
from torch import Tensor, nn

from shoal.pipelining.export_graph import export_model
from shoal.pipelining.split import split
from shoal.pipelining.units import units_of

SIZE = 6
OPERATIONS = ("linear", "tied", "add", "relu_", "norm", "split", "mask", "scale")


class Output(NamedTuple):
    loss: Tensor


class Random(nn.Module):
    """Each step makes a value of two earlier ones; the loss uses all that are left over."""

    def __init__(self, steps: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self.steps = steps
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in steps)
        self.norms = nn.ModuleList(nn.BatchNorm1d(SIZE) for _ in steps)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Output:
        values, used = [x, self.layers[0](x)], set()
        mask = (x > 0).to(x.dtype)
        for index, (operation, left, right) in enumerate(self.steps):
            a, b = values[left % len(values)], values[right % len(values)]
            used |= {left % len(values), right % len(values)}
            values.append(self._step(operation, index, a, b, mask))
        rest = [value for index, value in enumerate(values) if index not in used]
        return Output(loss=torch.stack(rest).pow(2).mean())

    def _step(self, operation: str, index: int, a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
        if operation == "linear":
            return self.layers[index](a) + b
        if operation == "tied":
            return torch.tanh(self.layers[0](a)) * b
        if operation == "relu_":
            return (a - b).relu_()
        if operation == "norm":
            return self.norms[index](a) + b
        if operation == "split":
            first, second = torch.tanh(a).split(SIZE // 2, dim=-1)
            return torch.cat([second, first], dim=-1) + b
        if operation == "mask":
            return a * mask + b
        if operation == "scale":
            return a * self.scale.expand(a.shape) - b.mean(0, keepdim=True)
        return a + b.transpose(0, 1).contiguous().transpose(0, 1)


STEPS = st.lists(
    st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 50), st.integers(0, 50)), min_size=3, max_size=12
)
CUTS = st.sets(st.integers(0, 200), min_size=1, max_size=4)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(steps=STEPS, cuts=CUTS)
def test_random_graphs_are_exact(steps: list[tuple[str, int, int]], cuts: set[int]) -> None:
    check(steps, cuts)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True)
@given(steps=STEPS, cuts=CUTS)
def test_many_random_graphs_are_exact(steps: list[tuple[str, int, int]], cuts: set[int]) -> None:
    check(steps, cuts)


def check(steps: list[tuple[str, int, int]], cuts: set[int]) -> None:
    torch.manual_seed(4)
    model, batch = Random(steps).train().double(), {"x": torch.randn(5, SIZE, dtype=torch.float64)}
    exported = export_model(model, batch, True)
    expected = run_eager(copy.deepcopy(model), batch)
    units = units_of(exported)
    places = sorted({1 + cut % (len(units) - 1) for cut in cuts})
    stages = split(exported, places, units=units)
    assert largest_error(run_stages(model, stages, exported.unflatten, batch), expected) <= 1e-12
