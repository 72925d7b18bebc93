"""One job per run directory: real processes that contend for one, are killed, suspended and started again."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_workers import run_workers

from forked import fork_process, wait_for
from shoal.env.worker import WorkerRanks
from shoal.errors import ShoalError, UsageError
from shoal.record import Stop, read_record
from shoal.train import checkpoint
from shoal.train import run_dir as owner
from shoal.train.checkpoint import Checkpointer, load_model
from shoal.train.checkpoint_files import find_damage, list_checkpoints
from shoal.train.reporting import Progress, RunLog
from shoal.train.run import owned
from shoal.train.world import World

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs forked workers")

FOR_EVER_S = 3_600.0
"""A patience that would end the test: nobody waits for it."""


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "PATIENCE_S", FOR_EVER_S)
    monkeypatch.setattr(owner, "SAME_JOB_PATIENCE_S", FOR_EVER_S)


def until(condition: Callable[[], bool], *, deadline_s: float = 60) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


def owner_of(run_dir: Path) -> dict[str, Any]:
    """Return what the newest owner's file says."""
    newest = max((run_dir / "owner").glob("*.json"), key=lambda path: int(path.stem))
    return dict(json.loads(newest.read_bytes()))


def hold(run_dir: Path, environment: dict[str, str]) -> None:
    """Own the directory until killed, with quick heartbeats."""
    os.environ.update(environment)
    owner.BEAT_S = 0.1
    mine = owner.own(run_dir)
    (run_dir / "held").touch()
    while mine._end.alive:
        time.sleep(0.05)


def start_holder(run_dir: Path, **environment: str) -> BaseProcess:
    process = fork_process(hold, run_dir, environment, daemon=True)
    until(lambda: (run_dir / "held").exists())
    (run_dir / "held").unlink()
    return process


def end(process: BaseProcess) -> None:
    process.kill()
    process.join()


def test_a_second_job_is_told_whose_the_directory_is(tmp_path: Path) -> None:
    holder = start_holder(tmp_path, SLURM_JOB_ID="4711")
    saved = owner_of(tmp_path)
    host = re.escape(os.uname().nodename)
    message = (
        f"{re.escape(str(tmp_path))} is in use by job 4711 \\(process {holder.pid} on host "
        rf"{host}, since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\S*\), and only one job may "
        "write .* wait until that job has ended or stop it, or name another --run.dir"
    )
    for attempt in (owner.own, owner.require_free, Checkpointer):
        with pytest.raises(UsageError, match=message):
            attempt(tmp_path)
    assert owner_of(tmp_path) == saved
    end(holder)


def refused(rank: int, run_dir: Path) -> None:
    told = r"is in use by job \w+ \(process \d+ on host"
    with pytest.raises(UsageError, match=told) as caught:
        Checkpointer(run_dir)
    ranks = WorkerRanks(rank=rank, num_workers=2, local_rank=rank, num_local_workers=2)
    control = dist.group.WORLD
    assert control is not None
    world = World(ranks=ranks, device=torch.device("cpu"), backend="gloo", control=control)
    with pytest.raises(UsageError, match=told), owned(run_dir, world):
        raise AssertionError("it must not be entered")
    (run_dir / f"told-{rank}").write_text(str(caught.value))


def test_all_workers_of_the_second_job_get_the_error(tmp_path: Path) -> None:
    mine = owner.own(tmp_path)
    assert run_workers(refused, 2, tmp_path / "meet", tmp_path) == [0, 0]
    assert (tmp_path / "told-0").read_text() == (tmp_path / "told-1").read_text()
    mine.require()


