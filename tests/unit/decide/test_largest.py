"""The search for the largest micro-batch against memories whose largest one is known."""

from __future__ import annotations

import pytest

from shoal.decide.largest import largest_that_fits


@pytest.mark.parametrize("largest", [0, 1, 2, 3, 7, 8, 9, 31, 32, 33, 100, 1000, 5000])
@pytest.mark.parametrize("overhead", [0, 10_000])
@pytest.mark.parametrize("raises", [False, True])
def test_linear_memory(largest: int, overhead: int, raises: bool) -> None:
    """Memory that is too little is seen by the limit, or because the trial failed."""
    trials = []

    def peak(samples: int) -> int | None:
        trials.append(samples)
        return None if raises and samples > largest else overhead + 10 * samples

    found = largest_that_fits(peak, overhead + 10 * largest + 9)
    assert found <= largest < found + max(1, found // 32) + 1
    assert found == largest or largest > 32
    assert len(set(trials)) == len(trials) <= 9, trials
    assert found in trials or not found, "what is returned has been tried"


def test_memory_that_grows_in_steps_and_more_than_linearly() -> None:
    for peak in (
        lambda samples: 1 << (samples - 1).bit_length(),  # an allocator that rounds up
        lambda samples: 5 + samples * samples,
        lambda samples: 700 if samples < 40 else 2_000,  # as a process that was larger before
    ):
        limit = 1_024
        found = largest_that_fits(peak, limit)
        fitting = max(samples for samples in range(1, 2_000) if peak(samples) <= limit)
        assert fitting - max(1, fitting // 32) <= found <= fitting


def test_no_more_than_the_most_are_tried() -> None:
    assert largest_that_fits(lambda samples: samples, 1_000, most=48) == 48
