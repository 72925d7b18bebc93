"""The launcher and strangers: no port on one host, nothing unpickled and no secret shown on several."""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import json
import os
import pickle
import signal
import socket
import stat
import struct
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from launched import SECRET, START_DEADLINE_S, Launched, Launchers

from forked import fork_process, free_port, wait_for
from shoal.comm.tcp_store import TcpStoreServer, listening_socket
from shoal.errors import EXIT_STOPPED, UsageError
from shoal.launch.local import launch


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Launchers]:
    with Launchers(tmp_path) as launchers:
        yield launchers


def variables_of(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(entry.decode().split("=", 1) for entry in entries if entry)


# ---- one host: no port -----------------------------------------------------------------------------------


def listening(pid: int) -> set[str]:
    """Return the addresses on which a process listens for TCP connections, ports left out."""
    addresses = {}
    for path in (f"/proc/{pid}/net/tcp", f"/proc/{pid}/net/tcp6"):
        for line in Path(path).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                words = bytes.fromhex(fields[1].split(":")[0])
                data = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                addresses[f"socket:[{fields[9]}]"] = str(ipaddress.ip_address(data))
    found = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found.add(str(path.readlink()))
    return {addresses[name] for name in found & addresses.keys()}


@pytest.mark.parametrize(
    ("backend", "expected"), [("", set()), ("gloo", {"127.0.0.1"}), ("shoal", {"127.0.0.1"})]
)
def test_on_one_host_only_backends_listen_and_on_loopback(
    start: Launchers, tmp_path: Path, backend: str, expected: set[str]
) -> None:
    job = start("endless", backend=backend)
    job.await_file("step-0", "step-1")
    assert listening(job.pid) == set()
    assert [listening(job.pid_of(rank)) for rank in (0, 1)] == [expected] * 2
    folder = Path(job.variables_of(0)["SHOAL_STORE_FILE"]).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    job.signal(signal.SIGTERM)
    assert job.wait() == EXIT_STOPPED
    assert not folder.exists()


def test_on_one_host_workers_meet_on_loopback_whatever_was_exported(start: Launchers) -> None:
    job = start("endless", environ={"MASTER_ADDR": "10.9.8.7", "MASTER_PORT": "1"})
    job.await_file("step-0", "step-1")
    variables = variables_of(job.pid_of(1))
    assert variables["MASTER_ADDR"] == "127.0.0.1" and int(variables["MASTER_PORT"]) > 1_024


def test_the_users_choice_of_an_interface_stays(start: Launchers) -> None:
    job = start("endless", environ={"GLOO_SOCKET_IFNAME": "eth7"})
    job.await_file("step-0", "step-1")
    variables = variables_of(job.pid_of(0))
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "SHOAL_INTERFACE")
    assert [variables[name] for name in names] == ["eth7", "lo", "lo"]


# ---- the secret on its way to the workers ----------------------------------------------------------------


@pytest.mark.parametrize("given", ["none", "variable", "file"])
def test_workers_get_the_secret_in_a_file(start: Launchers, given: str) -> None:
    environ = {
        "none": {},
        "variable": {"SHOAL_SECRET": SECRET},
        "file": {"SHOAL_SECRET_FILE": str(start.secret_file())},
    }[given]
    job = start("endless", environ=environ)
    job.await_file("step-0", "step-1")
    found = [variables_of(job.pid_of(rank)) for rank in (0, 1)]
    (name,) = {variables["SHOAL_SECRET_FILE"] for variables in found}
    assert not any("SHOAL_SECRET" in variables for variables in found)
    path = Path(name)
    assert (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)) == (0o600, 0o700)
    secret = path.read_text()
    assert secret == SECRET if given != "none" else len(bytes.fromhex(secret)) == 32
    for pid in (job.pid, job.pid_of(0), job.pid_of(1)):
        assert secret.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    job.signal(signal.SIGTERM)
    assert job.wait() == EXIT_STOPPED
    assert not path.exists()
    assert secret not in job.text


def test_a_secret_that_others_can_read_starts_nothing(start: Launchers) -> None:
    path = start.secret_file()
    path.chmod(0o644)
    job = start(environ={"SHOAL_SECRET_FILE": str(path)})
    assert job.wait() == 2
    assert f"SHOAL_SECRET_FILE={path} has the mode 0644" in job.text
    assert not list(job.folder.glob("pid-*"))


