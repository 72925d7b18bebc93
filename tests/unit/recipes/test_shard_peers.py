"""Tests when servers of shards are not started; ``processes/test_runs_with_shard_peers.py`` has runs."""

import io
import json
import socket
from types import SimpleNamespace

import pytest

from shoal.data.cache import CacheConfig
from shoal.data.peers import Peer, Peers
from shoal.data.shard_server import open_server
from shoal.errors import UsageError
from shoal.recipes.shard_peers import _Server, join_peers
from synthetic_images import random_images, write_images


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


def test_without_counts_no_folder_of_counts_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_SECRET", "a secret of these tests")
    write_images(tmp_path / "data", random_images(4))
    line, answer = io.StringIO(), io.StringIO('{"problem": ""}\n')
    process = SimpleNamespace(stdin=line, stdout=answer)
    cache = CacheConfig(directory=tmp_path / "cache", num_bytes=1 << 20)
    peer = Peer(name="a", address="127.0.0.1", port=1, num_bytes=1 << 20)
    _Server(process, peer.address, peer.port).open(
        cache, Peers(hosts=(peer,), own="a"), "images", tmp_path / "data"
    )
    open_server(json.loads(line.getvalue()), socket.create_server(("127.0.0.1", 0))).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "data"]
