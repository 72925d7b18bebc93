"""The arithmetic of batches against its definition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.decide.batch import plan_batch
from shoal.errors import UsageError
from shoal.train.config import TrainConfig


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 9))
def test_the_product_is_the_global_batch(micro: int, workers: int, accumulation: int) -> None:
    size = micro * workers * accumulation
    plan = plan_batch(TrainConfig(global_batch_size=size, micro_batch_size=micro), workers)
    assert plan.accumulation_steps == accumulation
    assert plan.worker_batch_size * workers == size


@given(st.integers(1, 5_000), st.integers(1, 16))
def test_the_default_micro_batch_is_the_largest_divisor_up_to_64(share: int, workers: int) -> None:
    plan = plan_batch(TrainConfig(global_batch_size=share * workers, micro_batch_size=None), workers)
    assert share % plan.micro_batch_size == 0
    assert not any(share % larger == 0 for larger in range(plan.micro_batch_size + 1, 65))


@pytest.mark.parametrize(
    ("size", "workers", "micro", "message"),
    [
        (32, 3, None, "global_batch_size 32 does not divide over 3 workers; .* 30 and 33"),
        (2, 4, None, "the nearest sizes that do are 4"),
        (32, 2, 5, "micro_batch_size 5 does not divide a worker's share of 16 .* are 4 and 8"),
        (32, 2, 20, "nearest sizes that do are 16"),
    ],
)
def test_sizes_that_do_not_divide(size: int, workers: int, micro: int | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_batch(TrainConfig(global_batch_size=size, micro_batch_size=micro), workers)


def test_the_arithmetic_is_printed_whole() -> None:
    plan = plan_batch(TrainConfig(global_batch_size=4_096, micro_batch_size=32), 64)
    assert str(plan) == "32 sequences × 2 accumulation steps × 64 workers = 4,096 sequences a step"
