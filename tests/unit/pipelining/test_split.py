"""A split model computes what the unsplit model computes: loss, every gradient, every buffer."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from stage_runs import check_specs, largest_error, run_eager, run_stages, send
from torch import Tensor, nn

from pipeline_models import FAMILIES, Batch, cases
from shoal.pipelining.export_graph import ExportedGraph, export_model
from shoal.pipelining.random_streams import streams
from shoal.pipelining.split import split
from shoal.pipelining.units import Units, units_of

EXACT = 1e-6
NAMES = tuple(cases())


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums of several threads are in no fixed order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def micro_batch(batch: Batch, rows: int = 4) -> Batch:
    return {name: value[:rows] for name, value in batch.items()}


@functools.cache
def exported_case(name: str) -> tuple[nn.Module, Batch, ExportedGraph]:
    """Exporting takes most of a test's time."""
    model, batch = cases()[name]()
    batch = micro_batch(batch)
    return model, batch, export_model(model, batch, True)


def restore(model: nn.Module, buffers: Batch) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


def even_cuts(units: Units, num_stages: int) -> list[int]:
    return [index * len(units) // num_stages for index in range(1, num_stages)]


@pytest.mark.parametrize(
    "name", [name if name in FAMILIES else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_split_is_exact_and_evaluates(name: str) -> None:
    model, batch, training = exported_case(name)
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    evaluation = export_model(model, batch, False)
    assert all(torch.equal(buffer, buffers[n]) for n, buffer in model.named_buffers())
    twin = copy.deepcopy(model)
    expected = run_eager(twin, batch)
    twin.eval()
    with torch.no_grad():
        expected_outputs = twin(**batch)
    units = units_of(training)
    for num_stages in (2, 4):
        restore(model, buffers)
        stages = split(training, even_cuts(units, num_stages), evaluation=evaluation, units=units)
        result = run_stages(model, stages, training.unflatten, batch)
        assert largest_error(result, expected) <= EXACT
        assert {n for s in stages for n in s.parameter_names.values()} == dict(
            model.named_parameters()
        ).keys()
        assert all(spec.dtype.is_floating_point for stage in stages for spec in stage.body.relayed_out)
        outputs = evaluate(stages, batch)
        assert torch.equal(evaluation.unflatten(outputs).loss, expected_outputs.loss)


def evaluate(stages: list, batch: Batch) -> tuple:
    values: tuple = ()
    with torch.no_grad():
        for stage in stages:
            stage.eval()
            values = stage(*values, **batch)
            if stage is not stages[-1]:
                check_specs(stage, values)
    for stage in stages:
        stage.train()
    return values


@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES if name != "gpt2")]
)
def test_every_cut_at_once_evaluates(name: str) -> None:
    """Some units of training, such as the dropout of an attention, are nothing in evaluation."""
    model, batch = cases(dropout=0.1)[name]()
    batch = micro_batch(batch)
    training, evaluation = export_model(model, batch, True), export_model(model, batch, False)
    units = units_of(training)
    cuts = range(1, len(units))
    stages = split(training, cuts, evaluation=evaluation, units=units)
    of_training = split(training, cuts, units=units)
    assert [s.parameter_names for s in stages] == [s.parameter_names for s in of_training]
    model.eval()
    with torch.no_grad():
        expected = model(**batch).loss
    assert torch.equal(evaluation.unflatten(evaluate(stages, batch)).loss, expected)


@pytest.mark.parametrize(
    ("name", "stride"),
    [
        ("t5", 15),
        ("resnet50", 30),
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ("t5", "albert", "bart", "resnet50")),
    ],
)
def test_every_cut_is_exact(name: str, stride: int) -> None:
    model, batch, exported = exported_case(name)
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    expected = run_eager(copy.deepcopy(model), batch)
    units = units_of(exported)
    assert len(units) > 20
    for cut in range(1, len(units), stride):
        restore(model, buffers)
        stages = split(exported, [cut], units=units)
        assert largest_error(run_stages(model, stages, exported.unflatten, batch), expected) <= EXACT
        assert sum(spec.num_bytes for spec in stages[0].body.relayed_out) == units.relay_bytes[cut - 1]


