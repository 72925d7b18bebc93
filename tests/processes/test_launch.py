"""The launcher with real workers: places, exit codes, signals, and failures shown once and in time."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from forked import fork_process, free_port
from shoal.errors import EXIT_STOPPED, ShoalError, UsageError
from shoal.launch.local import launch

JOB = Path(__file__).with_name("launch_job.py")
START_DEADLINE_S = 180.0
GRACE_S = 1.0
END_DEADLINE_S = 3 * (GRACE_S + 4)
"""A failure ends the job in the grace that the others get; three times that for a busy machine."""


class Launched:
    """A launcher in a process of its own, and what its workers leave in ``folder``."""

    def __init__(self, process: BaseProcess, folder: Path, output: Path) -> None:
        self.process = process
        self.folder = folder
        self.output = output

    def wait(self, deadline_s: float = START_DEADLINE_S) -> int:
        """Return the launcher's exit code."""
        self.process.join(deadline_s)
        if (code := self.process.exitcode) is None:
            raise TimeoutError(f"the launcher did not end in {deadline_s} s; it said: {self.text}")
        return code

    @property
    def text(self) -> str:
        return self.output.read_text()

    def await_file(self, *names: str) -> None:
        end = time.monotonic() + START_DEADLINE_S
        while not all((self.folder / name).exists() for name in names):
            assert time.monotonic() < end, f"no {names} in time; the launcher said: {self.text}"
            assert self.process.exitcode is None, f"the launcher ended too early; it said: {self.text}"
            time.sleep(0.02)

    def await_listening(self, port: int) -> None:
        end = time.monotonic() + START_DEADLINE_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                return
            assert time.monotonic() < end, f"nobody listens at {port}; the launcher said: {self.text}"
            time.sleep(0.02)

    def pid_of(self, rank: int) -> int:
        return int((self.folder / f"pid-{rank}").read_text())

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def assert_no_worker_is_left(self, deadline_s: float = 5.0) -> None:
        end = time.monotonic() + deadline_s
        for path in self.folder.glob("pid-*"):
            while is_alive(int(path.read_text())):
                assert time.monotonic() < end, f"{path.name} is still there"
                time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


Start = Callable[..., Launched]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    launched: list[Launched] = []

    def begin(
        orders: str = "",
        *,
        gloo: bool = False,
        name: str = "job",
        threads: str | None = None,
        **settings: object,
    ) -> Launched:
        output = tmp_path / f"{name}.txt"
        options = {"num_workers": 2, "log_dir": tmp_path / f"{name}-logs", "grace_s": GRACE_S, **settings}
        process = fork_process(run_launcher, tmp_path, orders, gloo, threads, output, options)
        launched.append(Launched(process, tmp_path, output))
        return launched[-1]

    yield begin  # type: ignore[misc]
    for job in launched:
        job.process.kill()
        job.process.join()
        for path in job.folder.glob("pid-*"):
            if is_alive(int(path.read_text())):
                os.kill(int(path.read_text()), signal.SIGKILL)


