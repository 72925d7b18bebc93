"""Activations that are counted without a step, against torch's tracker of memory over the whole step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from shoal.decide.batch import BatchPlan
from shoal.decide.footprint import Numerics
from shoal.decide.layout import Layout, footprint_of
from shoal.dropout import SampleDropout
from shoal.models.encoder import full_sequences, packed_inputs
from shoal.models.step_memory import TYPES, FusedAttention, kept_activations
from shoal.models.token_losses import token_losses
from shoal.planner.hardware import Catalog
from shoal.planner.recipe_workloads import catalog
from shoal.recipes import Sample, script, token_ids
from shoal.recipes.memory import activations_of, memory_of
from shoal.recipes.workloads import preset_settings


def test_linear_layers_by_hand() -> None:
    """Sums before the rectification are not kept, nor is the first layer's copy of its weights."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def count(numerics: Numerics) -> tuple[float, float]:
        found = kept_activations(
            model,
            {"x": torch.empty(32, 8)},
            lambda model, inputs: model(inputs["x"]).sum(),
            num_samples=32,
            numerics=numerics,
        )
        return found.sample_bytes, found.fixed_bytes

    gradient = 4 * 8 * 16
    assert count(Numerics.FP32) == (
        4 * 16 + 2 * 4 * 16 + 4 / 32,
        gradient,
    )  # the rectified sums, gradients, the loss
    assert count(Numerics.BF16_CPU) == (
        2 * (8 + 16) + 2 * 2 * 16 + 2 / 32,
        2 * 16 * 4 + gradient,
    )  # and the input's copy
    assert all(weight.device.type == "cpu" and not weight.is_meta for weight in model.parameters())
    with torch.autocast("cpu", enabled=False):
        inside = count(Numerics.BF16_CPU)[1]
    assert inside == 2 * 16 * 4 + gradient, "an autocast around it keeps no copies alive"


def test_losses_of_tokens_by_hand() -> None:
    """Of 32 rows of 1,000 logits, on devices with and without the kernels, whatever the counting host has."""
    kept = {
        numerics: kept_activations(
            nn.Linear(8, 1000, bias=False),
            {"x": torch.empty(32, 8), "labels": torch.zeros(32, dtype=torch.int64)},
            lambda model, inputs: token_losses(model(inputs["x"]), inputs["labels"])[0].sum(),
            num_samples=32,
            numerics=numerics,
        ).sample_bytes
        for numerics in Numerics
    }
    loss, casts, sums, index, mask = 4 / 32, 2 * 8, 4, 8, 1
    for each, found in kept.items():
        is_cast = each.precision != "fp32"
        number = 2 if is_cast and each.has_kernels else 4  # kernels read logits as they are
        operands = sums if each.has_kernels else sums + index + mask
        assert found == is_cast * casts + 3 * number * 1000 + operands + loss, each


@pytest.mark.parametrize(
    ("recipe", "preset", "layers", "heads"),
    [("bert", "base", {"num_hidden_layers": 2}, 2 * 12), ("t5", "small", {"num_layers": 2}, 2 * 8)],
)
def test_attention_kernels_keep_no_matrix(
    recipe: str, preset: str, layers: dict[str, int], heads: int
) -> None:
    counted = sample_of(recipe, preset, **layers)
    kernel, explicit = (
        activations_of(counted, each).sample_bytes for each in (Numerics.BF16_KERNELS, Numerics.BF16)
    )
    matrices = heads * counted.sequence_length**2
    assert explicit - kernel > 3 * matrices, "weights, dropped weights, their mask"


def test_stages_of_t5_keep_matrices() -> None:
    """They are exported, without the kernels."""
    config, hosts = preset_settings("t5", "small"), Catalog().machines("p4d.24xlarge")
    config = replace(config, train=replace(config.train, precision="bf16"))
    batch = BatchPlan(global_batch_size=8, micro_batch_size=8, accumulation_steps=1, num_workers=1)
    counted = script("t5").sample(config)
    divided = replace(config, parallel=replace(config.parallel, pipeline=2))
    one, two = (memory_of(counted, each, batch, hosts).activations_bytes for each in (config, divided))
    kernel, explicit = (activations_of(counted, each) for each in (Numerics.BF16_KERNELS, Numerics.BF16))
    assert one == kernel.of(8) and two == explicit.of(8, 1 / 2) > one / 2
    whole = catalog()["t5-small"][0]
    layouts = (Layout(global_batch=8), Layout(global_batch=8, stages=2))
    found = [
        footprint_of(
            whole,
            layout,
            micro_batch=8,
            num_micro_batches=1,
            replicas=1,
            numerics=Numerics.BF16_KERNELS,
        )
        for layout in layouts
    ]
    kept = [each.activations_bytes for each in found]
    assert kept == pytest.approx([one, two], rel=0.05)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recipe", ["bert", "albert", "t5"])
