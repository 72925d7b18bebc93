"""Tests when servers of shards are not started; ``processes/test_runs_with_shard_peers.py`` has runs."""

from types import SimpleNamespace

import pytest

from shoal.data.cache import CacheConfig
from shoal.errors import UsageError
from shoal.recipes.shard_peers import join_peers


def world(num_hosts):
    return SimpleNamespace(
        num_hosts=num_hosts, control=None, rank=0, ranks=SimpleNamespace(local_rank=0), num_workers=1
    )


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, r"needs the job's secret, .*: make one with .* export SHOAL_SECRET_FILE=job\.secret"),
        (
            {"SHOAL_SECRET": "a secret of these tests", "SHOAL_ENCRYPT": "1"},
            "SHOAL_ENCRYPT=1: shards between hosts are not encrypted",
        ),
    ],
)
def test_refusals(variables, message, tmp_path, monkeypatch):
    for name in ("SHOAL_SECRET", "SHOAL_SECRET_FILE", "SHOAL_ENCRYPT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    cache = CacheConfig(directory=tmp_path / "cache", num_bytes=1)
    with pytest.raises(UsageError, match=message):
        join_peers(world(2), cache, kind="images", location=tmp_path)
    assert not (tmp_path / "cache").exists()


def test_one_host_has_no_peers(tmp_path):
    cache = CacheConfig(directory=tmp_path / "cache", num_bytes=1)
    assert join_peers(world(1), cache, kind="images", location=tmp_path) is cache
