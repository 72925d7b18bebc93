"""Tests the reader of EC2's notice with a service on this machine that asks for tokens as IMDSv2 does."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from instance_metadata import Service, serving
from shoal.errors import ShoalError
from shoal.launch import spot_notice
from shoal.launch.spot_notice import DISABLED, ENDPOINT, metadata_endpoint, read_notice, watched_notice

NOTICE = {"action": "terminate", "time": "2026-11-28T08:22:00Z"}


@pytest.fixture
def service() -> Iterator[Service]:
    with serving() as service:
        yield service


def test_there_is_no_notice_until_the_service_has_one(service: Service) -> None:
    assert read_notice(service.url) is None
    service.notice = json.dumps(NOTICE).encode()
    assert read_notice(service.url) == "terminate at 2026-11-28T08:22:00Z"


@pytest.mark.parametrize("answer", [b"<html>", b"[]", b'{"action": "none"}', b'{"action": "stop"}'])
def test_an_answer_of_another_form_is_no_notice(service: Service, answer: bytes) -> None:
    service.notice = answer
    with pytest.raises(ShoalError, match="spot/instance-action"):
        read_notice(service.url)


def test_a_watch_outlives_failures_and_tells_once(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spot_notice, "POLL_S", 0.01)
    monkeypatch.setenv(ENDPOINT, service.url)
    service.notice = b"<html>"
    told: queue.Queue[str] = queue.Queue()
    with watched_notice(told.put):
        while service.num_looks < 3:
            threading.Event().wait(0.01)
        service.notice = json.dumps(NOTICE).encode()
        assert told.get(timeout=60) == "terminate at 2026-11-28T08:22:00Z"
    assert told.empty()


@pytest.mark.parametrize(
    ("vendor", "environ", "expected"),
    [
        ("Amazon EC2\n", {}, "http://169.254.169.254"),
        ("QEMU\n", {}, None),
        (None, {}, None),
        ("Amazon EC2\n", {DISABLED: "True"}, None),
        ("QEMU\n", {ENDPOINT: "http://127.0.0.1:80/"}, "http://127.0.0.1:80"),
    ],
)
def test_only_machines_of_ec2_ask(
    vendor: str | None, environ: dict[str, str], expected: str | None, tmp_path: Path
) -> None:
    if vendor is not None:
        (tmp_path / "sys_vendor").write_text(vendor)
    assert metadata_endpoint(environ, tmp_path) == expected
