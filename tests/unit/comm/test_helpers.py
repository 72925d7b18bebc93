"""Tests how helpers' links are measured: against links that let bytes through at once after a pause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from shoal.comm.helpers import Probe, confirmed, connections_help, until_steady


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


@dataclass(kw_only=True)
class OnLinks(Probe):
    """A probe of links of known rates, whose transfers take what the model of the decision code says.

    A helper has a first message from each host before it sends any result; the hosts' links send meanwhile.
    """

    host_bytes_per_s: float
    helpers: list[float]
    """multiples of it"""
    message_bytes: int = 16 << 10
    spent_s: float = field(default=0.0, init=False)

    def _seconds(self, pattern: list[int], num_bytes: int) -> float:
        counts, hosts = Counter(pattern), self.num_hosts
        took_s = 0.0
        for server, count in counts.items():
            share = num_bytes * count / len(pattern)
            if server < hosts:
                took_s = max(took_s, (num_bytes + (hosts - 2) * share) / self.host_bytes_per_s)
            else:
                rate = self.helpers[server - hosts] * self.host_bytes_per_s
                took_s = max(took_s, hosts * (share + self.message_bytes) / rate)
        took_s = max(took_s, num_bytes / self.host_bytes_per_s)
        self.spent_s += took_s
        return took_s


def on_links(hosts: int, helpers: list[float], mbit: float) -> OnLinks:
    unused = cast(Any, None)
    return OnLinks(
        engine=unused, records=unused, rank=0, size=hosts, num_hosts=hosts, timeout_s=60.0,
        host_bytes_per_s=mbit / 8 * 1e6, helpers=helpers,
    )  # fmt: skip


@pytest.mark.parametrize("mbit", [50, 200, 1000])
@pytest.mark.parametrize(("hosts", "num_helpers"), [(16, 16), (16, 8), (8, 8), (8, 1), (4, 2), (2, 1)])
def test_helpers_like_the_hosts_are_seen_as_equal(hosts: int, num_helpers: int, mbit: float) -> None:
    probe = on_links(hosts, [1.0] * num_helpers, mbit)
    assert probe.helper_rates(probe.host_rate(), num_helpers) == [1.0] * num_helpers


@pytest.mark.parametrize(("hosts", "num_helpers"), [(16, 8), (8, 4), (4, 2)])
def test_helpers_of_other_rates_are_seen(hosts: int, num_helpers: int) -> None:
    for factor in (0.4, 2.0):
        probe = on_links(hosts, [factor] * num_helpers, 200)
        together = sum(probe.helper_rates(probe.host_rate(), num_helpers))
        assert together == pytest.approx(min(factor * num_helpers, hosts), rel=0.15)
    one_slow = [1.0] * (num_helpers - 1) + [0.4]
    *others, slow = on_links(hosts, one_slow, 200).helper_rates(25e6, num_helpers)
    assert slow == pytest.approx(0.4, rel=0.2) and min(others) >= 0.8


def test_one_helper_of_many_hosts_is_not_measured_for_seconds() -> None:
    probe = on_links(16, [1.0], 200)
    host = probe.host_rate()
    probe.spent_s = 0.0
    probe.helper_rates(host, 1)
    assert probe.spent_s < 1.5


@pytest.mark.parametrize(
    ("one", "several", "helps"),
    [
        pytest.param([1.0] * 5, [4.0] * 4, True, id="flows-are-capped"),
        pytest.param([1.0] * 5, [1.0] * 4, False, id="one-fills-the-link"),
        pytest.param([0.6, 0.6, 1.0, 0.6, 0.6], [1.0] * 4, False, id="one-was-disturbed-twice"),
        pytest.param([1.0] * 5, [2.0, 1.1, 2.0, 2.0], False, id="several-were-faster-once"),
        pytest.param([0.5, 1.0, 1.0, 1.0, 1.0], [4.0] * 4, True, id="capped-and-disturbed"),
    ],
)
def test_more_connections_must_help_every_time(one: list[float], several: list[float], helps: bool) -> None:
    first, *later = one
    assert connections_help(iter(later).__next__, iter(several).__next__, first) is helps