def test_an_owner_that_was_killed_is_followed_at_once(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        holder = start_holder(tmp_path)
        assert [path.name for path in (tmp_path / "owner").iterdir()] == [f"{number}.json"]
        holder.kill()  # whether or not its parent has taken note of its end
        until(lambda process=holder: owner._status_of(process.pid)[0] in ("Z", ""))  # type: ignore[misc]
    mine = owner.own(tmp_path)
    assert mine.number == 4
    mine.require()


def hold_in_turn(run_dir: Path) -> None:
    checkpointer = Checkpointer(run_dir)
    assert owner.own(run_dir) is owner.own(run_dir / ".." / run_dir.name)
    (run_dir / "held").touch()
    until(lambda: (run_dir / "end").exists())
    del checkpointer
    gc.collect()
    assert owner_of(run_dir)["released"]
    Checkpointer(run_dir).save(1, {"x": torch.zeros(2)}, wait=True)


def test_a_directory_is_free_again_when_nobody_uses_it(tmp_path: Path) -> None:
    process = fork_process(hold_in_turn, tmp_path, daemon=True)
    until(lambda: (tmp_path / "held").exists())
    with pytest.raises(UsageError, match=f"process {process.pid}"):
        owner.own(tmp_path)
    (tmp_path / "end").touch()
    assert wait_for([process]) == [0]
    assert Checkpointer(tmp_path).restore({"x": torch.zeros(2)}) is not None


def fork_and_release(run_dir: Path) -> None:
    mine = owner.own(run_dir)
    if (child := os.fork()) == 0:
        mine.release()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    mine.require()


def test_a_forked_child_does_not_release_what_its_parent_owns(tmp_path: Path) -> None:
    assert wait_for([fork_process(fork_and_release, tmp_path)]) == [0]


def test_reading_needs_no_ownership(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(3, {"model": model}, wait=True)
    del checkpointer
    holder = start_holder(tmp_path)
    before = owner_of(tmp_path)
    assert load_model(tmp_path, model) == 3
    assert owner_of(tmp_path) == before
    end(holder)


# ----------------------------------------------------------------------------- owners that cannot be seen


def test_an_owner_on_another_host_that_lives_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    holder = start_holder(tmp_path, SHOAL_HOST_ID="elsewhere")
    owner.require_free(tmp_path)  # only waiting could tell
    with pytest.raises(UsageError, match=f"is in use by job .*process {holder.pid}"):
        owner.own(tmp_path)
    assert [path.name for path in (tmp_path / "owner").iterdir()] == ["1.json"]
    end(holder)


@pytest.mark.parametrize("same_job", [False, True])
def test_an_owner_on_another_host_that_shows_nothing_is_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, same_job: bool
) -> None:
    """A job that was started again elsewhere waits less long."""
    monkeypatch.setenv("SLURM_JOB_ID", "77" if same_job else "78")
    monkeypatch.setattr(owner, "SAME_JOB_PATIENCE_S" if same_job else "PATIENCE_S", 1.0)
    holder = start_holder(tmp_path, SHOAL_HOST_ID="elsewhere", SLURM_JOB_ID="77")
    holder.kill()
    assert owner.own(tmp_path).number == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        rf"shoal: {re.escape(str(tmp_path))} belongs to job 77 \(process {holder.pid} on host .*\), which "
        "cannot be seen from here; waiting up to 1 s for a sign that it runs",
        line,
    )


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b'{"job": 3}',
        b'{"job": "1", "host": "\\u001b[2J", "pid": 1, "since": "", "place": "", "started": 1, "token": ""}',
        b'{"job": "1", "host": "h", "pid": "1", "since": "", "place": "", "started": 1, "token": ""}',
    ],
)
def test_a_file_that_says_nothing_counts_as_an_owner_that_cannot_be_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr(owner, "PATIENCE_S", 0.1)
    monkeypatch.setattr(owner, "_POLL_S", 0.02)
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "7.json").write_bytes(content)
    assert owner.own(tmp_path).number == 8
    assert "belongs to another job (its owner file cannot be read)" in capsys.readouterr().err


def save_then_sleep(run_dir: Path, when: str) -> None:
    """Save, be suspended and overtaken before or within the next save, and find out."""
    os.environ |= {"SHOAL_HOST_ID": "elsewhere", "SLURM_JOB_ID": "98"}
    owner.BEAT_S = 0.1
    checkpointer = Checkpointer(run_dir)
    checkpointer.save(1, {"x": torch.ones(3)}, wait=True)
    log = RunLog(run_dir, Progress(10, 0))
    log.write(Stop(step=1, reason="before", exit_code=0))
    write_file = checkpoint.write_file

    def sleep(*args: Any) -> None:
        (run_dir / "held").touch()
        until(lambda: (run_dir / "go").exists())

    def sleep_and_write(*args: Any) -> Any:
        sleep()
        return write_file(*args)

    if when == "before":
        sleep()
    else:
        checkpoint.write_file = sleep_and_write
    told = r"no longer belongs to this process: it was taken over by job 99 \(process \d+ on .* suspended"
    with pytest.raises(ShoalError, match=told):
        checkpointer.save(2, {"x": torch.full((3,), -1.0)}, wait=True)
    with pytest.raises(ShoalError, match=told):
        log.write(Stop(step=2, reason="after", exit_code=0))
    with pytest.raises(ShoalError, match=told):
        owner.own(run_dir)


@pytest.mark.parametrize("when", ["before", "within"])
def test_a_job_that_was_overtaken_while_suspended_destroys_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr(owner, "PATIENCE_S", 1.0)
    monkeypatch.setenv("SLURM_JOB_ID", "99")
    suspended = fork_process(save_then_sleep, tmp_path, when)
    assert suspended.pid is not None
    try:
        until(lambda: (tmp_path / "held").exists())
        os.kill(suspended.pid, signal.SIGSTOP)
        checkpointer = Checkpointer(tmp_path)
        state = {"x": torch.zeros(3)}
        assert checkpointer.restore(state) is not None
        checkpointer.save(2, {"x": torch.full((3,), 2.0)}, wait=True)
        (tmp_path / "go").touch()
        os.kill(suspended.pid, signal.SIGCONT)
        assert wait_for([suspended]) == [0]
    finally:
        suspended.kill()

    checkpointer.save(3, {"x": torch.full((3,), 3.0)}, wait=True)
    found = list_checkpoints(tmp_path)
    assert [(path.name[-1], find_damage(path)) for path in found] == [("1", None), ("2", None), ("3", None)]
    assert Checkpointer(tmp_path).restore(state) is not None and state["x"].eq(3).all()
    assert [path.name for path in (tmp_path / "owner").iterdir()] == ["2.json"]
    assert [row.reason for row in read_record(tmp_path) if isinstance(row, Stop)] == ["before"]


