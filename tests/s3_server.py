"""Fixtures with an S3 endpoint on this host: moto's server over HTTP, and none of this machine's settings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

BUCKET = "pictures"


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    """Run the server; return its URL."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Give boto3's own chain made credentials."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "absent"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "made")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "up")
    return monkeypatch


@pytest.fixture
def s3_bucket(s3_server: str, s3_settings: pytest.MonkeyPatch) -> Iterator[Any]:
    """Make a bucket, whose endpoint is in the environment."""
    s3_settings.setenv("AWS_ENDPOINT_URL", s3_server)
    bucket = boto3.resource("s3").Bucket(BUCKET)
    bucket.create()
    yield bucket
    bucket.objects.all().delete()
    bucket.delete()
