"""Checkpoints in an object store: complete or absent, kept as on disk, and found where the disk is lost."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import zlib
from pathlib import Path
from typing import Any

import moto.s3.models
import pretrain_jobs as jobs
import pytest
import torch
from forked_workers import run_workers
from torch import nn

from forked import fork_process
from shoal.data import objects_s3
from shoal.env.settings import HOST_ID
from shoal.errors import ShoalError
from shoal.recipes.albert import AlbertConfig
from shoal.record import Resume, read_record
from shoal.train.checkpoint import Checkpointer, Restored
from shoal.train.checkpoint_files import list_checkpoints
from shoal.train.checkpoint_uploads import Uploads

pytest_plugins = ["s3_server"]  # which makes the bucket

BUCKET = "pictures"
LOCATION = f"s3://{BUCKET}/runs/mine"
DEADLINE_S = 500.0


def a_state(step: int) -> dict[str, Any]:
    model = nn.Linear(200, 150)  # 120 kB
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
    return {"model": model, "progress": {"step": step}}


def opened(run_dir: Path, keep: int = 2) -> Checkpointer:
    run_dir.mkdir(exist_ok=True)
    return Checkpointer(run_dir, keep=keep, uploads=Uploads(LOCATION, run_dir))


def restored(run_dir: Path) -> Restored | None:
    """Restore into an empty folder; check that all values are of the step."""
    state = a_state(0)
    found = opened(run_dir).restore(state)
    if found is not None:
        assert found.values["progress"]["step"] == found.step
        assert all(bool((p == found.step).all()) for p in state["model"].parameters())
    return found


def complete_steps(bucket: Any) -> list[int]:
    """Return the steps of the copies with their mark, by listing the store."""
    keys = [entry.key for entry in bucket.objects.filter(Prefix="runs/mine/checkpoints/")]
    found = [re.fullmatch(r".*/step-(\d{8})\.[0-9a-f]{16}/complete\.json", key) for key in keys]
    return sorted(int(match[1]) for match in found if match)


@pytest.fixture
def store(s3_bucket: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let files go in parts, several of them."""
    monkeypatch.setattr(moto.s3.models, "S3_UPLOAD_PART_MIN_SIZE", 1)
    return s3_bucket


def test_a_run_goes_on_where_the_disk_is_lost(store: Any, tmp_path: Path) -> None:
    first = opened(tmp_path / "first")
    assert first.restore(a_state(0)) is None
    for step in (1, 2, 3):
        first.save(step, a_state(step), wait=True)
    (last,) = first.poll()[-1:]
    assert last.uploaded_s > last.written_s > 0
    assert complete_steps(store) == [2, 3]
    found = restored(tmp_path / "second")
    assert found is not None and found.step == 3
    assert re.fullmatch(rf"{LOCATION}/checkpoints/step-00000003\.[0-9a-f]{{16}}", str(found.path))
    assert [path.name for path in list_checkpoints(tmp_path / "second")] == ["step-00000003"]


def test_what_is_on_disk_is_taken_if_it_is_as_new(store: Any, tmp_path: Path) -> None:
    first = opened(tmp_path / "run")
    first.save(1, a_state(1), wait=True)
    Checkpointer(tmp_path / "run").save(2, a_state(2), wait=True)  # not uploaded
    found = restored(tmp_path / "run")
    assert found is not None and found.path == tmp_path / "run/checkpoints/step-00000002"


def test_a_damaged_copy_is_named_and_the_one_before_it_taken(store: Any, tmp_path: Path) -> None:
    first = opened(tmp_path / "first")
    for step in (1, 2):
        first.save(step, a_state(step), wait=True)
    (key,) = [
        entry.key
        for entry in store.objects.filter(Prefix="runs/mine/checkpoints/step-00000002.")
        if entry.key.endswith("worker-00000.safetensors")
    ]
    data = bytearray(store.Object(key).get()["Body"].read())
    data[-5] ^= 1
    store.Object(key).put(Body=bytes(data))
    found = restored(tmp_path / "second")
    assert found is not None and found.step == 1
    (damage,) = found.damaged
    assert "step-00000002." in damage and "worker-00000.safetensors has the checksum" in damage
    store.Object(key).put(Body=bytes(data[:-1]))
    found = restored(tmp_path / "third")
    assert found is not None and found.step == 1 and "checkpoints/step-00000002" in found.damaged[0]