def test_several_hosts_without_a_secret_are_told_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        launch(["true"], num_workers=1, log_dir=tmp_path, nnodes=2, rdzv="127.0.0.1:29400")
    assert "(umask 077; head -c 32 /dev/urandom | base64 > job.secret)" in str(caught.value)
    assert "export SHOAL_SECRET_FILE=job.secret" in str(caught.value)


# ---- several hosts: a stranger at the port of the store --------------------------------------------------


class Payload:
    """Makes the folder ``taken`` when it is unpickled."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (f"{self.folder}/taken",)


def intrude(port: int, folder: Path, num_keys: int) -> None:
    """Read all that lies in the store, and write a pickle in its place; go on for a second."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)
    pickled = base64.b64encode(pickle.dumps(Payload(str(folder))))  # as torch's c10d rendezvous had it
    seen: dict[str, str] = {}
    while len(keys := store.list_keys()) < num_keys:
        time.sleep(0.02)
    end = time.monotonic() + 1
    with contextlib.suppress(RuntimeError):  # the launcher has noticed, and is gone
        while time.monotonic() < end:
            seen.update({key: store.get(key).hex() for key in keys if key not in seen})
            for key in keys:
                store.set(key, pickled)
            keys = store.list_keys()
    (folder / "seen.json").write_text(json.dumps(seen))


def run_stranger(port: int, folder: Path, num_keys: int) -> dict[str, bytes]:
    """Return what a process that has no secret, only the number of a port, has read."""
    assert wait_for([fork_process(intrude, port, folder, num_keys)]) == [0]
    seen = json.loads((folder / "seen.json").read_text())
    return {key: bytes.fromhex(value) for key, value in seen.items()}


def assert_nothing_was_won(job: Launched, seen: dict[str, bytes]) -> None:
    assert seen
    assert not (job.folder / "taken").exists()
    assert not any(SECRET.encode() in value for value in seen.values())
    assert SECRET not in job.text


def test_a_stranger_at_the_rendezvous_runs_no_code_and_changes_nothing(
    start: Launchers, tmp_path: Path
) -> None:
    port = free_port()
    settings = {"num_workers": 1, "nnodes": 2, "rdzv": f"127.0.0.1:{port}"}
    first = start(name="first", **settings)
    first.await_listening(port)
    pickled = pickle.dumps(Payload(str(tmp_path)))
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.settimeout(20)
        fields = (b"set", b"shoal/launch/host/1", pickled)  # without a proof
        text = b"".join(struct.pack("!I", len(field)) + field for field in fields)
        stranger.sendall(struct.pack("!I", len(text)) + text)
        seen = stranger.recv(200)
        assert seen == b"" or b"refused" in seen
    second = start(name="second", **settings)
    assert [first.wait(), second.wait()] == [0, 0]
    assert_nothing_was_won(first, {"greeting": seen})


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.slow), "shoal"])
def test_a_stranger_at_a_running_job_runs_no_code(start: Launchers, tmp_path: Path, backend: str) -> None:
    """The store of torch, in which the workers meet, is open to whom reaches its port."""
    settings = {"num_workers": 1, "nnodes": 2, "rdzv": f"127.0.0.1:{free_port()}", "backend": backend}
    hosts = [start("endless", name=f"host-{index}", **settings) for index in range(2)]
    hosts[0].await_file("step-0", "step-1")
    seen = run_stranger(int(hosts[0].variables_of(0)["MASTER_PORT"]), tmp_path, 2)
    hosts[0].signal(signal.SIGTERM)
    assert [host.wait() for host in hosts] == [EXIT_STOPPED] * 2
    for host in hosts:
        assert_nothing_was_won(host, seen)
    assert not any("launch" in key for key in seen)


def test_a_stranger_who_took_the_port_first_leads_nobody(start: Launchers, tmp_path: Path) -> None:
    with contextlib.closing(
        TcpStoreServer(listening_socket("127.0.0.1", 0), b"a secret of the stranger's own")
    ) as server:
        server._set("shoal/launch/leader", pickle.dumps(Payload(str(tmp_path))))
        job = start(num_workers=1, nnodes=2, rdzv=f"127.0.0.1:{server.port}")
        assert job.wait() == 1
        assert "has another SHOAL_SECRET than this rank" in job.text
        assert_nothing_was_won(job, server._values)


def test_several_hosts_listen_on_the_address_that_is_given(start: Launchers) -> None:
    port = free_port()
    job = start(nnodes=2, rdzv=f"localhost:{port}", rendezvous_deadline_s=START_DEADLINE_S)
    job.await_listening(port)
    assert listening(job.pid) == {"127.0.0.1"}
