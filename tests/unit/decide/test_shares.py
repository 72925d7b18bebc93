"""Tests how shares of a global batch follow the times of the workers."""

from __future__ import annotations

import random
from itertools import product

import pytest

from shoal.decide.shares import FIRST_WINDOW, LAST_WINDOW, ReplayedShares, SharesBySpeed, balanced_shares


@pytest.mark.parametrize("total", [4, 7, 12])
@pytest.mark.parametrize("rates", [(1.0, 1.0), (1.0, 2.0), (1.0, 3.0, 7.0), (5.0, 1.0, 1.0), (100.0, 1.0)])
def test_balanced_shares_are_the_best_of_all(rates: tuple[float, ...], total: int) -> None:
    def slowest(shares: tuple[int, ...]) -> float:
        return max(rate * share for rate, share in zip(rates, shares, strict=True))

    all_shares = [
        shares for shares in product(range(1, total + 1), repeat=len(rates)) if sum(shares) == total
    ]
    shares = balanced_shares(rates, total)
    assert shares in all_shares
    assert slowest(shares) == min(map(slowest, all_shares))


def test_shares_are_multiples_of_the_unit_and_never_nothing() -> None:
    assert balanced_shares([1.0, 1.0, 50.0], 48, unit=8) == (24, 16, 8)


def run(
    shares: SharesBySpeed, speeds: list[float], steps: int, noise: float = 0.0, overhead: float = 0.0
) -> list[int]:
    """Return the steps before which the shares changed."""
    draw = random.Random(0)
    changes = []
    for step in range(1, steps + 1):
        times = [
            (overhead + share / speed) * draw.lognormvariate(0, noise)
            for share, speed in zip(shares.current, speeds, strict=True)
        ]
        if shares.observe(step, times):
            changes.append(step)
    return changes


def test_one_host_at_half_speed() -> None:
    shares = SharesBySpeed([64] * 8)
    assert run(shares, [1.0] * 7 + [0.5], 1_000) == [FIRST_WINDOW + 2]
    assert sorted(shares.current) == [34, *[68] * 5, 69, 69]


def test_a_constant_part_of_each_step_is_balanced_too() -> None:
    shares = SharesBySpeed([64] * 4)
    assert len(run(shares, [1.0, 1.0, 1.0, 0.5], 1_000, overhead=20.0)) == 2
    times = [20 + share / speed for share, speed in zip(shares.current, [1.0, 1.0, 1.0, 0.5], strict=True)]
    assert max(times) / min(times) < 1.04


def test_equal_speeds_never_change() -> None:
    shares = SharesBySpeed([64] * 8)
    assert run(shares, [1.0] * 8, 1_000) == []
    assert shares.current == (64,) * 8


@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_noise_seldom_changes_shares_and_never_by_much(noise: float) -> None:
    shares = SharesBySpeed([64] * 8)
    assert len(run(shares, [1.0] * 8, 2_000, noise=noise)) <= 2_000 / LAST_WINDOW / 2
    assert all(abs(share - 64) <= 64 * noise for share in shares.current)


def test_a_step_that_comes_again_is_counted_once() -> None:
    once, twice = SharesBySpeed([64, 64]), SharesBySpeed([64, 64])
    for step in range(1, 10):
        assert not once.observe(step, [1.0, 2.0])
        assert not twice.observe(step, [1.0, 2.0]) and not twice.observe(step, [1.0, 2.0])
    assert once.observe(10, [1.0, 2.0]) and twice.observe(10, [1.0, 2.0])
    assert once.current == twice.current == (86, 42)


def test_times_of_nothing_decide_nothing() -> None:
    shares = SharesBySpeed([64, 64])
    assert not any(shares.observe(step, [0.0, 1.0]) for step in range(100))


def test_replayed_shares_change_at_the_recorded_steps() -> None:
    recorded = [(5, [3, 1]), (9, [1, 3])]
    shares = ReplayedShares(recorded, [2, 2], 0)
    seen = [(shares.observe(step, []), shares.current) for step in range(1, 11)]
    assert [step for step, (changed, _) in enumerate(seen, start=1) if changed] == [5, 9]
    assert [current for _, current in seen] == [(2, 2)] * 4 + [(3, 1)] * 4 + [(1, 3)] * 2
    assert ReplayedShares(recorded, [2, 2], 6).current == (3, 1)