def run_launcher(
    folder: Path,
    orders: str,
    gloo: bool,
    threads: str | None,
    output: Path,
    options: dict[str, object],
) -> None:
    os.environ.pop("OMP_NUM_THREADS", None)
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = threads
    descriptor = os.open(output, os.O_CREAT | os.O_RDWR | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    command = [sys.executable, str(JOB), "--dir", str(folder), "--orders", orders]
    try:
        code = launch(command + ["--gloo"] * gloo, **options)  # type: ignore[arg-type]
    except ShoalError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
    sys.exit(code)


# ---- places and output -----------------------------------------------------------------------------------


def test_workers_learn_their_place_and_only_the_first_writes_to_the_terminal(
    start: Start, tmp_path: Path
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
    start: Start, tmp_path: Path, num_workers: int, chosen: str | None
) -> None:
    job = start(num_workers=num_workers, threads=chosen)
    assert job.wait() == 0
    shared_out = str(max(1, len(os.sched_getaffinity(0)) // num_workers))
    assert (tmp_path / "env-0").read_text().split()[-1] == (chosen or shared_out)


def test_the_first_worker_sees_the_terminal(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    options = {"num_workers": 2, "log_dir": tmp_path / "logs"}
    process = fork_process(run_launcher, tmp_path, "", False, None, Path(os.ttyname(slave)), options)
    process.join(START_DEADLINE_S)
    assert process.exitcode == 0
    assert b"worker 0 says hello; terminal: True" in os.read(master, 4096)
    os.close(master)
    os.close(slave)


# ---- failures --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("culprit", "gloo"), [(0, False), (1, True)])
def test_a_crash_shows_that_workers_traceback_once(start: Start, culprit: int, gloo: bool) -> None:
    job = start(f"{culprit}:crash,endless", gloo=gloo)
    job.await_file("step-0", "step-1")
    assert job.wait(END_DEADLINE_S) == 1
    assert f"worker {culprit} failed:\nTraceback" in job.text
    assert job.text.count("Traceback") == 1
    assert "crash_deep_inside" in job.text
    assert "ValueError: the flux capacitor is empty" in job.text
    assert "onnection" not in job.text
    job.assert_no_worker_is_left()


def test_a_crash_ends_workers_that_hang(start: Start) -> None:
    job = start("1:crash,0:hang")
    job.await_file("step-0", "step-1")
    assert job.wait(END_DEADLINE_S) == 1
    assert "worker 1 failed:\nTraceback" in job.text
    job.assert_no_worker_is_left(0)


@pytest.mark.parametrize(
    ("order", "code", "text"),
    [
        ("all:usage", 2, "micro batch 3 does not divide 8; use 2 or 4\n"),
        ("1:shoal,endless", 1, "the disk of the shards is gone; mount it again\n"),
    ],
)
def test_an_error_for_people_is_shown_once_and_without_traceback(
    start: Start, order: str, code: int, text: str
) -> None:
    job = start(order)
    assert job.wait() == code
    assert job.text.replace("worker 0 says hello; terminal: False\n", "") == text


@pytest.mark.parametrize(
    ("order", "code", "texts"),
    [
        ("1:kill", 1, ["worker 1 was ended by SIGKILL", "memory was full", "micro-batch-size"]),
        ("1:segfault", 1, ["worker 1 was ended by SIGSEGV", "native code crashed", "in follow"]),
        ("1:exit3", 3, ["worker 1 ended with exit code 3", "worker-00001.err", "exit 3 was ordered"]),
    ],
)
def test_a_worker_that_ends_without_a_word_is_named(
    start: Start, order: str, code: int, texts: list[str]
) -> None:
    job = start(f"{order},endless")
    job.await_file("step-0", "step-1")
    assert job.wait(END_DEADLINE_S) == code
    assert all(text in job.text for text in texts), job.text
    job.assert_no_worker_is_left(0)


def test_a_worker_killed_from_outside_beside_gloo_is_the_culprit(start: Start) -> None:
    job = start("endless", gloo=True)
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
        (signal.SIGINT, "SIGTERM"),
        (signal.SIGHUP, "SIGTERM"),
    ],
)
def test_a_signal_to_the_launcher_lets_all_save(
    start: Start, tmp_path: Path, number: signal.Signals, seen: str
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


@pytest.mark.parametrize(("number", "gloo"), [(signal.SIGTERM, True), (signal.SIGUSR1, False)])
def test_a_signal_to_one_worker_lets_all_save(
    start: Start, tmp_path: Path, number: signal.Signals, gloo: bool
) -> None:
    job = start("endless", gloo=gloo)
    job.await_file("step-0", "step-1")
    os.kill(job.pid_of(1), number)
    assert job.wait() == EXIT_STOPPED
    assert (tmp_path / "saved-0").read_text() == "None"
    assert (tmp_path / "saved-1").read_text() == number.name
    assert job.text == "worker 0 says hello; terminal: False\n"


def test_repeated_signals_change_nothing(start: Start) -> None:
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


def test_a_signal_before_the_first_step_stops_too(start: Start) -> None:
    job = start("all:die-early")
    job.await_file("pid-0", "pid-1")
    job.signal(signal.SIGTERM)
    assert job.wait(END_DEADLINE_S) == EXIT_STOPPED
    assert job.text == ""


def test_the_second_interrupt_ends_at_once(start: Start) -> None:
    job = start("all:hang")
    job.await_file("step-0", "step-1")
    job.signal(signal.SIGINT)
    time.sleep(0.3)
    assert job.process.exitcode is None
    job.signal(signal.SIGINT)
    assert job.wait(END_DEADLINE_S) == 130
    job.assert_no_worker_is_left()


def test_workers_whose_launcher_is_killed_save_and_leave(start: Start) -> None:
    job = start("endless")
    job.await_file("step-0", "step-1")
    job.process.kill()
    end = time.monotonic() + END_DEADLINE_S
    while not all((job.folder / f"saved-{rank}").exists() for rank in (0, 1)):
        assert time.monotonic() < end
        time.sleep(0.05)
    job.assert_no_worker_is_left()


# ---- several hosts, other launchers ----------------------------------------------------------------------


def start_two_hosts(start: Start, orders: str) -> list[Launched]:
    settings = {"num_workers": 1, "nnodes": 2, "rdzv": f"127.0.0.1:{free_port()}"}
    return [start(orders, gloo=True, name=f"host-{index}", **settings) for index in range(2)]


def test_two_launchers_by_hand_make_one_job(start: Start, tmp_path: Path) -> None:
    hosts = start_two_hosts(start, "endless")
    hosts[0].await_file("step-0", "step-1")
    assert [(tmp_path / f"env-{rank}").read_text().split()[:4] for rank in (0, 1)] == [
        ["0", "2", "0", "1"],
        ["1", "2", "0", "1"],
    ]
    hosts[1].signal(signal.SIGTERM)
    assert [host.wait() for host in hosts] == [EXIT_STOPPED] * 2
    assert sorted((tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)) == ["None", "SIGTERM"]


def test_a_crash_on_another_host_ends_both(start: Start) -> None:
    hosts = start_two_hosts(start, "1:crash,endless")
    assert [host.wait() for host in hosts] == [1, 1]
    texts = sorted((host.text for host in hosts), key=lambda text: "Traceback" in text)
    assert "worker 0 lost another worker, which runs on another host" in texts[0]
    assert "worker 1 failed:\nTraceback" in texts[1]


def test_a_host_that_does_not_come_is_an_error_in_time(start: Start) -> None:
    port = free_port()
    job = start(nnodes=2, rdzv=f"127.0.0.1:{port}", rendezvous_deadline_s=2)
    assert job.wait(60) == 1
    assert f"the launchers of 2 hosts did not come together at 127.0.0.1:{port}" in job.text
    assert "Traceback" not in job.text


def test_a_request_to_stop_ends_the_wait_for_other_hosts(start: Start, tmp_path: Path) -> None:
    port = free_port()
    job = start(nnodes=2, rdzv=f"127.0.0.1:{port}")
    job.await_listening(port)
    job.signal(signal.SIGTERM)
    assert job.wait(END_DEADLINE_S) == EXIT_STOPPED
    assert not list(tmp_path.glob("pid-*"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_workers": 0}, "--workers 0"),
        ({"num_workers": 1, "nnodes": 2}, "--nnodes 2 needs --rdzv HOST:PORT"),
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
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, str(JOB), "--dir", str(tmp_path), "--orders", "1:crash"],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 1
    assert (tmp_path / "env-1").read_text().startswith("1 2 1 2 ")
    assert "worker 1: Traceback" in done.stderr
    assert "ValueError: the flux capacitor is empty" in done.stderr


def test_the_same_workers_join_under_mpirun(tmp_path: Path) -> None:
    port = free_port()
    workers = [
        subprocess.Popen(
            [sys.executable, str(JOB), "--dir", str(tmp_path), "--gloo"],
            env={
                **os.environ,
                "OMPI_COMM_WORLD_RANK": str(rank),
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "MASTER_PORT": str(port),
            },
        )
        for rank in range(2)
    ]
    assert [worker.wait(120) for worker in workers] == [0, 0]
    assert [(tmp_path / f"step-{rank}").read_text() for rank in range(2)] == ["3", "3"]