def test_memory_of_a_worker_within_a_tenth_of_the_tracker(recipe: str, precision: str) -> None:
    """Of the smallest models; weights, gradients and the optimizer's state included."""
    counted = sample_of(recipe, "tiny")
    kept, state = activations_of(counted, numerics_on_cpu(precision)).of(8), 16 * counted.num_parameters
    assert kept + state == pytest.approx(tracked_bytes(counted, recipe, 8, precision) + state, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("recipe", "preset", "micro_batch"),
    [("bert", "large", 8), ("albert", "base", 16), ("t5", "small", 8), ("t5", "base", 4)],
)
def test_activations_within_a_tenth_of_the_tracker(
    recipe: str, preset: str, micro_batch: int, precision: str
) -> None:
    counted = sample_of(recipe, preset)
    kept = activations_of(counted, numerics_on_cpu(precision)).of(micro_batch)
    assert kept == pytest.approx(tracked_bytes(counted, recipe, micro_batch, precision), rel=0.1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_checkpointing_within_a_tenth_of_the_tracker(precision: str) -> None:
    counted = sample_of("bert", "base", activation_checkpointing=True)
    kept = activations_of(counted, numerics_on_cpu(precision)).of(8)
    assert activations_of(counted, numerics_on_cpu(precision)).of(8) == kept, (
        "counting changes nothing in the sample"
    )
    assert counted.recompute
    counted.recompute(counted.model)
    assert kept == pytest.approx(tracked_bytes(counted, "bert", 8, precision), rel=0.1)


def numerics_on_cpu(precision: str) -> Numerics:
    return Numerics.of(precision, is_cpu=True, has_kernels=False)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_checkpointing_in_stages_within_a_tenth_of_the_tracker(precision: str) -> None:
    """The first of 4 stages keeps 2 micro-batches of its 3 layers, and computes one layer again."""
    config = preset_settings("bert", "base")
    config = replace(
        config,
        model=replace(config.model, activation_checkpointing=True, vocab_size=1_024),
        phase2=replace(config.phase2, total_steps=0),
        train=replace(config.train, precision=precision),
        parallel=replace(config.parallel, pipeline=4),
    )
    batch = BatchPlan(global_batch_size=16, micro_batch_size=8, accumulation_steps=2, num_workers=1)
    kept = memory_of(script("bert").sample(config), config, batch).activations_bytes
    first = script("bert").sample(replace(config, model=replace(config.model, num_hidden_layers=3)))
    assert first.recompute
    first.recompute(first.model)
    first = replace(first, loss=hidden_sum)
    assert kept == pytest.approx(tracked_bytes(first, "bert", 8, precision, micro_batches=2), rel=0.1)


def hidden_sum(model: Any, inputs: Mapping[str, Any]) -> Tensor:
    hidden: Tensor = model.encoder(**packed_inputs(inputs))
    return hidden.sum()


def sample_of(recipe: str, preset: str, **sizes: Any) -> Sample:
    config = preset_settings(recipe, preset)
    sample: Sample = script(recipe).sample(replace(config, model=replace(config.model, **sizes)))
    return sample


def inputs_of(counted: Sample, recipe: str, num_samples: int) -> dict[str, Any]:
    """Return the inputs of a sample for another number of samples."""
    if recipe == "t5":
        return {name: token_ids(num_samples, ids.shape[1]) for name, ids in counted.inputs.items()}
    masked = len(counted.inputs["masked_ids"]) * num_samples // counted.num_samples
    inputs = {
        **full_sequences(num_samples, counted.sequence_length),
        "masked_rows": token_ids(masked),
        "masked_ids": token_ids(masked),
        "labels": token_ids(num_samples),
    }
    return {name: inputs[name] for name in counted.inputs}


def tracked_bytes(
    counted: Sample, recipe: str, num_samples: int, precision: str, micro_batches: int = 1
) -> int:
    """Return the peak of forward and then backward passes beyond weights, gradients and AdamW's state.

    Gradients are there before the step, as those of earlier micro-batches and DDP's buckets are.
    """
    model, inputs = copy.deepcopy(counted.model), inputs_of(counted, recipe, num_samples)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = with_new_weights(model)
        inputs = {name: on_cpu(each) if isinstance(each, Tensor) else each for name, each in inputs.items()}
        weights = list(model.parameters())
        optimizer = torch.optim.AdamW(weights, foreach=False)
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
        tracker = MemTracker()
        given = [each for each in inputs.values() if isinstance(each, Tensor)]
        tracker.track_external(model, optimizer, *given, *[w.grad for w in weights if w.grad is not None])
        with FusedAttention(), tracker:
            passes = Passes(model)  # the tracker has no reference
            losses = passes(micro_batches, precision, lambda: keyed(counted, model, inputs, num_samples))
            while losses:
                torch.autograd.backward(losses.pop(0))
    peak: int = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    return peak - 16 * sum(weight.numel() for weight in weights)


class Passes(nn.Module):
    """Stands around a model that is called more than once, which the tracker takes inside a module only."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, number: int, precision: str, run: Callable[[], Tensor]) -> list[Tensor]:
        losses = []
        for _ in range(number):
            with torch.autocast("cpu", dtype=TYPES[precision], enabled=precision != "fp32"):
                losses.append(run())
        return losses


def keyed(counted: Sample, model: nn.Module, inputs: Mapping[str, Any], num_samples: int) -> Tensor:
    with SampleDropout(torch.empty(num_samples, dtype=torch.int64)):
        loss: Tensor = counted.loss(model, inputs)
        return loss


def with_new_weights(model: nn.Module) -> nn.Module:
    """Return the model with weights on the CPU instead of the meta device; tied ones stay tied."""
    new: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                new.setdefault(weight, nn.Parameter(on_cpu(weight), weight.requires_grad))
                module._parameters[name] = new[weight]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else on_cpu(buffer)
    return model


def on_cpu(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)
