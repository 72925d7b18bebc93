"""``shoal serve`` with a cache: a server of shards beside that of sums, which ends with it."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.worker import command

from shoal.data.cache import OWN_FOLDER
from shoal.data.peers import PeerError, room_of
from shoal.env.settings import HelperAddress
from shoal.errors import EXIT_OK, EXIT_USAGE
from shoal.launch.emulated import HELPER_COMMAND, Cluster
from shoal.launch.emulated_network import HELPER_PORT
from synthetic_images import random_images, write_images

HOSTS, DEADLINE_S = 2, 200.0
SECRET = "the secret of a helper with shards"


def serve(*words: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-u",
        "-m",
        "shoal.comm.server",
        "--address",
        "127.0.0.1",
        "--port",
        "0",
        *words,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_shards_are_kept_beside_the_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_SECRET", raising=False)
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "secret").chmod(0o600)
    words = ("--secret-file", str(tmp_path / "secret"), "--cache", str(tmp_path / "cache"))
    with serve(*words, "--cache-bytes", "3MB") as server:
        assert server.stdout is not None
        told, listening = server.stdout.readline(), server.stdout.readline()
        port = int(listening.rpartition(":")[2])
        assert told == f"shoal serve: keeps 3MB of shards in {tmp_path}/cache, port {port + 1}\n"
        monkeypatch.setenv("SHOAL_SECRET", SECRET)
        address = HelperAddress(address="127.0.0.1", port=port)
        peer = room_of(address)
        assert peer is not None and (peer.port, peer.num_bytes) == (port + 1, 3_000_000)
        monkeypatch.setenv("SHOAL_SECRET", "another secret than that of the helper")
        with pytest.raises(PeerError, match="is not of this job"):
            room_of(address)
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == EXIT_OK
    assert room_of(address) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--cache", "/dev/shm/x"), "--cache and --cache-bytes belong together"),
        (("--cache-bytes", "3MB"), "--cache and --cache-bytes belong together"),
        (
            ("--cache", "/dev/shm/x", "--cache-bytes", "much"),
            "--cache-bytes 'much' must be a number with a unit",
        ),
    ],
)
def test_what_does_not_belong_together(
    words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_SECRET", SECRET)
    server = serve(*words)
    _, err = server.communicate(timeout=60)
    assert (server.returncode, said in err) == (EXIT_USAGE, True), err


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("tc"), reason="emulated hosts need root and iproute2"
)
def test_a_helper_of_a_job_reads_its_part_for_all(tmp_path: Path) -> None:
    write_images(tmp_path / "data", random_images(40), num_shards=8)
    once = sum(path.stat().st_size for path in (tmp_path / "data").glob("*.tar"))
    spec = {
        **{"cache": str(tmp_path / "cache"), "cache_bytes": 1 << 20, "peers": True, "epochs": 1, "local": ""},
        "backend": "shoal",
        **{"killed": None, "location": str(tmp_path / "data")},
    }
    with Cluster(hosts=HOSTS, helpers=1) as cluster:
        place = ["--address", cluster.plan[HOSTS].address, "--port", str(HELPER_PORT)]
        kept = ["--cache", str(tmp_path / "helper"), "--cache-bytes", "1GB"]
        server = cluster.start(HOSTS, [*HELPER_COMMAND, *place, *kept], stdout=subprocess.PIPE)
        assert server.stdout is not None
        with server.stdout as told:
            assert "keeps 1GB of shards" in told.readline()
            assert "listening on" in told.readline()
        workers = cluster.start_workers(command("benchmarks.cache_worker:read", spec, tmp_path / "out.json"))
        assert [worker.wait(DEADLINE_S) for worker in workers] == [0] * HOSTS
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(HOSTS)]
    copied = sum(path.stat().st_size for path in (tmp_path / "helper" / OWN_FOLDER).glob("*.tar"))
    read = sum(result["counts"]["storage_bytes"] for result in results)
    assert copied > 0 and copied + read == once
    assert all(result["counts"]["num_peer_failures"] == 0 for result in results)
