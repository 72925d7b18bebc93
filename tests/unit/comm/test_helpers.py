"""Tests how helpers' links are measured: against links that let bytes through at once after a pause."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.comm.helpers import confirmed, until_steady


class Link:
    """A token bucket: ``burst`` bytes pass at ``line`` bytes/s, then ``rate`` bytes/s."""

    def __init__(self, rate: float, burst: float, line: float = 1.25e9) -> None:
        self.rate, self.line, self.credit = rate, line, burst
        self.num_transfers = 0

    def seconds(self, num_bytes: float) -> float:
        at_once = min(self.credit, num_bytes)
        self.credit -= at_once
        self.num_transfers += 1
        return at_once / self.line + (num_bytes - at_once) / self.rate


@pytest.mark.parametrize("burst", [0, 32e3, 256e3, 1e6, 2e6])
def test_a_burst_is_not_measured(burst: float) -> None:
    link, num_bytes = Link(6.25e6, burst), 6.25e6 / 8
    assert until_steady(lambda: link.seconds(num_bytes), least_s=0.5) == pytest.approx(0.125)


def test_a_link_without_bursts_is_measured_no_longer_than_asked() -> None:
    link = Link(6.25e6, 0)
    until_steady(lambda: link.seconds(6.25e6 / 8), least_s=0.5)
    assert link.num_transfers == 4


def test_transfers_end_where_no_two_agree() -> None:
    readings = iter(range(1, 100))
    assert until_steady(lambda: 2.0 ** next(readings), least_s=0.0) == 2.0**8


def readings_of(values: dict[int, list[float]]) -> tuple[list[int], dict[int, Iterator[float]]]:
    return [], {helper: iter(rest) for helper, rest in values.items()}


def test_a_disturbed_reading_is_taken_again_and_dropped() -> None:
    asked, more = readings_of({2: [0.97]})

    def measure(helper: int) -> float:
        asked.append(helper)
        return next(more[helper])

    assert confirmed([1.0, 1.05, 0.5, 0.98], measure) == [1.0, 1.05, 0.97, 0.98]
    assert asked == [2]


def test_a_helper_that_is_slower_each_time_is_believed() -> None:
    asked, more = readings_of({3: [0.45, 0.52]})

    def measure(helper: int) -> float:
        asked.append(helper)
        return next(more[helper])

    assert confirmed([1.0, 1.05, 0.98, 0.5], measure) == [1.0, 1.05, 0.98, 0.52]
    assert asked == [3, 3]
