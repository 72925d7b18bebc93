"""Tests ``shoal serve --metrics``: a helper's counters as Prometheus reads them, and what else is refused."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from http.client import HTTPConnection
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest
from comm_group import SECRET, Group, HelperProcess, expected, stream
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

import shoal
from shoal import native
from shoal.comm.metrics import MAX_CLIENTS, METRICS, MetricsServer, parse_location
from shoal.errors import ShoalError, UsageError

COUNT = 100_000
STEPS = 5
DEADLINE_S = 0.3


def scrape(url: str) -> dict[str, Metric]:
    """Read the page as Prometheus does."""
    with urlopen(url, timeout=10) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        text = answer.read().decode()
    assert text.endswith("\n")
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(families: dict[str, Metric], name: str) -> float:
    (sample,) = families[f"shoal_server_{name}"].samples
    return sample.value


def test_the_counters_of_a_helper_that_served_an_all_reduce() -> None:
    begin = time.time()
    with HelperProcess("h0", arguments=("--metrics", "0")) as helper:
        assert helper.process.stdout is not None
        said, _, url = helper.process.stdout.readline().strip().partition(" at ")
        assert (said, urlsplit(url).hostname) == ("shoal serve: metrics", "127.0.0.1")
        before = scrape(url)
        with Group(stream, "ab", STEPS, COUNT, helpers=[helper]) as group:
            for rank in range(2):
                group.expect(rank, "done")
                assert group.values(rank, "sum") == expected(group.hosts, STEPS, COUNT)
        after = scrape(url)
        helper.stop()
    counted = {name for name, family in after.items() if family.type == "counter"}
    assert counted == {
        f"shoal_server_{name}"
        for name in ("summed_chunks", "received_bytes", "sent_bytes", "received_frames", "sent_frames",
                     "dropped_strangers", "lost_paths")
    }  # fmt: skip
    assert all(family.documentation for family in after.values())
    assert all(sample.name == f"{name}_total" for name in counted for sample in after[name].samples)
    moved = 2 * STEPS * COUNT * 4  # each rank sends each tensor whole to the only server, and gets the sum
    for name in ("received_bytes", "sent_bytes"):
        assert value(before, name) == 0
        assert moved < value(after, name) < 1.05 * moved
    assert value(after, "summed_chunks") >= STEPS
    assert value(after, "dropped_strangers") == value(after, "lost_paths") == 0
    assert begin - 1 < value(after, "start_time_seconds") < time.time() + 1
    (info,) = after["shoal_server_info"].samples
    assert info.labels == {"version": shoal.__version__}


def test_chunks_of_all_groups_are_counted_once() -> None:
    with HelperProcess("h0", arguments=("--metrics", "0")) as helper:
        assert helper.process.stdout is not None
        url = helper.process.stdout.readline().strip().partition(" at ")[2]
        summed = []
        for steps in (4, 2):  # a group that ended, and another with fewer sums
            with Group(stream, "ab", steps, COUNT, helpers=[helper]) as group:
                for rank in range(2):
                    group.expect(rank, "done")
            summed.append(value(scrape(url), "summed_chunks"))
        helper.stop()
    assert summed[0] > 0
    assert summed[1] == summed[0] * 6 / 4


def test_every_counter_of_the_core_has_a_metric() -> None:
    server = native.core().HelperServer("127.0.0.1", 0, SECRET.encode(), 0)
    assert set(server.counters()) == {name for name in METRICS if not name.startswith("fabric_")}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 404), ("GET", "/metrics/../secret", 404), ("POST", "/metrics", 501)],
)
def test_other_requests_are_refused(method: str, path: str, status: int) -> None:
    with MetricsServer("0", dict) as pages:
        request = Request(pages.url.removesuffix("/metrics") + path, method=method)
        with pytest.raises(HTTPError) as refused:
            urlopen(request, timeout=10)
        assert refused.value.code == status
        refused.value.close()


def test_silent_clients_are_closed_and_keep_nobody_out_for_longer() -> None:
    with MetricsServer("0", dict, deadline_s=DEADLINE_S) as pages, ExitStack() as stack:
        place = urlsplit(pages.url)
        assert place.hostname and place.port
        silent = [
            stack.enter_context(socket.create_connection((place.hostname, place.port)))
            for _ in range(2 * MAX_CLIENTS)
        ]
        for client in silent:
            client.settimeout(60)
            assert client.recv(1) == b""
        assert "shoal_server_info" in scrape(pages.url)


def test_many_connections_of_one_address_keep_no_other_out() -> None:
    with MetricsServer("0", dict, deadline_s=30.0) as pages, ExitStack() as stack:
        place = urlsplit(pages.url)
        there = (str(place.hostname), int(place.port or 0))
        silent = [
            stack.enter_context(socket.create_connection(there, source_address=("127.0.0.2", 0)))
            for _ in range(3 * MAX_CLIENTS)
        ]
        assert "shoal_server_info" in scrape(pages.url)
        for client in silent[:-1]:
            client.settimeout(10)
            assert client.recv(1) == b""


def test_an_endless_request_is_cut_off() -> None:
    with MetricsServer("0", dict, deadline_s=DEADLINE_S) as pages:
        place = urlsplit(pages.url)
        connection = HTTPConnection(str(place.hostname), place.port, timeout=60)
        connection.connect()
        assert isinstance(connection.sock, socket.socket)
        with connection.sock as client, pytest.raises(OSError):
            for _ in range(600):
                client.sendall(b"GET /metrics")  # never a line end, and never silent
                time.sleep(0.1)


def test_places() -> None:
    assert parse_location("0") == ("127.0.0.1", 0)
    assert parse_location("10.0.0.21:9100") == ("10.0.0.21", 9100)
    for wrong in ("", ":9100", "9100:", "host", "65536", "-1", "1.5"):
        with pytest.raises(UsageError, match="it is PORT"):
            parse_location(wrong)


def test_a_port_in_use_is_one_line() -> None:
    with MetricsServer("0", dict) as pages:
        port = urlsplit(pages.url).port
        with pytest.raises(ShoalError, match=f"--metrics {port}: Address already in use"):
            MetricsServer(str(port), dict)


def test_the_server_loads_no_http_without_metrics() -> None:
    ask = "import sys, shoal.comm.server; print('http' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout
    assert told == "False\n"
