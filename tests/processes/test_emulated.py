"""Emulated hosts for real: they reach each other, links have their rates, and nothing is left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pretrain_jobs as jobs
import pytest
from benchmarks.comm_links import cap_flows

from forked import command, fork_process, shoal, wait_for
from forked_programs import FORKING
from shoal.errors import EXIT_OK, EXIT_STOPPED, ShoalError
from shoal.launch import emulated
from shoal.launch.emulated import Cluster
from shoal.launch.emulated_network import Namespace, identity, processes_in

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("tc"), reason="emulated hosts need root and iproute2"
)

SHOAL = (sys.executable, "-m", "shoal")
DEADLINE_S = 60.0
END_DEADLINE_S = 3 * 5.0
"""A killed launcher's hosts are gone after a grace of 2 s and what the kernel needs; three times that."""

# Takes one connection after another and tells how many bytes each brought, and in what time.
SINK = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 5000))
print("ready", flush=True)
while True:
    connection, _ = server.accept()
    received, start = 0, time.monotonic()
    while data := connection.recv(1 << 16):
        received += len(data)
    print(received, time.monotonic() - start, flush=True)
"""
SOURCE = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000), timeout=float(sys.argv[3])) as connection:
    connection.settimeout(60)
    connection.sendall(bytes(int(sys.argv[2])))
"""
# Listens as a helper's server does, and ends on SIGTERM.
SERVER = """
import argparse, signal, socket, sys
parser = argparse.ArgumentParser()
parser.add_argument("--address")
parser.add_argument("--port", type=int)
options = parser.parse_args()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
with socket.create_server((options.address, options.port)) as server:
    print(f"shoal serve: listening on {options.address}:{options.port}", flush=True)
    while True:
        server.accept()[0].close()
"""