# ------------------------------------------------------------------------------------------- contenders

NUM_CONTENDERS, NUM_ROUNDS = 6, 8


def contend(index: int, folder: Path, patience_s: float) -> None:
    """Meet the others before each round, try to own its directory, and hold what was won to the end of it."""

    def meet(name: str) -> None:
        (folder / f"{name}-{index}").touch()
        until(lambda: all((folder / f"{name}-{other}").exists() for other in range(NUM_CONTENDERS)))

    owner.PATIENCE_S, owner.BEAT_S = patience_s, 0.05
    owner._POLL_S = 0.01
    for number in range(NUM_ROUNDS):
        run_dir = folder / f"run-{number}"
        meet(f"begin-{number}")
        try:
            won: owner.Ownership | None = owner.own(run_dir)
            outcome = "won"
        except UsageError as error:
            won, outcome = None, str(error)
        (folder / f"outcome-{number}-{index}").write_text(f"{os.getpid()} {outcome}")
        meet(f"end-{number}")
        if won is not None:
            won.require()
        meet(f"over-{number}")


@pytest.mark.parametrize("before", ["nobody", "killed", "elsewhere"])
def test_one_of_several_contenders_wins(tmp_path: Path, before: str) -> None:
    for number in range(NUM_ROUNDS):
        run_dir = tmp_path / f"run-{number}"
        run_dir.mkdir()
        if before != "nobody":
            if number == 0:
                elsewhere = {"SHOAL_HOST_ID": "elsewhere"} if before == "elsewhere" else {}
                end(start_holder(run_dir, **elsewhere))
            else:
                (run_dir / "owner").mkdir()
                dead = (tmp_path / "run-0" / "owner" / "1.json").read_bytes()
                (run_dir / "owner" / "1.json").write_bytes(dead)
    patience_s = 0.5 if before == "elsewhere" else FOR_EVER_S
    contenders = [fork_process(contend, i, tmp_path, patience_s) for i in range(NUM_CONTENDERS)]
    assert wait_for(contenders) == [0] * NUM_CONTENDERS
    for number in range(NUM_ROUNDS):
        outcomes = [path.read_text().split(" ", 1) for path in tmp_path.glob(f"outcome-{number}-*")]
        winners = [pid for pid, outcome in outcomes if outcome == "won"]
        assert len(outcomes) == NUM_CONTENDERS and len(winners) == 1
        others = [outcome for _, outcome in outcomes if outcome != "won"]
        assert all(f"(process {winners[0]} on host" in outcome for outcome in others)


def come_too_late(run_dir: Path) -> None:
    """Find the owner dead, and be suspended before taking its place while two others come."""
    judge = owner._may_follow

    def judge_late(*args: Any) -> bool:
        owner._may_follow = judge
        verdict = judge(*args)
        (run_dir / "judged").touch()
        until(lambda: (run_dir / "go").exists())
        return verdict

    owner._may_follow = judge_late
    with pytest.raises(UsageError, match=r"in use by job 5 "):
        owner.own(run_dir)


def test_a_contender_that_slept_through_two_owners_withdraws(tmp_path: Path) -> None:
    end(start_holder(tmp_path))
    late = fork_process(come_too_late, tmp_path)
    until(lambda: (tmp_path / "judged").exists())
    end(start_holder(tmp_path))
    holder = start_holder(tmp_path, SLURM_JOB_ID="5")
    assert [path.name for path in (tmp_path / "owner").iterdir()] == ["3.json"]  # 2 is free again
    (tmp_path / "go").touch()
    assert wait_for([late]) == [0]
    assert [path.name for path in (tmp_path / "owner").iterdir()] == ["3.json"]
    assert holder.is_alive()
    end(holder)


def test_an_owner_that_was_given_up_is_replaced_while_it_runs(tmp_path: Path) -> None:
    holder = start_holder(tmp_path)
    token = json.loads((tmp_path / "owner" / "1.json").read_bytes())["token"]
    with pytest.raises(UsageError, match="in use by job"):
        owner.own(tmp_path, given_up="of another owner")
    mine = owner.own(tmp_path, given_up=token)
    assert mine.number == 2 and mine.token != token
    mine.require()
    end(holder)


def test_the_record_keeps_what_was_written_before_the_takeover(tmp_path: Path) -> None:
    with RunLog(tmp_path, Progress(10, 0)) as log:
        log.write(Stop(step=1, reason="mine", exit_code=0))
        log._owner.release()
        with pytest.raises(ShoalError, match="no longer belongs to this process: it was"):
            log.write(Stop(step=2, reason="not mine", exit_code=0))
    assert [row.step for row in read_record(tmp_path) if isinstance(row, Stop)] == [1]
