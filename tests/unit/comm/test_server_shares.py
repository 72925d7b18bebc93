"""Tests the bandwidths that a group believes of its servers, from the times of their answers."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from shoal.comm.engine import Operation
from shoal.comm.server_shares import ServerShares
from shoal.decide.server_assignment import chunk_pattern

HOSTS = ["a", "a", "b", "c"]
HELPERS = ["x", "y"]
CALM = 8


class Engine:
    """An engine of rank 0 with servers of these times, whose sums add those of as many ranks as there are."""

    def __init__(self, num_servers: int) -> None:
        self.total = [(0, 0)] * num_servers
        self.pattern: list[int] | None = None

    def answer(self, milliseconds: list[float], chunks: int = 100) -> None:
        self.total = [
            (count + chunks, ns + int(chunks * each * 1e6))
            for (count, ns), each in zip(self.total, milliseconds, strict=True)
        ]

    def server_times(self) -> list[tuple[int, int]]:
        return list(self.total)

    def set_pattern(self, pattern: list[int]) -> None:
        self.pattern = pattern

    def submit(self, operation: Operation) -> int:
        values = (ctypes.c_int64 * operation.count).from_address(operation.input)
        for index in range(operation.count):
            values[index] *= len(HOSTS)
        return 0

    def wait(self, handle: int, timeout_s: float | None = None) -> bool:
        return True


@pytest.fixture
def engine() -> Engine:
    return Engine(len(HOSTS) + len(HELPERS))


def shares_of(engine: Any, helpers: tuple[float, float] = (1.0, 1.0)) -> ServerShares:
    return ServerShares(engine, HOSTS, HELPERS, helpers)


@pytest.mark.parametrize(
    "times",
    [
        [20.0, 20.0, 24.0, 18.0, 30.0, 50.0],  # equal links
        [0.05, 0.05, 0.05, 0.05, 0.05, 0.9],  # a processor's time
    ],
)
def test_equal_servers_keep_their_shares(engine: Engine, times: list[float]) -> None:
    shares = shares_of(engine)
    engine.answer(times)
    assert not shares.follow(1.0)
    assert shares.bandwidths == [1.0] * 5 and engine.pattern is None


def test_too_few_chunks_tell_nothing(engine: Engine) -> None:
    shares = shares_of(engine)
    engine.answer([20.0] * 5 + [300.0], chunks=3)
    assert not shares.follow(1.0)


def test_a_late_helper_gets_less_until_it_is_in_time(engine: Engine) -> None:
    shares = shares_of(engine, (1.0, 2.0))
    for bandwidth in (1.6, 1.28):
        engine.answer([20.0] * 5 + [200.0])
        assert shares.follow(1.0)
        assert shares.bandwidths == pytest.approx([1.0, 1.0, 1.0, 1.0, bandwidth], rel=1e-12)
        assert engine.pattern == chunk_pattern(HOSTS, shares.bandwidths[3:])
    engine.answer([20.0] * 6)
    assert not shares.follow(1.0)


def test_a_late_host_serves_less(engine: Engine) -> None:
    shares = shares_of(engine)
    engine.answer([20.0, 20.0, 200.0, 20.0, 20.0, 20.0])
    assert shares.follow(1.0)
    assert shares.bandwidths == [1.0, 0.8, 1.0, 1.0, 1.0]
    assert engine.pattern is not None
    full = chunk_pattern(HOSTS, (1.0, 1.0))
    assert engine.pattern.count(2) / len(engine.pattern) < full.count(2) / len(full)


def test_a_share_comes_back_by_little_and_more_rarely_each_time_it_is_too_much(engine: Engine) -> None:
    shares = shares_of(engine)

    def rounds_until(bandwidth: float, times: list[float]) -> int:
        for number in range(1, 200):
            engine.answer(times)
            shares.follow(1.0)
            if shares.bandwidths[-1] == pytest.approx(bandwidth):
                return number
        raise AssertionError(shares.bandwidths)

    late, calm = [20.0] * 5 + [200.0], [20.0] * 6
    assert rounds_until(0.8, late) == 1
    assert rounds_until(0.84, calm) == CALM
    assert rounds_until(0.672, late) == 1
    assert rounds_until(0.7056, calm) == 2 * CALM
    assert rounds_until(1.0, calm) == 8 * 2 * CALM  # never above what was given


def test_a_share_never_falls_below_a_twentieth(engine: Engine) -> None:
    shares = shares_of(engine)
    for _ in range(40):
        engine.answer([20.0] * 5 + [5000.0])
        shares.follow(1.0)
    assert shares.bandwidths[-1] == 0.05