def python(program: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", program, *map(str, arguments)]


def await_true(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "did not come true in time"
        time.sleep(0.02)


def links_of_this_machine() -> str:
    return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout


def held(namespaces: set[Namespace]) -> list[str]:
    """Return the processes that are in one of these namespaces or hold it open."""
    found = [f"process {pid}" for pid in processes_in(namespaces)]
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            for path in (process / "fd").iterdir():
                with suppress(OSError):
                    if identity(str(path)) in namespaces:
                        found.append(str(path))
    return found


def command_lines() -> bytes:
    """Return the command lines of all processes."""
    found = b""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found += (process / "cmdline").read_bytes()
    return found


def sink(cluster: Cluster, host: int) -> subprocess.Popen[str]:
    process = cluster.start(host, python(SINK, cluster.address(host)), stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def send(cluster: Cluster, host: int, to: int, num_bytes: int, connect_s: float = 10) -> int:
    return cluster.start(
        host, python(SOURCE, cluster.address(to), num_bytes, connect_s), stderr=subprocess.DEVNULL
    ).wait(DEADLINE_S)


def transfer_s(cluster: Cluster, sink: subprocess.Popen[str], host: int, to: int, num_bytes: int) -> float:
    assert send(cluster, host, to, num_bytes) == 0
    assert sink.stdout is not None
    received, seconds = sink.stdout.readline().split()
    assert int(received) == num_bytes
    return float(seconds)


def test_hosts_have_names_and_addresses_and_the_machine_stays_as_it_was() -> None:
    before = links_of_this_machine()
    with Cluster(hosts=3) as cluster:
        program = "import socket; print(socket.gethostname()); print([n for _, n in socket.if_nameindex()])"
        results = cluster.run(python(program))
        assert links_of_this_machine() == before
        assert [result.stdout for result in results] == [
            f"{cluster.name(host)}\n['lo', 'eth0']\n" for host in range(3)
        ]
        listening = sink(cluster, 2)
        for host in range(3):  # to itself too
            transfer_s(cluster, listening, host, 2, 100_000)
        namespaces = set(cluster.namespaces)
        assert held(namespaces)
    assert listening.stdout is not None
    listening.stdout.close()
    assert links_of_this_machine() == before
    assert held(namespaces) == []


def test_links_have_their_rate_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated, "HELPER_COMMAND", ("true",))
    num_bytes = 2_000_000
    expected_s = num_bytes * 8 / 20e6
    with Cluster(hosts=1, helpers=2, nic="20mbit", helper_nic="1gbit") as cluster:
        at_host, at_helper = sink(cluster, 0), sink(cluster, 1)
        out_s = transfer_s(cluster, at_helper, 0, 1, num_bytes)
        in_s = transfer_s(cluster, at_host, 1, 0, num_bytes)
        fast_s = transfer_s(cluster, at_helper, 2, 1, num_bytes)
        for process in (at_host, at_helper):
            assert process.stdout is not None
            process.stdout.close()
    for seconds in (out_s, in_s):  # a burst of 256 KiB passes at once
        assert 0.8 * expected_s < seconds < 3 * expected_s
    assert fast_s < 0.8 * expected_s


def test_a_cable_is_pulled_and_plugged_in_again() -> None:
    with Cluster(hosts=2) as cluster:
        listening = sink(cluster, 1)
        transfer_s(cluster, listening, 0, 1, 1000)
        cluster.link(1, up=False)
        assert send(cluster, 0, 1, 1000, connect_s=0.5) != 0
        cluster.link(1, up=True)
        transfer_s(cluster, listening, 0, 1, 1000)
        assert listening.stdout is not None
        listening.stdout.close()


def test_workers_and_helpers_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_SECRET", "of another job, not for these workers")
    monkeypatch.setattr(emulated, "HELPER_COMMAND", python(SERVER))
    program = "import json, os, socket; print(json.dumps(dict(os.environ)))"
    with Cluster(hosts=2, helpers=2, nic="1gbit", helper_nic="2gbit") as cluster:
        results = cluster.run(python(program), workers_per_host=2, env={"MINE": "7"})
        found = [json.loads(result.stdout) for result in results]
        file = Path(found[0]["SHOAL_SECRET_FILE"])
        secret = file.read_text()
        assert (stat.S_IMODE(file.stat().st_mode), stat.S_IMODE(file.parent.stat().st_mode)) == (0o600, 0o700)
        lines = command_lines()
        assert b"emulated_network" in lines and secret.encode() not in lines
        connect = "import socket, sys; socket.create_connection((sys.argv[1], 7070), 10).close()"
        results = cluster.run(python(connect, cluster.address(3)))
        assert [result.exit_code for result in results] == [0, 0]
        helpers = cluster.helpers
    assert [helper.returncode for helper in helpers] == [0, 0]
    assert len(secret) >= 32 and {env["SHOAL_SECRET_FILE"] for env in found} == {str(file)}
    assert not any("SHOAL_SECRET" in env for env in found) and not file.exists()
    for rank, env in enumerate(found):
        assert env["SHOAL_HELPERS"] == "10.77.1.1:7070*2,10.77.1.2:7070*2"
        assert (env["RANK"], env["WORLD_SIZE"]) == (str(rank), "4")
        assert (env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == (str(rank % 2), "2")
        assert env["GROUP_RANK"] == env["NODE_RANK"] == str(rank // 2)
        assert (env["MASTER_ADDR"], env["GLOO_SOCKET_IFNAME"]) == ("10.77.0.1", "eth0")
        assert (env["OMP_NUM_THREADS"], env["MINE"]) == ("1", "7")


def test_launchers_of_real_hosts_meet_at_the_one_that_is_named(tmp_path: Path) -> None:
    """As ``shoal train --nnodes 3 --rdzv HOST:PORT`` on each: that host leads, the others follow by name."""
    worker = (
        "import os, socket, sys; from pathlib import Path; "
        "Path(sys.argv[1], os.environ['RANK']).write_text(socket.gethostname())"
    )
    launcher = (
        "import os, sys; from pathlib import Path; from shoal.launch.local import launch; "
        "log_dir = Path(sys.argv[1], 'logs-' + os.environ['RANK']); "
        "command = [sys.executable, '-c', sys.argv[3], sys.argv[1]]; "
        "sys.exit(launch(command, num_workers=1, nnodes=3, rdzv=sys.argv[2], log_dir=log_dir))"
    )
    with Cluster(hosts=3) as cluster:
        place = f"{cluster.address(1)}:29400"
        results = cluster.run(python(launcher, tmp_path, place, worker))
        assert [result.exit_code for result in results] == [0] * 3, results
        names = [cluster.name(host) for host in (1, 0, 2)]
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == names


COUNTS_CONNECTIONS = """
import torch, torch.distributed as dist
from shoal.comm.native_group import counters

dist.init_process_group("shoal")
for group in (dist.group.WORLD, dist.new_group(backend="shoal")):
    total = torch.full((1000,), dist.get_rank() + 1.0)
    dist.all_reduce(total, group=group)
    assert (total == 3).all(), total
    print(counters(group)["connections"])
    dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("num_connections", [1, 4])
def test_a_group_measures_how_many_connections_are_worth_it(
    num_connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulated, "subprocess", FORKING)
    capped = num_connections > 1
    with Cluster(hosts=2, helpers=1, nic=None if capped else "100mbit") as cluster:
        if capped:
            cap_flows(cluster)
        helper = cluster.environment()["SHOAL_HELPERS"].partition("*")[0]
        results = cluster.run(python(COUNTS_CONNECTIONS), env={"SHOAL_HELPERS": helper})
    to_both = 2 * (1 + num_connections)  # to the other host and the helper: for control and for data
    assert [result.stdout.split() for result in results] == 2 * [2 * [str(to_both)]], results


def test_a_helper_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("sh", "-c", "echo the port is taken; exit 3")
    monkeypatch.setattr(emulated, "HELPER_COMMAND", command)
    with Cluster(hosts=1, helpers=1) as cluster:
        with pytest.raises(ShoalError, match=r"helper host 0 ended with exit code 3.*\n.*the port is taken"):
            cluster.run(["true"])


def test_results_tell_failures_and_late_workers_are_killed() -> None:
    job = "echo $RANK; [ $RANK = 2 ] && sleep 60; exit $RANK"
    with Cluster(hosts=3) as cluster:
        results = cluster.run(["sh", "-c", job], timeout_s=2)
    assert [result.exit_code for result in results] == [0, 1, -signal.SIGKILL]
    assert [result.stdout for result in results[:2]] == ["0\n", "1\n"]


def test_two_clusters_at_once() -> None:
    with Cluster(hosts=2) as one, Cluster(hosts=2) as other:
        assert not one.namespaces & other.namespaces
        assert {one.name(0), one.name(1)}.isdisjoint({other.name(0), other.name(1)})
        listening = sink(one, 1)  # the same address exists in the other cluster, where nobody listens
        assert send(other, 0, 1, 1000, connect_s=2) != 0
        transfer_s(one, listening, 0, 1, 1000)
        assert listening.stdout is not None
        listening.stdout.close()


def test_hosts_go_although_their_keeper_was_killed() -> None:
    with Cluster(hosts=1) as cluster:
        daemon = cluster.start(0, ["setsid", "--fork", "sleep", "300"])
        assert daemon.wait(DEADLINE_S) == 0
        namespaces = set(cluster.namespaces)
        await_true(lambda: processes_in(namespaces))
        (keeper,) = {int(path.split("/")[2]) for path in held(namespaces) if path.startswith("/proc")}
        os.kill(keeper, signal.SIGKILL)
        await_true(lambda: len(held(namespaces)) == 1)
        with pytest.raises(ShoalError, match="hosts are gone"):
            cluster.start(0, ["true"])
    assert held(namespaces) == []


# ---- the commands ----------------------------------------------------------------------------------------


def test_gloo_sums_over_three_hosts(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.arange(100_000) * (dist.get_rank() + 1)\n"
        "dist.all_reduce(x)\n"
        "assert torch.equal(x, torch.arange(100_000) * 6)\n"
        "print('sum', int(x.sum()), flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    result = shoal("emulate", "--hosts", "3", "--nic", "200mbit", "--", sys.executable, str(script))
    assert result.returncode == EXIT_OK, result.stderr
    assert result.stdout == f"sum {sum(range(100_000)) * 6}\n"  # once: rank 0's


def test_exit_code_and_output_of_the_first_failure(tmp_path: Path) -> None:
    # rank 2 fails first, the others notice and fail after it
    job = "echo out $RANK; echo err $RANK >&2; [ $RANK = 2 ] || sleep 2; exit $((RANK + 5))"
    result = shoal("emulate", "--hosts", "3", "--log-dir", str(tmp_path / "logs"), "--", "bash", "-c", job)
    assert result.returncode == 7
    assert result.stdout == "out 0\n"
    assert "worker 2 ended with exit code 7" in result.stderr
    assert f"{tmp_path / 'logs' / 'worker-00002.log'}" in result.stderr
    assert "out 2" in result.stderr and "worker 1" not in result.stderr
    assert (tmp_path / "logs" / "worker-00001.log").read_text() == "out 1\nerr 1\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--hosts", "2", "--nic", "fast", "--", "true"), "--nic 'fast' must be a number above 0"),
        (("--hosts", "2"), "no command to run"),
        (("--hosts", "2", "--", "no-such-command"), "'no-such-command' is not found"),
    ],
)
def test_what_a_user_gets_wrong(arguments: tuple[str, ...], message: str) -> None:
    result = shoal("emulate", *arguments)
    assert result.returncode == 2
    assert message in result.stderr and "Traceback" not in result.stderr


def test_dry_run_shows_the_hosts() -> None:
    hosts = ("--hosts", "2", "--helpers", "1", "--nic", "200mbit")
    result = shoal("emulate", *hosts, "--dry-run", "--", "false")
    assert result.returncode == EXIT_OK
    assert [line.split()[:3] for line in result.stdout.splitlines()] == [
        ["host0", "10.77.0.1", "200mbit"],
        ["host1", "10.77.0.2", "200mbit"],
        ["helper0", "10.77.1.1", "200mbit"],
    ]


class Running:
    """``shoal emulate`` with workers that note their namespaces, leave a daemon behind, and wait."""

    def __init__(self, folder: Path, *, stubborn: bool) -> None:
        trap = "trap '' TERM; " if stubborn else ""
        job = f"{trap}setsid --fork sleep 300; stat -L -c '%d %i' /proc/self/ns/net > $0/$RANK.tmp; "
        job += "mv $0/$RANK.tmp $0/$RANK; while true; do sleep 0.1; done"
        where = ("--hosts", "3", "--nic", "1gbit", "--log-dir", str(folder / "logs"))
        command = [*SHOAL, "emulate", *where, "--", "bash", "-c", job, str(folder)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE)
        await_true(lambda: len(self._notes(folder)) == 3)
        self.namespaces = {
            (int(device), int(inode))
            for device, inode in (path.read_text().split() for path in self._notes(folder))
        }
        assert len(self.namespaces) == 3

    @staticmethod
    def _notes(folder: Path) -> list[Path]:
        return [path for path in folder.iterdir() if path.name.isdecimal()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all(tmp_path: Path, number: signal.Signals) -> None:
    running = Running(tmp_path, stubborn=False)
    running.process.send_signal(number)
    _, err = running.process.communicate(timeout=END_DEADLINE_S)
    assert running.process.returncode == 128 + number, err
    assert err == b""
    assert held(running.namespaces) == []


def test_nothing_is_left_when_the_launcher_is_killed(tmp_path: Path) -> None:
    before = links_of_this_machine()
    running = Running(tmp_path, stubborn=True)
    assert processes_in(running.namespaces)
    running.process.kill()
    await_true(lambda: not held(running.namespaces), END_DEADLINE_S)
    running.process.communicate()
    assert links_of_this_machine() == before


def test_training_on_emulated_hosts_stops_and_saves(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    data, run_dir = jobs.prepare_small(tmp_path / "text"), tmp_path / "run"
    options = [
        *("--preset", "tiny", "--data.path", str(data), "--run.dir", str(run_dir)),
        *("--model.hidden-size", "32", "--model.intermediate-size", "64", "--model.vocab-size", "96"),
        *("--data.max-seq-length", "32", "--data.max-predictions-per-seq", "5"),
        *("--train.total-steps", "4000", "--optim.warmup-steps", "1", "--train.global-batch-size", "8"),
        *("--run.log-frequency", "1", "--run.validation-frequency", "4000"),
        *("--on", "emulated", "--hosts", "2", "--nic", "200mbit"),
    ]
    files = [tmp_path / "out", tmp_path / "err"]
    process = fork_process(command, ("train", "albert", *options), files, None)
    record = run_dir / "record.jsonl"
    await_true(lambda: record.is_file() and max(jobs.losses(run_dir), default=0) >= 3, 2 * DEADLINE_S)
    process.terminate()
    codes = wait_for([process], DEADLINE_S)
    err = files[1].read_text()
    assert codes == [EXIT_STOPPED], err
    assert "stopped at step" in err and "Traceback" not in err
    assert list((run_dir / "checkpoints").iterdir())
    assert (run_dir / "logs" / "worker-00001.err").is_file()


@pytest.mark.slow
def test_a_pipeline_crosses_emulated_hosts(tmp_path: Path) -> None:
    """Two stages, two replicas and a helper on five hosts: the losses are those of one worker."""
    (tmp_path / "text").mkdir()
    data = jobs.prepare_small(tmp_path / "text")

    def words(run_dir: Path, *where: str) -> list[str]:
        return [
            *(*SHOAL, "train", "t5", "--preset", "tiny", "--data.path", str(data), "--run.dir", str(run_dir)),
            *("--model.vocab-size", "192", "--model.d-model", "32", "--model.d-ff", "64"),
            *("--data.input-length", "24", "--train.total-steps", "4", "--train.global-batch-size", "8"),
            *("--parallel.micro-batches", "2", "--run.log-frequency", "1", *where),
        ]

    alone, spread = tmp_path / "alone", tmp_path / "spread"
    subprocess.run(words(alone, "--workers", "1"), check=True, timeout=DEADLINE_S)
    where = ("--on", "emulated", "--hosts", "4", "--helpers", "1", "--nic", "200mbit")
    subprocess.run(
        words(spread, *where, "--parallel.pipeline", "2", "--distributed.backend", "shoal"),
        check=True,
        timeout=2 * DEADLINE_S,
    )
    assert jobs.losses(spread).keys() == {1, 2, 3, 4}
    assert jobs.losses(spread) == pytest.approx(jobs.losses(alone), rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--on", "emulated"), "--on emulated needs --hosts N"),
        (("--nic", "1gbit"), "--nic set up emulated hosts: add --on emulated"),
        (("--workers", "0"), "--workers 0 must be at least 1"),
        (("--on", "emulated", "--hosts", "2", "--nnodes", "2"), "--nnodes and --rdzv name real hosts"),
    ],
)
def test_options_of_train_that_do_not_go_together(options: tuple[str, ...], message: str) -> None:
    result = shoal("train", "albert", "--preset", "tiny", *options)
    assert result.returncode == 2
    assert message in result.stderr
