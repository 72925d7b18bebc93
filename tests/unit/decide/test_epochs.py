"""Epochs as steps: against hand-computed values, and the definitions against each other."""

from __future__ import annotations

import pytest

from shoal.decide.epochs import Epochs

IMAGENET = 1_281_167


@pytest.mark.parametrize(
    ("batch", "epochs", "steps"),
    [
        (16_384, 90, 7_038),  # 90 · 1,281,167 / 16,384 = 7,037.66
        (16_384, 10, 782),  # 781.96
        (32_768, 58, 2_268),  # 2,267.69
        (32_768, 16, 626),  # 625.57
        (256, 90, 450_410),  # 450,410.27
        (256, 0.5, 2_502),  # 2,502.28
    ],
)
def test_published_points(batch: int, epochs: float, steps: int) -> None:
    assert Epochs(num_examples=IMAGENET, global_batch_size=batch).steps(epochs) == steps


@pytest.mark.parametrize(("num_examples", "batch"), [(50, 16), (48, 16), (50_000, 16_384), (7, 20), (1, 3)])
def test_an_epoch_ends_with_the_step_nearest_to_it(num_examples: int, batch: int) -> None:
    epochs = Epochs(num_examples=num_examples, global_batch_size=batch)
    ends = [epochs.steps(number) for number in range(200)]
    for number, step in enumerate(ends):
        assert abs(step * batch - number * num_examples) <= batch / 2
    last = ends[-1]
    for every in (1, 3):
        assert epochs.ends(every, last) == sorted({*ends[every::every], last} - {0})
    assert epochs.ends(0, last) == [last]
