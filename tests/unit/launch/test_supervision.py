"""The failure that is the cause, and a worker's report of its own."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import FileStore

from shoal.env.member_signs import name_begin
from shoal.errors import EXIT_STOPPED, ShoalError, UsageError
from shoal.launch.supervision import Job, decide_outcome
from shoal.launch.worker import WorkerError, describe_error, read_errors, write_error

KILL, TERM, SEGV = -signal.SIGKILL, -signal.SIGTERM, -signal.SIGSEGV


def error(
    rank: int, time_s: float = 0.0, *, is_bug: bool = True, lost: bool = False, code: int = 1
) -> WorkerError:
    return WorkerError(
        rank=rank,
        time_s=time_s,
        message=f"message of {rank}",
        is_bug=is_bug,
        exit_code=code,
        lost_peer=lost,
    )


def test_all_well_and_all_stopped() -> None:
    assert decide_outcome({0: 0, 1: 0}, {}).exit_code == 0
    assert decide_outcome({0: 75, 1: 75}, {}).exit_code == EXIT_STOPPED
    assert decide_outcome({0: 75, 1: 0}, {}).exit_code == EXIT_STOPPED
    assert decide_outcome({0: 75, 1: 75}, {}).text == ""


def test_the_earliest_error_of_a_workers_own_is_the_cause() -> None:
    errors = {0: error(0, 1.0, lost=True), 1: error(1, 1.2), 2: error(2, 1.1)}
    outcome = decide_outcome({0: 1, 1: 1, 2: 1, 3: KILL}, errors, killed={3})
    assert outcome.text.startswith("worker 2: message of 2")


def test_a_death_by_signal_explains_lost_peers_and_exit_codes() -> None:
    outcome = decide_outcome({0: 1, 1: 3, 2: KILL}, {0: error(0, lost=True)})
    assert outcome.exit_code == 1
    assert outcome.text.startswith("worker 2 was ended by SIGKILL: killed from outside, or by the kernel")
    assert "native code crashed" in decide_outcome({0: SEGV}, {}).text
    assert decide_outcome({0: 3, 1: KILL}, {}, killed={1}).exit_code == 3


def test_a_death_by_a_signal_that_was_passed_on_is_a_stop() -> None:
    assert decide_outcome({0: TERM, 1: 75}, {}, forwarded={signal.SIGTERM}).exit_code == EXIT_STOPPED
    assert decide_outcome({0: TERM, 1: 75}, {}).exit_code == 1
    assert decide_outcome({0: TERM, 1: KILL}, {}, forwarded={15}, killed={1}).exit_code == EXIT_STOPPED


def test_an_error_beats_a_stop() -> None:
    assert decide_outcome({0: 75, 1: 2}, {1: error(1, code=2, is_bug=False)}).exit_code == 2
    assert decide_outcome({0: 75, 1: 2}, {1: error(1, code=2, is_bug=False)}).text == "message of 1"


def test_only_lost_peers_point_to_another_host() -> None:
    codes, errors = {0: 1, 1: 1}, {0: error(0, 2.0, lost=True), 1: error(1, 1.0, lost=True)}
    outcome = decide_outcome(codes, errors, has_other_hosts=True)
    assert (outcome.exit_code, outcome.text.split(",")[0]) == (76, "worker 1 lost another worker")
    outcome = decide_outcome(codes, errors)
    assert (outcome.exit_code, outcome.text) == (1, "worker 1: message of 1")


def test_the_log_of_a_silent_worker_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("".join(f"line {number}\n" for number in range(50)))
    text = decide_outcome({1: 9}, {}, logs={1: tmp_path / "log"}).text
    assert text.startswith(f"worker 1 ended with exit code 9\n(its whole output: {tmp_path / 'log'})")
    assert "line 49" in text
    assert "line 29" not in text


def raised(make: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise make from cause
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    ("exception", "lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"), True),
        (ShoalError("group '0', rank 0: rank 1 (10.0.0.2, pid 7) was lost: it closed the connection"), True),
        (ShoalError("rank 1 (10.0.0.2, pid 7) has left the group, and all_reduce 3 waits for it"), True),
        (ShoalError("all_reduce 3 of rank 0 does not fit that of rank 1"), False),
        (RuntimeError("shape mismatch"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_a_lost_peer_is_told_from_an_own_error(exception: BaseException, lost: bool) -> None:
    assert describe_error(raised(exception), rank=0).lost_peer is lost
    wrapped = raised(ShoalError("cannot save"), raised(exception))
    assert describe_error(wrapped, rank=0).lost_peer is lost


def test_what_a_worker_reports_arrives(tmp_path: Path) -> None:
    usage = describe_error(raised(UsageError("3 does not divide 8")), rank=1)
    assert (usage.message, usage.is_bug, usage.exit_code) == ("3 does not divide 8", False, 2)
    defect = describe_error(raised(KeyError("x")), rank=0, run=tmp_path)
    kept = tmp_path / "logs" / "worker-00000.traceback"
    assert "in raised" in kept.read_text()
    assert defect.message.startswith(
        f"KeyError: 'x', which shoal did not expect; its traceback is in {kept}. "
    )
    write_error(tmp_path, usage)
    write_error(tmp_path, defect)
    assert read_errors(tmp_path) == {0: defect, 1: usage}


def test_a_peer_that_did_not_come_to_the_store_file_is_lost(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), 2)
    store.set_timeout(timedelta(milliseconds=20))
    for ask in (lambda: store.get("peer"), lambda: store.wait(["peer"])):
        with pytest.raises(RuntimeError) as caught:
            ask()
        assert describe_error(caught.value, rank=0).lost_peer


NO_LOCKS = """
#include <errno.h>
int flock(int file, int operation) { (void)file; (void)operation; errno = ENOLCK; return -1; }
"""
ALONE = """
import sys
from shoal.launch.worker import run_worker
def main():
    import torch.distributed as dist
    from shoal.env.launcher import worker_env
    place = worker_env()
    dist.init_process_group("gloo", init_method=place.init_method, rank=0, world_size=1)
    return 0