@pytest.mark.parametrize(
    "name",
    ["bert", "t5", *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES if name != "resnet50")],
)
def test_dropout_does_not_depend_on_the_layout(name: str) -> None:
    model, batch = cases(dropout=0.3)[name]()
    batch = micro_batch(batch, 2)
    exported = export_model(model, batch, True)
    units = units_of(exported)
    results = []
    for num_stages, step in ((1, 5), (2, 5), (4, 5), (2, 6)):
        stages = split(exported, even_cuts(units, num_stages), units=units)
        state = torch.get_rng_state()
        with streams(3, step, range(2, 4)):
            results.append(run_stages(model, stages, exported.unflatten, batch))
        assert torch.equal(torch.get_rng_state(), state)
    one, two, four, other_step = results
    assert max(largest_error(two, one), largest_error(four, one)) <= EXACT
    assert largest_error(other_step, one) > 1e-3


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_dropout_does_not_depend_on_micro_batches(name: str) -> None:
    """Rows 0 to 4 as one micro-batch and as two; each loss is the mean over its own targets."""
    model, batch = cases(dropout=0.3)[name]()
    gradients = []
    for size in (4, 2):
        exported = export_model(model, micro_batch(batch, size), True)
        stages = split(exported, even_cuts(units_of(exported), 2))
        total: dict[str, Tensor] = {}
        for first in range(0, 4, size):
            rows = {key: value[first : first + size] for key, value in batch.items()}
            count = int((rows["labels"] != -100).sum())
            with streams(3, 5, range(first, first + size)):
                found = run_stages(model, stages, exported.unflatten, rows)
            for key, gradient in found.gradients.items():
                total[key] = total.get(key, 0) + gradient * count
        gradients.append(total)
    whole, parts = gradients
    scale = max(gradient.abs().max().item() for gradient in whole.values())
    assert max((parts[key] - whole[key]).abs().max().item() for key in whole) <= EXACT * scale


def test_ties_are_one_parameter_in_all_stages() -> None:
    model, _, exported = exported_case("t5")
    assert {exported.aliases[n] for n in ("lm_head.weight", "encoder.embed_tokens.weight")} == {
        "shared.weight"
    }
    stages = split(exported, even_cuts(units_of(exported), 4))
    owners = [stage for stage in stages if "shared.weight" in stage.parameter_names.values()]
    assert len(owners) >= 2
    assert {id(stage.get_parameter("weights.shared.weight")) for stage in owners} == {id(model.shared.weight)}


def test_tiny_weights_are_used_where_they_are_needed() -> None:
    """T5's position bias is larger than its table: the table is shared, the bias is not sent."""
    _, _, exported = exported_case("t5")
    stages = split(exported, even_cuts(units_of(exported), 16))
    table = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert sum(table in stage.parameter_names.values() for stage in stages) >= 2
    assert all(
        (12, 12) not in (s.shape[1:3], s.shape[:2]) for stage in stages for s in stage.body.relayed_out
    )


class Loss(NamedTuple):
    loss: Tensor
    other: Tensor


class Awkward(nn.Module):
    """In-place operations, a tuple, an integer that depends on weights, a frozen weight, an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.table = nn.Embedding(8, 8)
        self.unused = nn.Linear(3, 3)
        self.first.weight.requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Loss:
        self.calls.add_(1)
        hidden = self.first(x)
        hidden[:, :2] *= 0.5
        hidden.relu_()
        top, where = self.second(hidden).topk(2, dim=-1)
        picked = self.table(where).sum(1)
        other = torch.tanh(self.third(picked) + hidden)
        with torch.no_grad():
            scale = other.abs().max() + 1
        return Loss(loss=(other / scale).pow(2).mean() + top.mean(), other=other)


def test_awkward_operations_are_exact_at_every_cut() -> None:
    torch.manual_seed(2)
    model, batch = Awkward().train(), {"x": torch.randn(5, 8)}
    expected = run_eager(copy.deepcopy(model), batch)
    exported = export_model(model, batch, True)
    units = units_of(exported)
    assert len(units) >= 6
    integers = 0
    for cut in range(1, len(units)):
        stages = split(exported, [cut], units=units)
        model.calls.zero_()
        assert largest_error(run_stages(model, stages, exported.unflatten, batch), expected) <= EXACT
        integers += any(not spec.dtype.is_floating_point for spec in stages[0].body.relayed_out)
        assert "weights.unused.weight" in stages[0].parameter_names
    assert integers, "no cut sent the integers that depend on weights"


def test_stages_send_memory_of_their_own() -> None:
    """T5's third stage hands the encoder's output on."""
    _, batch, exported = exported_case("t5")
    stages = split(exported, even_cuts(units_of(exported), 4))
    received: tuple[Tensor, ...] = ()
    passed_on = 0
    for stage in stages[:-1]:
        sent = stage(*received, **batch)
        passed_on += sum(any(torch.equal(out, value) for value in received) for out in sent)
        assert {out.data_ptr() for out in sent}.isdisjoint(value.data_ptr() for value in received)
        received = tuple(send(value) for value in sent)
    assert passed_on


class Total(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum()


def test_gradients_that_go_back_are_contiguous() -> None:
    batch = {"x": torch.randn(2, 3)}
    first, last = split(export_model(Total(), batch, True), [1])
    (received,) = map(send, first(**batch))
    (gradient,) = torch.autograd.grad(last(received)[0], received)
    assert gradient.is_contiguous() and gradient.untyped_storage().nbytes() == 4 * 2 * 4
