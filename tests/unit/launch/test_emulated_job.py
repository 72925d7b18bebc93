"""Tests hosts that are cut off at times that the user gives, and come back."""

from __future__ import annotations

import time
from typing import Any

import pytest

from shoal.errors import UsageError
from shoal.launch.emulated_job import Failures, HostEvent, read_events


def test_events_in_order() -> None:
    assert read_events("3@40s,0@41.5s,join@60s,join@60s", num_hosts=4) == [
        HostEvent(40.0, 3),
        HostEvent(41.5, 0),
        HostEvent(60.0, None),
        HostEvent(60.0, None),
    ]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("3@40", "'3@40' is neither HOST@SECONDSs"),
        ("", "'' is neither"),
        ("3@40s,join@30s", "join@30s comes before 40s"),
        ("join@3s", "no host is away at join@3s"),
        ("3@1s,join@2s,join@3s", "no host is away at join@3s"),
        ("4@1s", "4@1s names none of 4 hosts"),
        ("3@1s,3@2s", "3@2s names none of 4 hosts"),
    ],
)
def test_events_that_cannot_be(text: str, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        read_events(text, num_hosts=4)


def test_the_host_that_is_away_longest_comes_back_first(capfd: pytest.CaptureFixture[str]) -> None:
    links: list[tuple[int, bool]] = []

    class Recorded:
        def link(self, host: int, *, up: bool) -> None:
            links.append((host, up))

    failures = Failures(read_events("2@0s,1@0s,join@0s", num_hosts=3), workers_per_host=2)
    cluster: Any = Recorded()
    with failures.of(cluster):
        while len(links) < 3:
            time.sleep(0.001)
    assert links == [(2, False), (1, False), (2, True)]
    assert [failures.has_host_of(rank) for rank in range(6)] == [True, True, False, False, True, True]
    assert "host 1 is cut off after 0 s" in capfd.readouterr().err