run_worker(main)
"""


def test_a_store_on_a_file_system_without_locks_blames_no_other_worker(tmp_path: Path) -> None:
    """As NFS without its lock daemon: the only worker of a job, whose store is a file."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    (tmp_path / "locks.c").write_text(NO_LOCKS)
    (tmp_path / "alone.py").write_text(ALONE)
    library = tmp_path / "locks.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "locks.c"], check=True)
    command = [
        sys.executable,
        "-m",
        "shoal",
        "launch",
        "--workers",
        "1",
        "--",
        "env",
        f"LD_PRELOAD={library}",
    ]
    done = subprocess.run(
        [*command, sys.executable, "alone.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "No locks available" in done.stderr and "set TMPDIR to a local one" in done.stderr
    assert "another" not in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


LAUNCHER = """
import subprocess, sys
from pathlib import Path
from shoal.launch.supervision import Job
wait = "trap 'exit 75' TERM; echo ready; while sleep 0.1; do :; done"
folder = Path(sys.argv[1])
with Job(folder, error_dir=folder, usr2_is_term=sys.argv[2] == "mpirun") as job:
    worker = subprocess.Popen(["sh", "-c", wait], text=True, start_new_session=True)
    job.wait({0: worker})
print(job.exit_codes[0], job.outcome().exit_code)
"""


@pytest.mark.parametrize(("sender", "code"), [("mpirun", 75), ("scheduler", -signal.SIGUSR2)])
def test_usr2_of_mpirun_reaches_workers_as_a_wish_to_stop(tmp_path: Path, sender: str, code: int) -> None:
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path), sender]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None and launcher.stdout.readline() == "ready\n"
        launcher.send_signal(signal.SIGUSR2)
        assert launcher.stdout.read() == f"{code} 75\n"


# ---- workers without which the others go on ----------------------------------------------------------------

LIVES = """
import os, pathlib, signal, sys, time
folder, rank, ends = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
if rank == "0":
    while not (folder / ends).exists():
        for path in folder.glob("still-*"):
            path.rename(folder / "errors" / f"standstill-1-{path.name.partition('-')[2]}")
        time.sleep(0.01)
    sys.exit(0)
number = len(list(folder.glob("life-*"))) + 1
(folder / f"life-{number}").touch()
if number == 1 and "still" in sys.argv:
    (folder / f"still-{os.getpid()}").touch()
    os.kill(os.getpid(), signal.SIGSTOP)
elif number == 1:
    codes = {"given-up": 76, "left": 75}
    asked = next((codes[word] for word in sys.argv if word in codes), None)
    os.kill(os.getpid(), signal.SIGKILL) if asked is None else sys.exit(asked)
"""


def elastic_job(
    folder: Path, *words: str, can_restart: Callable[[int], bool] = lambda rank: True
) -> tuple[int, str]:
    """Run a worker that ends at once in its first life, and one that lives until a file is there."""

    def start(rank: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", LIVES, str(folder), str(rank), *words], start_new_session=True, text=True
        )

    errors = folder / "errors"
    errors.mkdir()
    name_begin(errors)
    with Job(folder / "logs", error_dir=errors) as job:
        job.wait({rank: start(rank) for rank in (0, 1)}, restart=start, can_restart=can_restart)
        outcome = job.outcome()
    return outcome.exit_code, outcome.text