def test_a_store_that_fails_does_not_stop_the_run(
    store: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = opened(tmp_path / "run")

    def refuse(self: Uploads, *rest: Any) -> None:
        raise ShoalError("made so")

    monkeypatch.setattr(Uploads, "put", refuse)
    run.save(1, a_state(1), wait=True)
    assert "step 1 is complete in" in (line := capfd.readouterr().err) and "made so" in line
    monkeypatch.undo()
    run.save(2, a_state(2), wait=True)
    assert [row.uploaded_s > 0 for row in run.poll()] == [False, True]


def test_an_older_job_stops_uploading(store: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    old = opened(tmp_path / "old")
    old.save(1, a_state(1), wait=True)
    opened(tmp_path / "new")
    old.save(2, a_state(2), wait=True)
    assert "another job has begun to upload there" in capfd.readouterr().err
    assert complete_steps(store) == [1]


# ---- exports ----------------------------------------------------------------------------------------------


def stored(bucket: Any, folder: str = "") -> dict[str, bytes]:
    """Return the objects of the run below a folder, by name."""
    found = bucket.objects.filter(Prefix=f"runs/mine/{folder}")
    return {entry.key.removeprefix("runs/mine/"): entry.get()["Body"].read() for entry in found}


def write_export(run_dir: Path, files: dict[str, bytes]) -> None:
    shutil.rmtree(run_dir / "transformers", ignore_errors=True)
    for name, data in files.items():
        (run_dir / name).parent.mkdir(exist_ok=True)
        (run_dir / name).write_bytes(data)


def test_what_the_export_wrote_is_uploaded_and_replaces_an_older_one(store: Any, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run = opened(run_dir)
    (run_dir / "notes.txt").write_bytes(b"of before")
    for step, files in (
        (
            3,
            {"transformers/config.json": b"{}", "transformers/part-1": b"one", "transformers/part-2": b"two"},
        ),
        (
            6,
            {
                "transformers/config.json": b"{}",
                "transformers/whole": os.urandom(130_000),
                "scores.json": b"[]",
            },
        ),
    ):
        with run.uploaded_export(step):
            write_export(run_dir, files)
        found = stored(store)
        mark = json.loads(found.pop("transformers/complete.json"))
        del found["owner"]
        assert found == files
        sums = {each["name"]: (each["num_bytes"], int(each["crc32"], 16)) for each in mark["files"]}
        inside = {Path(name).name: data for name, data in files.items() if "/" in name}
        assert mark["step"] == step
        assert sums == {name: (len(data), zlib.crc32(data)) for name, data in inside.items()}


def test_an_export_whose_upload_fails_has_no_mark_and_a_line_says_so(
    store: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    run = opened(run_dir)
    with run.uploaded_export(3):
        write_export(run_dir, {"transformers/config.json": b"{}", "transformers/weights": b"old"})
    assert "transformers/complete.json" in stored(store)

    def refuse(self: Any, name: str, path: Path) -> None:
        if path.name == "weights":
            raise ShoalError("made so")
        self.put(name, path.read_bytes())

    monkeypatch.setattr(objects_s3.S3Objects, "put_file", refuse)
    with run.uploaded_export(6):
        write_export(run_dir, {"transformers/config.json": b"{}", "transformers/weights": b"new"})
    assert "the exported model was not uploaded: made so; it is on this host's disk" in capfd.readouterr().err
    assert set(stored(store, "transformers/")) <= {"transformers/config.json"}  # nothing to take for whole
    assert (run_dir / "transformers/weights").read_bytes() == b"new"


def test_an_older_job_does_not_replace_the_export(
    store: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    old = opened(tmp_path / "old")
    opened(tmp_path / "new")
    with old.uploaded_export(3):
        write_export(tmp_path / "old", {"transformers/config.json": b"{}"})
    assert "another job has begun to upload there" in capfd.readouterr().err
    assert stored(store, "transformers/") == {}


# ---- kills ------------------------------------------------------------------------------------------------


def save_until_killed(run_dir: Path, step: int, killed_at: int) -> None:
    """Save and upload in a process that ends before or after a request, or at the end."""
    checkpointer, count = opened(run_dir, keep=1), itertools.count(1)

    def called(**event: Any) -> None:
        if next(count) == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    assert checkpointer._uploads is not None
    events = checkpointer._uploads._objects.client.meta.events  # type: ignore[attr-defined]
    events.register("before-send.s3", called)
    events.register("response-received.s3", called)
    checkpointer.save(step, a_state(step), wait=True)
    os._exit(0)


def kill_at_requests(folder: Path, every: int) -> None:
    torch.set_num_threads(1)
    objects_s3._PART_BYTES = 50_000
    objects_s3._PARTS_AT_ONCE = 1
    opened(folder / "base", keep=1).save(1, a_state(1), wait=True)
    found = []
    for number in itertools.count(1, every):
        if not (pid := os.fork()):
            save_until_killed(folder / f"run-{number}", number + 1, number)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        again = restored(folder / f"again-{number}")
        assert again is not None
        found.append([code, again.step])
        if code == 0:
            break
    (folder / "found.json").write_text(json.dumps(found))


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 7])
def test_an_upload_killed_at_any_request_leaves_the_newest_complete_one(
    store: Any, tmp_path: Path, every: int
) -> None:
    parent = fork_process(kill_at_requests, tmp_path, every)
    parent.join(DEADLINE_S)
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) > 20 // every and [code for code, _ in found] == [-signal.SIGKILL] * (
        len(found) - 1
    ) + [0]
    newest, taken = 1, []
    for number, (_, step) in zip(itertools.count(1, every), found, strict=False):
        assert step in (newest, number + 1)  # the new one once it is complete
        taken.append(step == number + 1)
        newest = step
    assert taken == sorted(taken) and not taken[0] and taken[-1]
    assert complete_steps(store) == [newest]


# ---- several workers --------------------------------------------------------------------------------------


def apart(rank: int, folder: Path, step: int) -> None:
    """Restore, and save a step, in a run directory that the other worker does not see."""
    os.environ[HOST_ID] = f"host{rank}"
    run_dir = folder / f"host{rank}"
    run_dir.mkdir(parents=True, exist_ok=True)
    model = nn.Linear(5 + rank, 3)  # parts of the state that only one worker has
    held = {f"part{rank}": model, "shared": torch.zeros(7)}
    checkpointer = Checkpointer(run_dir, keep=2, uploads=Uploads(LOCATION, run_dir))
    found = checkpointer.restore({**held, "progress": {}})
    assert (found.step if found else 0) == step - 1
    assert all(bool((p == step - 1).all()) for p in model.parameters()) or not found
    with torch.no_grad():
        for parameter in (*model.parameters(), held["shared"]):
            parameter.fill_(step)
    checkpointer.save(step, {**held, "progress": {"step": step}}, wait=True)
    (row,) = checkpointer.poll()
    assert row.path.startswith(f"{LOCATION}/checkpoints/step-{step:08}.")
    assert not list_checkpoints(run_dir) and not list((run_dir / "checkpoints").glob("step-*"))


def test_hosts_that_share_no_folder_have_their_checkpoints_in_the_store(store: Any, tmp_path: Path) -> None:
    for step in (1, 2):
        assert run_workers(apart, 2, tmp_path / f"meeting{step}", tmp_path, step) == [0, 0]
    assert complete_steps(store) == [1, 2]


def test_a_killed_run_on_text_of_the_store_goes_on_in_an_empty_directory(store: Any, tmp_path: Path) -> None:
    text = jobs.prepare_small(tmp_path)
    for path in text.iterdir():
        if path.is_file():
            store.upload_file(str(path), f"text/{path.name}")
    assert jobs.run(jobs.small_config(text, tmp_path / "whole")) == [0, 0]

    def config(name: str) -> AlbertConfig:
        kept = {"cache": tmp_path / f"cache-{name}", "cache_bytes": "10MB"}
        remote = Path(f"s3://{BUCKET}/text")
        return jobs.small_config(remote, tmp_path / name, data=kept, run={"upload_to": LOCATION})

    processes = jobs.start(config("first"), 2)
    jobs.wait_for_step(tmp_path / "first", 8, processes)  # the upload of step 6 began before
    jobs.kill(processes)
    (newest,) = complete_steps(store)[-1:] or [0]
    assert jobs.run(config("second")) == [0, 0]
    assert jobs.losses(tmp_path / "second") == jobs.losses(tmp_path / "whole")
    if newest:
        (resumed,) = [row for row in read_record(tmp_path / "second") if isinstance(row, Resume)]
        assert resumed.step == newest and resumed.path.startswith(f"{LOCATION}/checkpoints/")
    objects = stored(store)
    assert objects["record.jsonl"] == (tmp_path / "second/record.jsonl").read_bytes()
    exported = {
        f"transformers/{path.name}": path.read_bytes()
        for path in (tmp_path / "second/transformers").iterdir()
    }
    assert exported == {
        name: data
        for name, data in objects.items()
        if name.startswith("transformers/") and "complete" not in name
    }
