"""The sums of a worker's memory; what is counted is in ``tests/unit/models/test_step_memory.py``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shoal.decide.footprint import Activations, Footprint, Numerics, optimizer_state_bytes
from shoal.decide.layout import Layout, footprint_of
from shoal.decide.workload import Layer, LayerPart, Workload

WORKLOAD = Workload(
    name="made",
    layers=tuple(Layer(name=str(n), num_parameters=100 * n, forward_flops=1.0) for n in (1, 2, 3, 4)),
    num_kernels=1,
    activations={
        Numerics.BF16_KERNELS: Activations(sample_bytes=100, fixed_bytes=10),
        Numerics.BF16: Activations(sample_bytes=300, fixed_bytes=10),
    },
    weight_sizes=((50, 2), (100, 2), (150, 2), (200, 2)),
)


def of(
    made: Workload, replicas: int = 1, numerics: Numerics = Numerics.BF16_KERNELS, **layout: Any
) -> Footprint:
    """The memory of a device, with four micro-batches of three samples."""
    return footprint_of(
        made,
        Layout(global_batch=12 * replicas, **layout),
        micro_batch=3,
        num_micro_batches=4,
        replicas=replicas,
        numerics=numerics,
    )


def test_the_sum_for_each_kind_of_optimizer() -> None:
    for optimizer, state in (("adamw", 8_000), ("sgd", 4_000), ("adafactor", 40)):
        made = replace(WORKLOAD, state_bytes=optimizer_state_bytes(optimizer))
        assert (of(made).optimizer_bytes, of(made).total_bytes) == (state, 8_000 + state + 310)


def test_stages_without_attention_kernels_keep_what_devices_without_them_keep() -> None:
    staged = replace(WORKLOAD, explicit_stages=True)
    assert of(WORKLOAD, numerics=Numerics.BF16).activations_bytes == 910
    assert of(staged).activations_bytes == 310
    assert of(staged, stages=2).activations_bytes == 905, "of two micro-batches in half of the layers"


def test_numerics_by_precision_and_device() -> None:
    found = [
        Numerics.of(precision, is_cpu=is_cpu, has_kernels=has_kernels)
        for precision in ("fp32", "fp16")
        for is_cpu, has_kernels in ((True, False), (False, False), (False, True))
    ]
    assert found == ["fp32", "fp32", "fp32-kernels", "fp16-cpu", "fp16", "fp16-kernels"]
    for each in Numerics:
        kind = {"is_cpu": each.is_cpu, "has_kernels": each.has_kernels}
        assert Numerics.of(each.precision, **kind) == each


def test_what_a_layout_divides() -> None:
    """Of four layers with 100, 200, 300 and 400 numbers, and weights of half of each."""
    assert of(WORKLOAD, 4, sharded_optimizer=True).optimizer_bytes == 8 * 250  # 200 + 50, or 150 + 100
    whole = of(WORKLOAD, 4, shard=True)
    assert (whole.weights_bytes, whole.gradients_bytes, whole.optimizer_bytes) == (5_000, 5_000, 2_000)
    in_blocks = replace(WORKLOAD, gathered=0.7)
    layers = of(in_blocks, 4, shard=True)
    assert (layers.weights_bytes, layers.gradients_bytes, layers.optimizer_bytes) == (3_800, 3_800, 2_000)
    assert of(in_blocks, 4) == of(WORKLOAD, 4)
    assert of(in_blocks, 2, stages=2, shard=True) == of(WORKLOAD, 2, stages=2, shard=True)
    halves = of(WORKLOAD, 2, stages=2)  # equal FLOPs: two layers each, 700 numbers in the second
    assert (halves.weights_bytes, halves.optimizer_bytes) == (2_800, 5_600)
    assert halves.activations_bytes == (10 + 2 * 3 * 100) / 2
    assert of(replace(WORKLOAD, trainable=0.1)).gradients_bytes == 400


def test_divided_layers_have_the_memory_of_a_part() -> None:
    kept = {Numerics.BF16_KERNELS: Activations(sample_bytes=70, fixed_bytes=6)}
    part = LayerPart(num_parameters=600, activations=kept)
    made = replace(WORKLOAD, parts={2: part})
    half = of(made, 2, tensor=2)
    assert (half.weights_bytes, half.gradients_bytes, half.optimizer_bytes) == (2_400, 2_400, 4_800)
    assert half.activations_bytes == 6 + 3 * 70
    assert of(made, 2, tensor=2, stages=2).weights_bytes == 2_400 * 0.7
    assert of(made, 2) == of(WORKLOAD, 2)


def test_copies_of_weights_count_once_for_any_number_of_samples() -> None:
    kept = Activations(sample_bytes=100, fixed_bytes=40)
    assert (kept.of(1), kept.of(8), kept.of(8, share=0.5)) == (140, 840, 420)


def test_checkpointing_adds_one_layer_that_is_computed_again() -> None:
    whole, stored = (
        Activations(sample_bytes=1_000, fixed_bytes=400, once_sample_bytes=7),
        Activations(sample_bytes=200, fixed_bytes=0, once_sample_bytes=6, once_fixed_bytes=2),
    )
    kept = stored.with_recomputed(whole, 8)
    assert kept == replace(stored, once_sample_bytes=106, once_fixed_bytes=52)
    assert kept.of(3) == 3 * 200 + 52 + 3 * 106


def test_a_layer_that_is_computed_again_is_divided_by_no_stages() -> None:
    """It is there once, whatever micro-batches are kept: fewer than stages, or as many."""
    again = Activations(sample_bytes=100, fixed_bytes=10, once_sample_bytes=40, once_fixed_bytes=8)
    made = replace(WORKLOAD, activations={Numerics.BF16_KERNELS: again})
    kept = [of(made, stages=stages).activations_bytes for stages in (1, 2, 4)]
    assert kept == [10 + 300 + 128, 5 + 300 + 128, 2 + 300 + 128]
    few = footprint_of(
        made,
        Layout(global_batch=12, stages=4),
        micro_batch=3,
        num_micro_batches=2,
        replicas=1,
        numerics=Numerics.BF16_KERNELS,
    )
    assert few.activations_bytes == 2 + 150 + 128