@pytest.mark.parametrize("way", ["killed", "still", "given-up"])
def test_a_lost_worker_is_started_again(way: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert elastic_job(tmp_path, "life-2", way) == (0, "")
    how = "given up by the others" if way == "given-up" else "ended by SIGKILL"
    assert f"worker 1 was {how}; the others go on" in capfd.readouterr().err


def test_a_worker_that_has_left_is_not_started_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert elastic_job(tmp_path, "life-1", "left") == (0, "")
    assert "worker 1 has left; the others go on" in capfd.readouterr().err
    assert not (tmp_path / "life-2").exists()


def test_a_worker_is_not_started_on_a_host_that_is_away(tmp_path: Path) -> None:
    asked: list[int] = []

    def is_there(rank: int) -> bool:
        asked.append(rank)
        return len(asked) > 3

    assert elastic_job(tmp_path, "life-2", can_restart=is_there) == (0, "")
    assert len(asked) == 4


def test_a_lost_worker_that_is_not_needed_any_more_is_no_failure(tmp_path: Path) -> None:
    assert elastic_job(tmp_path, "life-1") == (0, "")


def test_the_loss_of_all_is_a_failure(tmp_path: Path) -> None:
    def start(rank: int) -> subprocess.Popen[str]:
        kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
        return subprocess.Popen([sys.executable, "-c", kill], start_new_session=True, text=True)

    name_begin(tmp_path)
    with Job(tmp_path / "logs", error_dir=tmp_path) as job:
        job.wait({0: start(0)}, restart=start)
        assert job.outcome().exit_code == 1
        assert "worker 0 was ended by SIGKILL" in job.outcome().text


# ---- workers that are lost before all have met -------------------------------------------------------------

SET_UP = """
import json, os, pathlib, signal, sys, time
folder, rank, how, num_lost = pathlib.Path(sys.argv[1]), *sys.argv[2:5]
number = len(list(folder.glob(f"start-{rank}-*"))) + 1
(folder / f"start-{rank}-{number}").touch()
store = folder / "errors" / "store.members"
store.mkdir(exist_ok=True)
(store / f"{rank}-{number}").touch()
while len(list(folder.glob(f"start-*-{number}"))) < 2:
    time.sleep(0.01)
if number > int(num_lost):
    sys.exit(0)
if rank == "1" and how != "a file is damaged":
    os.kill(os.getpid(), signal.SIGKILL)
if rank == "1" or how == "hangs":
    time.sleep(60)
report = {"rank": 0, "time_s": 1.0, "message": how, "exit_code": 1, "is_bug": False}
report["lost_peer"] = how == "rank 1 was lost"
(folder / "errors" / "error-0.json").write_text(json.dumps(report))
sys.exit(1)
"""


def set_up(folder: Path, how: str, num_lost: int) -> tuple[int, str, int]:
    """Run a job whose workers are lost before they meet; return its outcome and the number of starts."""

    def start(rank: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", SET_UP, str(folder), str(rank), how, str(num_lost)]
        return subprocess.Popen(command, start_new_session=True, text=True)

    errors = folder / "errors"
    errors.mkdir()
    with Job(folder / "logs", error_dir=errors) as job:
        job.wait({rank: start(rank) for rank in (0, 1)}, restart=start)
        outcome = job.outcome()
    starts = [sorted(path.name for path in folder.glob(f"start-{rank}-*")) for rank in (0, 1)]
    assert len(starts[0]) == len(starts[1])
    store = {path.name for path in (errors / "store.members").iterdir()}
    assert store == {f"{rank}-{len(starts[0])}" for rank in (0, 1)}, "each start has a store of its own"
    return outcome.exit_code, outcome.text, len(starts[0])


@pytest.mark.parametrize("how", ["hangs", "rank 1 was lost"])
def test_all_start_again_if_one_is_lost_before_they_meet(
    how: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert set_up(tmp_path, how, num_lost=2) == (0, "", 3)
    said = capfd.readouterr().err
    assert "before the first step; all start again (start 2 of 3)\n" in said and "(start 3 of 3)\n" in said


def test_all_start_three_times_at_most(tmp_path: Path) -> None:
    code, text, num_starts = set_up(tmp_path, "rank 1 was lost", num_lost=9)
    assert (code, num_starts) == (1, 3)
    assert text.startswith("worker 1 was ended by SIGKILL")


def test_an_error_before_all_have_met_ends_the_job(tmp_path: Path) -> None:
    assert set_up(tmp_path, "a file is damaged", num_lost=9) == (1, "a file is damaged", 1)


def test_the_workers_of_several_hosts_do_not_end_with_those_of_one(tmp_path: Path) -> None:
    life = "import os, signal, sys; os.path.exists(sys.argv[1]) or os.kill(os.getpid(), signal.SIGKILL)"
    lives: list[int] = []

    def start(rank: int) -> subprocess.Popen[str]:
        lives.append(rank)
        if len(lives) == 3:
            (tmp_path / "lives").touch()
        command = [sys.executable, "-c", life, str(tmp_path / "lives")]
        return subprocess.Popen(command, start_new_session=True, text=True)

    name_begin(tmp_path)
    with Job(tmp_path / "logs", error_dir=tmp_path) as job:
        job.wait({1: start(1)}, restart=start, has_other_hosts=True)
        assert job.outcome().exit_code == 0
    assert lives == [1, 1, 1]
