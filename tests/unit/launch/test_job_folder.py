"""The shared folder of a job: secrets, helpers, starts without progress, hosts that a batch divides over."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from shoal.env.secret import job_secret
from shoal.env.settings import SECRET_FILE
from shoal.errors import ShoalError, UsageError
from shoal.launch import job_folder
from shoal.launch.job_folder import JobFolder, JobStart, may_start, usable_hosts


def test_each_start_has_a_secret_of_its_own_for_its_owner_only(tmp_path: Path) -> None:
    first, again = JobFolder(tmp_path, "7.0"), JobFolder(tmp_path, "7.1")
    secrets = [first.begin().read_text(), again.begin().read_text()]
    assert len(set(secrets)) == 2 and all(len(text.strip()) == 64 for text in secrets)
    assert stat.S_IMODE(first.secret_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(first.folder.stat().st_mode) == 0o700


def test_a_second_command_in_the_same_allocation_has_the_first_ones_secret(tmp_path: Path) -> None:
    secrets = [JobFolder(tmp_path, "7.0").begin().read_text() for _ in range(5)]
    assert len(set(secrets)) == 1, "and is no further start"


def test_the_fourth_start_without_progress_is_refused(tmp_path: Path) -> None:
    for restart in range(3):
        JobFolder(tmp_path, f"7.{restart}").begin()
    with pytest.raises(ShoalError, match=r"last 3 starts ended without a new checkpoint \(there is none\)"):
        JobFolder(tmp_path, "7.3").begin()
    JobFolder(tmp_path, "8.0").begin()  # another job in the same folder


def test_starts_without_numbers_are_counted_too(tmp_path: Path) -> None:
    for number in range(3):
        start = JobFolder(tmp_path, "bert.next")
        start.begin(with_secret=False)
        assert start.run_id == f"bert.{number}" and start.folder.is_dir()
    JobFolder(tmp_path, "t5.next").begin(with_secret=False)  # another job in the same folder
    with pytest.raises(ShoalError, match="last 3 starts ended without a new checkpoint"):
        JobFolder(tmp_path, "bert.next").begin(with_secret=False)
    (tmp_path / "progress").write_text("100\n")
    JobFolder(tmp_path, "bert.next").begin(with_secret=False)


def test_progress_between_starts_lets_them_go_on(tmp_path: Path) -> None:
    for restart in range(8):
        current = JobFolder(tmp_path, f"7.{restart}")
        current.begin()
        if restart % 3 == 2:
            current.progress_file.write_text(f"{restart * 100}\n")
    JobFolder(tmp_path, "7.8").begin()
    with pytest.raises(ShoalError, match=r"the last is of step 500"):
        JobFolder(tmp_path, "7.9").begin()


def test_workers_that_write_no_progress_but_save_go_on(tmp_path: Path) -> None:
    for restart in range(8):
        current = JobFolder(tmp_path, f"7.{restart}")
        current.begin()
        current.saved()


@pytest.mark.parametrize(
    ("progress", "saved", "now", "allowed"),
    [
        (["", "", ""], False, "", False),
        (["", "", ""], False, "100", True),
        (["100", "100", "100"], False, "100", False),
        (["100", "100", "100"], True, "100", False),  # saved the step that it had begun with
        (["", "", ""], True, "", True),
        (["", ""], False, "", True),
        (["100", "100", "100", "200"], False, "200", True),
    ],
)
def test_may_start(progress: list[str], saved: bool, now: str, allowed: bool) -> None:
    starts = [JobStart(run_id=f"7.{n}", progress=text, saved=saved) for n, text in enumerate(progress)]
    assert may_start(starts, now, job="7") is allowed


def test_helpers_that_come_are_published_to_all(tmp_path: Path) -> None:
    first, other = JobFolder(tmp_path, "7.0"), JobFolder(tmp_path, "7.0")
    first.begin()
    other.publish_helper(1, "10.0.0.9:4001")
    later = threading.Timer(0.3, other.publish_helper, (0, "10.0.0.8:4000"))
    later.start()
    assert first.gather_helpers(2, deadline_s=20, required=True) == "10.0.0.8:4000,10.0.0.9:4001"
    assert other.await_helpers(deadline_s=20) == "10.0.0.8:4000,10.0.0.9:4001"


def test_helpers_that_do_not_come_are_one_loud_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = JobFolder(tmp_path, "7.0")
    first.begin()
    first.publish_helper(1, "10.0.0.9:4001")
    assert first.gather_helpers(2, deadline_s=0.1, required=False) == "10.0.0.9:4001"
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "WARNING: helper-00000 did not come within 0.1 s" in said
    with pytest.raises(ShoalError, match=r"helper-00000 did not come .* --helpers-required"):
        first.gather_helpers(2, deadline_s=0.1, required=True)


@pytest.mark.parametrize("text", ["", "10.0.0.9", "10.0.0.9:0", "a b:1", "a:1,b:2", "x" * 400])
def test_an_address_that_is_none(tmp_path: Path, text: str) -> None:
    first = JobFolder(tmp_path, "7.0")
    first.begin()
    first.publish_helper(0, text)
    with pytest.raises(ShoalError, match=r"helper-00000 has .* which is no ADDRESS:PORT"):
        first.gather_helpers(1, deadline_s=1, required=False)


@pytest.mark.parametrize("text", ["10.0.0.9:4001,10.0.0.9", "a:1;b:2", "$(id):1", "\udcff:1"])
def test_published_helpers_are_checked_too(tmp_path: Path, text: str) -> None:
    first = JobFolder(tmp_path, "7.0")
    first.begin()
    (first.folder / "helpers").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ShoalError, match=r"helpers has .* which is no ADDRESS:PORT"):
        first.await_helpers(deadline_s=1)


@pytest.mark.parametrize(
    "text",
    ["7", "{}", '["a"]', '[{"run_id": 7, "progress": ""}]', '[{"run_id": "7.0", "progress": null}]',
     '[{"run_id": "7.0", "progress": "", "saved": 1}]', '[{"run_id": "7.0"}]', '[{"a": 1}]'],
)  # fmt: skip
def test_starts_of_other_types(tmp_path: Path, text: str) -> None:
    (tmp_path / "starts.json").write_text(text)
    if text == "{}":  # nothing in it
        assert JobFolder(tmp_path, "7.0").starts() == []
        return
    with pytest.raises(ShoalError, match=r"starts\.json is not what shoal launch writes; remove it"):
        JobFolder(tmp_path, "7.0").begin()


def test_progress_of_any_bytes_is_bounded(tmp_path: Path) -> None:
    job = JobFolder(tmp_path, "7.0")
    job.progress_file.write_bytes(b"\xff" * 1_000)
    assert job.progress() == "\ufffd" * 64


def test_a_file_is_written_under_a_name_that_nobody_can_take(tmp_path: Path) -> None:
    """Another user who may write to the folder would have laid links there to a file of this one."""
    job = JobFolder(tmp_path, "7.0")
    job.begin()
    own = tmp_path / "own"
    own.write_text("precious")
    for name in ("helper-00000", "helpers", "starts.json"):
        for folder in (job.folder, tmp_path):
            (folder / f".{name}.{os.uname().nodename}.{os.getpid()}").symlink_to(own)
    job.publish_helper(0, "10.0.0.9:4001")
    job.gather_helpers(1, deadline_s=1, required=True)
    job.saved()
    assert own.read_text() == "precious" and own.is_file()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_secret_that_another_user_laid_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JobFolder(tmp_path, "7.0")
    job.folder.mkdir(parents=True)
    job.secret_file.touch(mode=0o600)
    job.secret_file.write_text("known to its owner")
    os.chown(job.secret_file, 12345, -1)
    monkeypatch.setenv(SECRET_FILE, str(job.begin()))
    with pytest.raises(
        UsageError, match=r"secret belongs to the user with the id 12345, who knows what is in it"
    ):
        job_secret()


def test_a_folder_that_is_not_shared_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_folder, "SHARED_DEADLINE_S", 0.2)
    with pytest.raises(ShoalError, match=r"starts/7.0/secret did not appear .* --job has to name one"):
        JobFolder(tmp_path, "7.0").await_secret()


def test_the_wait_for_a_folder_says_so_and_asks_less_and_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now, pauses = [0.0], []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", sleep)
    with pytest.raises(ShoalError, match=rf"did not appear on {os.uname().nodename} in 90 s: .* not shared"):
        JobFolder(tmp_path, "7.0").await_secret()
    assert pauses[0] == 0.1 and pauses == sorted(pauses) and max(pauses) == 2.0
    assert 90 < now[0] <= 92
    said = capsys.readouterr().err
    assert said == f"shoal launch: {os.uname().nodename} waits for {tmp_path}/starts/7.0/secret\n"
    JobFolder(tmp_path, "7.1").begin()  # the next start does not see the file of this one
    assert not JobFolder(tmp_path, "7.2").secret_file.exists()


def test_a_host_that_joins_reads_where_the_others_have_met(tmp_path: Path) -> None:
    first = JobFolder(tmp_path, "7.0")
    first.begin()
    place: dict[str, Any] = {"rdzv": "node1:29400", "nnodes": 3, "workers": 8}
    with pytest.raises(UsageError, match=r"--join: start 7\.0 of .* takes in no hosts"):
        first.place()
    first.publish_place(**place)
    assert JobFolder(tmp_path, "7.0").place() == place
    for text in ('{"rdzv": "node1:29400", "nnodes": "3", "workers": 8}', "[]", "{}"):
        (first.folder / "place").write_text(text)
        with pytest.raises(ShoalError, match=r"place is not what shoal launch writes; start the job again"):
            first.place()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ShoalError, match=r"--job .*/file/job cannot be made: Not a directory"):
        JobFolder(tmp_path / "file" / "job", "7.0").begin()


@pytest.mark.parametrize("text", ["{}x", '[{"run": 1}]'])
def test_a_list_of_starts_of_somebody_else(tmp_path: Path, text: str) -> None:
    (tmp_path / "starts.json").write_text(text)
    with pytest.raises(ShoalError, match=r"starts\.json"):
        JobFolder(tmp_path, "7.0").begin()


@pytest.mark.parametrize(
    ("hosts", "workers", "batch", "usable"),
    [(8, 8, 512, 8), (7, 8, 512, 4), (7, 8, 448, 7), (5, 1, 6, 3), (3, 2, None, 3), (1, 4, 4, 1)],
)
def test_usable_hosts(hosts: int, workers: int, batch: int | None, usable: int) -> None:
    assert usable_hosts(hosts, workers, batch) == usable


def test_a_batch_that_no_host_can_divide() -> None:
    with pytest.raises(UsageError, match="--global-batch 12 does not divide over the 8 workers of one host"):
        usable_hosts(4, 8, 12)
