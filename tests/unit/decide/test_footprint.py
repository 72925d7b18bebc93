"""The sums of a worker's memory; what is counted is in ``tests/unit/models/test_step_memory.py``."""

from __future__ import annotations

from shoal.decide.footprint import Activations, footprint, optimizer_state_bytes


def test_the_sum_for_each_kind_of_optimizer() -> None:
    for optimizer, state in (("adamw", 8_000), ("sgd", 4_000), ("adafactor", 40)):
        found = footprint(1_000, state_bytes=optimizer_state_bytes(optimizer), activations_bytes=500)
        assert (found.optimizer_bytes, found.total_bytes) == (state, 8_000 + state + 500)


def test_copies_of_weights_count_once_for_any_number_of_samples() -> None:
    kept = Activations(sample_bytes=100, fixed_bytes=40)
    assert (kept.of(1), kept.of(8), kept.of(8, share=0.5)) == (140, 840, 420)


def test_checkpointing_adds_one_layer_that_is_computed_again() -> None:
    whole, stored = (
        Activations(sample_bytes=1_000, fixed_bytes=400),
        Activations(sample_bytes=200, fixed_bytes=0),
    )
    assert stored.with_recomputed(whole, 8) == Activations(sample_bytes=300, fixed_bytes=50)
