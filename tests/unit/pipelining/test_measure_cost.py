"""Measured and estimated costs against counts that can be made by hand, and what measuring leaves behind."""

from __future__ import annotations

import gc
import resource
import time

import pytest
import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from pipeline_models import cases
from shoal.decide.cost import stage_costs
from shoal.errors import UsageError
from shoal.pipelining.export_graph import export_model
from shoal.pipelining.measure_cost import measure_cost
from shoal.pipelining.roofline import DeviceRates, estimate_cost
from shoal.pipelining.units import units_of

ROWS, WIDTH = 16, 32


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.sum()


def test_costs_of_a_small_model_by_hand() -> None:
    exported = export_model(Layers(), {"x": torch.randn(ROWS, WIDTH)}, True)
    rates = DeviceRates(flops_per_s=1e9, bytes_per_s=1e30, launch_s=0.0)
    estimated = estimate_cost(exported, rates)
    product = 2 * ROWS * WIDTH * WIDTH / 1e9
    matrices = [unit for unit in estimated.units if unit.parameters]
    assert [unit.name for unit in matrices] == ["layers.0", "layers.1", "layers.2"]
    assert [unit.parameters for unit in matrices] == [
        ((f"layers.{index}.weight", 4 * WIDTH * WIDTH),) for index in range(3)
    ]
    assert [unit.forward_s for unit in matrices] == pytest.approx([product] * 3)
    # the first layer's input needs no gradient
    assert [unit.backward_s for unit in matrices] == pytest.approx([product, 2 * product, 2 * product])
    activation = 4 * ROWS * WIDTH
    assert set(estimated.relay_bytes) == {activation}
    # what relu returns is kept by it and, the same storage, by the next layer
    assert stage_costs(estimated, [])[0].saved_bytes == 3 * activation
    measured = measure_cost(exported, repetitions=1)
    assert [unit.saved_bytes for unit in measured.units] == [unit.saved_bytes for unit in estimated.units]
    assert measured.relay_bytes == estimated.relay_bytes
    assert all(unit.forward_s > 0 for unit in measured.units)


def test_measuring_leaves_the_model_as_it_was() -> None:
    model, batch = cases()["resnet50"]()
    parameter = next(model.parameters())
    parameter.grad = torch.ones_like(parameter)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = torch.get_rng_state()
    measure_cost(export_model(model, batch, True), repetitions=1)
    assert torch.equal(parameter.grad, torch.ones_like(parameter))
    assert all(p.grad is None for p in model.parameters() if p is not parameter)
    assert all(torch.equal(buffers[name], buffer) for name, buffer in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), state)


def num_embeddings(model: nn.Module) -> int:
    """Return how many tensors with values are as large as the model's embedding."""
    shape = max(model.parameters(), key=torch.numel).shape
    tensors = (each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter) and not each.is_meta)
    return sum(each.shape == shape and each.is_floating_point() for each in tensors)


def test_a_model_on_meta_is_measured_as_the_real_one() -> None:
    real, batch = cases()["t5"]()
    wanted = measure_cost(export_model(real, batch, True), repetitions=1)
    with torch.device("meta"):  # not real.to("meta"), which would untie the embeddings
        model, _ = cases()["t5"]()
    shapes = {name: value.to("meta") for name, value in batch.items()}
    gc.collect()
    before = num_embeddings(model)
    gc.disable()  # cycles would be freed some time
    try:
        found = measure_cost(export_model(model, shapes, True), repetitions=1, stand_in=batch)
        assert num_embeddings(model) == before, "weights that were made up for the measurement stay"
    finally:
        gc.enable()
    # The two exports may be cut at different places where several are equally good; the whole is the same.
    assert sum(unit.saved_bytes for unit in found.units) == sum(unit.saved_bytes for unit in wanted.units)
    parameters = [{each for unit in cost.units for each in unit.parameters} for cost in (found, wanted)]
    assert parameters[0] == parameters[1]
    assert len(found.units) == len(wanted.units)
    assert found.source == "measured" and all(unit.forward_s > 0 for unit in found.units)
    assert all(parameter.is_meta and parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["t5"])
def test_estimate_counts_what_the_model_saves(name: str) -> None:
    model, batch = cases()[name]()
    exported = export_model(model, batch, True)
    rates = DeviceRates(flops_per_s=1e12, bytes_per_s=1e11)
    measured, estimated = measure_cost(exported, repetitions=1), estimate_cost(exported, rates)
    assert estimated.source == "roofline" and measured.source == "measured"
    saved = [stage_costs(cost, [])[0].saved_bytes for cost in (measured, estimated)]
    assert saved[1] == pytest.approx(saved[0], rel=0.3)


def test_costs_need_a_training_graph_and_a_device() -> None:
    model, batch = cases()["gpt2"]()
    with pytest.raises(UsageError, match="for training"):
        estimate_cost(export_model(model, batch, False), DeviceRates(flops_per_s=1, bytes_per_s=1))
    with pytest.raises(UsageError, match="real device"):
        measure_cost(export_model(model, batch, False))


@pytest.mark.slow
def test_t5_3b_is_exported_and_estimated_without_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.monotonic()
    exported = export_model(*t5_3b(), True)
    units = units_of(exported)
    cost = estimate_cost(exported, DeviceRates(flops_per_s=100e12, bytes_per_s=1.5e12), units=units)
    seconds = time.monotonic() - started
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    print(
        f"T5-3B: {len(units.flow.body)} nodes, {len(units)} units, {seconds:.1f} s, {grown / 2**30:.2f} GiB"
    )
    assert stage_costs(cost, [])[0].parameter_bytes == pytest.approx(4 * 2.85e9, rel=0.01)
    assert grown < 3 << 30
    assert 100 <= len(units) <= 300


def t5_3b() -> tuple[nn.Module, dict[str, Tensor]]:
    """Return T5-3B (Raffel et al. 2020, table of sizes) and one sequence of its pretraining, both on meta."""
    sizes = {"d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_layers": 24, "num_heads": 32}
    config = T5Config(**sizes, decoder_start_token_id=0)
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config)
        shapes = {"input_ids": (1, 512), "attention_mask": (1, 512), "labels": (1, 114)}
        batch = {name: torch.zeros(shape, dtype=torch.long) for name, shape in shapes.items()}
    return model.train(), batch
