"""The launcher with real workers: places, exit codes, signals, and failures shown once and in time."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_job import work
from launched import END_DEADLINE_S, JOB, START_DEADLINE_S, Launched, Launchers, is_alive, run_launcher

from forked import fork_process, free_port, torchrun, wait_for
from instance_metadata import serving
from shoal.errors import EXIT_STOPPED, UsageError
from shoal.launch.local import launch
from shoal.launch.spot_notice import ENDPOINT
from shoal.launch.worker import run_worker


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Launchers]:
    with Launchers(tmp_path) as launchers:
        yield launchers


# ---- places and output -----------------------------------------------------------------------------------


def test_workers_learn_their_place_and_only_the_first_writes_to_the_terminal(
    start: Launchers, tmp_path: Path
) -> None:
    job = start()
    assert job.wait() == 0
    num_threads = (tmp_path / "env-0").read_text().split()[-1]
    assert (tmp_path / "env-0").read_text() == f"0 2 0 2 {num_threads}"
    assert (tmp_path / "env-1").read_text() == f"1 2 1 2 {num_threads}"
    assert job.text == "worker 0 says hello; terminal: False\n"
    assert "worker 1 says hello" in (tmp_path / "job-logs" / "worker-00001.out").read_text()


@pytest.mark.parametrize(
    ("num_workers", "chosen"), [(1, None), (2, None), (1, "7")], ids=["one", "two", "chosen"]
)
def test_threads_are_shared_out_unless_the_user_has_chosen(
    start: Launchers, tmp_path: Path, num_workers: int, chosen: str | None
) -> None:
    job = start(num_workers=num_workers, environ={"OMP_NUM_THREADS": chosen} if chosen else {})
    assert job.wait() == 0
    shared_out = str(max(1, len(os.sched_getaffinity(0)) // num_workers))
    assert (tmp_path / "env-0").read_text().split()[-1] == (chosen or shared_out)


def test_the_first_worker_sees_the_terminal(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    options = {"num_workers": 2, "log_dir": tmp_path / "logs"}
    process = fork_process(run_launcher, tmp_path, "", "", {}, Path(os.ttyname(slave)), options)
    process.join(START_DEADLINE_S)
    assert process.exitcode == 0
    assert b"worker 0 says hello; terminal: True" in os.read(master, 4096)
    os.close(master)
    os.close(slave)


# ---- failures --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("culprit", "backend"), [(0, ""), (1, "gloo"), (1, "shoal")])
def test_a_crash_is_one_line_and_its_traceback_is_in_the_runs_log(
    start: Launchers, tmp_path: Path, culprit: int, backend: str
) -> None:
    job = start(f"{culprit}:crash,endless", backend=backend)
    job.await_file("step-0", "step-1")
    assert job.wait(END_DEADLINE_S) == 1
    kept = tmp_path / "logs" / f"worker-{culprit:05}.traceback"
    what = f"worker {culprit}: ValueError: the flux capacitor is empty"
    line = f"{what}, which shoal did not expect; its traceback is in {kept}. "
    assert [text.startswith(line) for text in job.text.splitlines() if "says hello" not in text] == [True]
    assert "crash_deep_inside" in kept.read_text()
    job.assert_no_worker_is_left()


def test_a_crash_ends_workers_that_hang(start: Launchers) -> None:
    job = start("1:crash,0:hang")
    job.await_file("step-0", "step-1")
    assert job.wait(END_DEADLINE_S) == 1
    assert "worker 1: ValueError: the flux capacitor is empty" in job.text
    job.assert_no_worker_is_left(0)


@pytest.mark.parametrize(
    ("order", "code", "text"),
    [
        ("all:usage", 2, "micro batch 3 does not divide 8; use 2 or 4\n"),
        ("1:shoal,endless", 1, "the disk of the shards is gone; mount it again\n"),
    ],
)
def test_an_error_for_people_is_shown_once_and_without_traceback(
    start: Launchers, order: str, code: int, text: str
) -> None:
    job = start(order)
    assert job.wait() == code
    assert job.text.replace("worker 0 says hello; terminal: False\n", "") == text


@pytest.mark.parametrize("backend", ["gloo", "shoal"])
def test_what_the_others_say_of_a_killed_worker_is_not_the_cause(start: Launchers, backend: str) -> None:
    """Worker 0 ends with an error of its own, the loss of worker 1."""
    job = start("1:kill,endless", backend=backend)
    job.await_file("step-0", "step-1")
    assert job.wait(END_DEADLINE_S) == 1
    assert "worker 1 was ended by SIGKILL" in job.text
    job.assert_no_worker_is_left()


@pytest.mark.parametrize(
    ("order", "code", "texts"),
    [
        ("1:kill", 1, ["worker 1 was ended by SIGKILL", "memory was full", "micro-batch-size"]),
        ("1:segfault", 1, ["worker 1 was ended by SIGSEGV", "native code crashed", "in follow"]),
        ("1:exit3", 3, ["worker 1 ended with exit code 3", "worker-00001.err", "exit 3 was ordered"]),
    ],
)
def test_a_worker_that_ends_without_a_word_is_named(
    start: Launchers, order: str, code: int, texts: list[str]
) -> None:
    job = start(f"{order},endless")
    job.await_file("step-0", "step-1")
    assert job.wait(END_DEADLINE_S) == code
    assert all(text in job.text for text in texts), job.text
    job.assert_no_worker_is_left(0)


def test_a_worker_killed_from_outside_beside_gloo_is_the_culprit(start: Launchers) -> None:
    job = start("endless", backend="gloo")
    job.await_file("step-0", "step-1")
    os.kill(job.pid_of(0), signal.SIGKILL)
    assert job.wait(END_DEADLINE_S) == 1
    assert "worker 0 was ended by SIGKILL" in job.text
    assert "Traceback" not in job.text


# ---- signals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "seen"),
    [
        (signal.SIGTERM, "SIGTERM"),
        (signal.SIGUSR1, "SIGUSR1"),
        (signal.SIGUSR2, "SIGUSR2"),
        (signal.SIGINT, "SIGTERM"),
        (signal.SIGHUP, "SIGTERM"),
    ],
)
def test_a_signal_to_the_launcher_lets_all_save(
    start: Launchers, tmp_path: Path, number: signal.Signals, seen: str
) -> None:
    job = start("endless")
    job.await_file("step-0", "step-1")
    job.signal(number)
    assert job.wait() == EXIT_STOPPED
    saved = [(tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)]
    assert seen in saved
    assert set(saved) <= {seen, "None"}  # one may have seen the other's wish before its own signal
    assert job.text == "worker 0 says hello; terminal: False\n"
    job.assert_no_worker_is_left(0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_to_one_worker_lets_all_save(
    start: Launchers, tmp_path: Path, number: signal.Signals
) -> None:
    job = start("endless")
    job.await_file("step-0", "step-1")
    os.kill(job.pid_of(1), number)
    assert job.wait() == EXIT_STOPPED
    assert (tmp_path / "saved-0").read_text() == "None"
    assert (tmp_path / "saved-1").read_text() == number.name
    assert job.text == "worker 0 says hello; terminal: False\n"


def test_ec2s_notice_lets_all_save(start: Launchers, tmp_path: Path) -> None:
    with serving() as service:
        job = start("endless", environ={ENDPOINT: service.url})
        job.await_file("step-0", "step-1")
        service.notice = b'{"action": "stop", "time": "2026-11-28T08:22:00Z"}'
        assert job.wait() == EXIT_STOPPED
    saved = [(tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)]
    assert "SIGTERM" in saved
    assert set(saved) <= {"SIGTERM", "None"}  # one may have seen the other's wish before its own signal
    assert "shoal: EC2 takes this instance back (stop at 2026-11-28T08:22:00Z)" in job.text


def test_repeated_signals_change_nothing(start: Launchers) -> None:
    job = start("0:slow-leave,endless")
    job.await_file("step-0", "step-1")
    for _ in range(20):
        job.signal(signal.SIGTERM)
        job.signal(signal.SIGUSR1)
        time.sleep(0.005)
    job.await_file("saved-0", "saved-1")
    end = time.monotonic() + START_DEADLINE_S
    while alive := [rank for rank in (0, 1) if is_alive(job.pid_of(rank))]:  # to the interpreters' very end
        assert time.monotonic() < end
        for rank in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(job.pid_of(rank), signal.SIGTERM)
        time.sleep(0.002)
    assert job.wait() == EXIT_STOPPED
    assert job.text == "worker 0 says hello; terminal: False\n"


def test_a_signal_before_the_first_step_stops_too(start: Launchers) -> None:
    job = start("all:die-early")
    job.await_file("pid-0", "pid-1")
    job.signal(signal.SIGTERM)
    assert job.wait(END_DEADLINE_S) == EXIT_STOPPED
    assert job.text == ""


def test_the_second_interrupt_ends_at_once(start: Launchers) -> None:
    job = start("all:hang")
    job.await_file("step-0", "step-1")
    job.signal(signal.SIGINT)
    time.sleep(0.3)
    assert job.process.exitcode is None
    job.signal(signal.SIGINT)
    assert job.wait(END_DEADLINE_S) == 130
    job.assert_no_worker_is_left()


def test_workers_whose_launcher_is_killed_save_and_leave(start: Launchers) -> None:
    job = start("endless")
    job.await_file("step-0", "step-1")
    job.process.kill()
    end = time.monotonic() + END_DEADLINE_S
    while not all((job.folder / f"saved-{rank}").exists() for rank in (0, 1)):
        assert time.monotonic() < end
        time.sleep(0.05)
    job.assert_no_worker_is_left()


# ---- several hosts, other launchers ----------------------------------------------------------------------


def start_two_hosts(start: Launchers, orders: str, backend: str = "") -> list[Launched]:
    settings = {"num_workers": 1, "nnodes": 2, "rdzv": f"127.0.0.1:{free_port()}"}
    return [start(orders, backend=backend, name=f"host-{index}", **settings) for index in range(2)]


def test_two_launchers_by_hand_make_one_job(start: Launchers, tmp_path: Path) -> None:
    hosts = start_two_hosts(start, "endless")
    hosts[0].await_file("step-0", "step-1")
    assert [(tmp_path / f"env-{rank}").read_text().split()[:4] for rank in (0, 1)] == [
        ["0", "2", "0", "1"],
        ["1", "2", "0", "1"],
    ]
    hosts[1].signal(signal.SIGTERM)
    assert [host.wait() for host in hosts] == [EXIT_STOPPED] * 2
    assert sorted((tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)) == ["None", "SIGTERM"]


def test_a_crash_on_another_host_ends_both(start: Launchers) -> None:
    hosts = start_two_hosts(start, "1:crash,endless", "gloo")
    assert [host.wait() for host in hosts] == [1, 1]
    texts = sorted((host.text for host in hosts), key=lambda text: "on host" not in text)
    assert f"on host {os.uname().nodename}: worker 1: ValueError: the flux" in texts[0]
    assert "\nworker 1: ValueError: the flux" in f"\n{texts[1]}"


def test_a_host_that_does_not_come_is_an_error_in_time(start: Launchers) -> None:
    port = free_port()
    job = start(nnodes=2, rdzv=f"127.0.0.1:{port}", rendezvous_deadline_s=2)
    assert job.wait(60) == 1
    assert f"the launchers of 2 hosts did not come together at 127.0.0.1:{port}" in job.text
    assert "Traceback" not in job.text


def test_a_request_to_stop_ends_the_wait_for_other_hosts(start: Launchers, tmp_path: Path) -> None:
    port = free_port()
    job = start(nnodes=2, rdzv=f"127.0.0.1:{port}")
    job.await_listening(port)
    job.signal(signal.SIGTERM)
    assert job.wait(END_DEADLINE_S) == EXIT_STOPPED
    assert not list(tmp_path.glob("pid-*"))


def test_a_request_to_stop_ends_the_wait_for_a_store_that_does_not_answer(
    start: Launchers, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as server:
        server.settimeout(START_DEADLINE_S)
        port = server.getsockname()[1]
        job = start(nnodes=2, rdzv=f"127.0.0.1:{port}")
        connection, _ = server.accept()
        with connection:
            job.signal(signal.SIGTERM)
            assert job.wait(END_DEADLINE_S) == EXIT_STOPPED
    assert not list(tmp_path.glob("pid-*"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_workers": 0}, "--workers 0"),
        ({"num_workers": 1, "nnodes": 2}, "--nnodes 2 needs --rdzv HOST:PORT"),
        ({"num_workers": 1, "nnodes": 2, "rdzv": "node1:1"}, "--nnodes 2 needs the job's secret"),
        ({"num_workers": 1, "nnodes": 2, "rdzv": "node1"}, "'node1' must be HOST:PORT"),
        ({"num_workers": 1, "nnodes": 2, "rdzv": "node1:99999"}, "'node1:99999' must be HOST:PORT"),
    ],
)
def test_settings_that_cannot_be_are_usage_errors(
    tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        launch(["true"], log_dir=tmp_path, **settings)  # type: ignore[arg-type]


def test_the_same_workers_join_under_torchrun(tmp_path: Path) -> None:
    command = (str(JOB), "--dir", str(tmp_path), "--orders", "1:crash")
    code, said = torchrun(*command, output=tmp_path / "said")
    assert code == 1
    assert (tmp_path / "env-1").read_text().startswith("1 2 1 2 ")
    assert "worker 1: ValueError: the flux capacitor is empty, which shoal did not expect" in said
    assert "crash_deep_inside" in (tmp_path / "logs" / "worker-00001.traceback").read_text()


def work_as(environ: dict[str, str], folder: Path) -> None:
    """Do the job's work where a launcher has set these variables."""
    os.environ.update(environ)
    run_worker(lambda: work(folder, "", "gloo"))


def test_the_same_workers_join_under_mpirun(tmp_path: Path) -> None:
    port = free_port()
    places = [
        {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "MASTER_PORT": str(port),
        }
        for rank in range(2)
    ]
    assert wait_for([fork_process(work_as, place, tmp_path) for place in places]) == [0, 0]
    assert [(tmp_path / f"step-{rank}").read_text() for rank in range(2)] == ["3", "3"]
