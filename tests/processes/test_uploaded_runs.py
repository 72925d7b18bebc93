"""Commands on runs in an object store: the outputs of the same run on this machine's disk, and errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pretrain_jobs as jobs
import pytest
import use_jobs

from forked import shoal
from shoal.cli import use
from shoal.errors import ShoalError, UsageError
from shoal.recipes.uploaded_runs import local_model
from shoal.train.checkpoint_files import list_checkpoints

pytest_plugins = ["s3_server"]  # which makes the bucket

LOCATION = "s3://pictures/runs/mine"
TEXT = ("--text", "The [MASK] of the river")


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder with the copies of runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/shoal/runs"


@pytest.fixture
def run_dir(s3_bucket: Any, tmp_path: Path) -> Path:
    """Train ALBERT for a few steps, with its uploads; return its directory."""
    text = jobs.prepare_small(tmp_path)
    changes = {"train": {"total_steps": 6}, "run": {"upload_to": LOCATION}}
    assert jobs.run(jobs.small_config(text, tmp_path / "run", **changes), 1) == [0]
    return tmp_path / "run"


def test_each_command_gives_for_the_store_what_it_gives_for_the_disk(
    run_dir: Path, caches: Path, s3_bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (expected,) = use_jobs.lines(tmp_path, "predict", "fill-mask", "--model", "run", *TEXT)
    for workers, model in (
        (2, LOCATION),
        (1, f"{LOCATION}/checkpoints/step-00000006"),
        (1, f"{LOCATION}/transformers/"),
    ):
        words = ("predict", "fill-mask", "--model", model, *TEXT)
        (row,) = use_jobs.lines(tmp_path, *words, workers=workers)
        if model.endswith("transformers/"):  # transformers' own code has other roundings
            assert [one["token"] for one in row["masks"]] == [one["token"] for one in expected["masks"]]
        else:
            assert row == expected
    (copy,) = caches.iterdir()
    assert [path.name for path in list_checkpoints(copy)] == ["step-00000006"]

    own = use_jobs.said(tmp_path, "export", "run", "--out", "own").strip()
    assert use_jobs.said(tmp_path, "export", LOCATION, "--out", "theirs").strip() == "theirs"
    files = {path.name: path.read_bytes() for path in (tmp_path / own).iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "theirs").iterdir()} == files

    (mine,), (theirs,) = (
        json.loads(use_jobs.said(tmp_path, "report", run, "--json"))["runs"] for run in ("run", LOCATION)
    )
    assert theirs.pop("path") == LOCATION and mine.pop("path") == "run"
    assert theirs == mine and mine["step"] == 6
    use_jobs.said(tmp_path, "report", LOCATION, "run", "--out", "page.html")
    assert f"<code>{LOCATION}</code>" in (tmp_path / "page.html").read_text()

    called: list[list[str]] = []
    monkeypatch.setattr(use.os, "execv", lambda path, words: called.append(words))
    use.evaluate_checkpoint(Path(LOCATION), out=tmp_path / "scores")
    (words,) = called
    assert words[words.index("--config") + 1] == str(copy / "config.toml")
    assert words[words.index("--run.evaluate") + 1] == str(copy / "checkpoints/step-00000006")
    shutil.rmtree(copy)
    checkpoint, settings = run_dir / "checkpoints/step-00000003", copy / "config.toml"
    use.evaluate_checkpoint(checkpoint, run=Path(LOCATION), out=tmp_path / "scores")
    assert called[-1][called[-1].index("--config") + 1] == str(settings)
    assert called[-1][called[-1].index("--run.evaluate") + 1] == str(checkpoint)
    assert settings.read_bytes() == (run_dir / "config.toml").read_bytes()


def test_a_later_checkpoint_replaces_the_copy_and_an_equal_one_is_kept(
    run_dir: Path, caches: Path, s3_bucket: Any
) -> None:
    model = local_model(Path(LOCATION))
    (weights,) = model.glob("*.safetensors")
    first = weights.stat()
    assert local_model(Path(LOCATION)) == model and weights.stat() == first
    (mark,) = [
        entry
        for entry in s3_bucket.objects.filter(Prefix="runs/mine/checkpoints/step-00000006.")
        if entry.key.endswith("complete.json")
    ]
    mark.delete()  # as if it were being uploaded
    earlier = local_model(Path(LOCATION))
    assert earlier.name == "step-00000003" and not model.exists()


def test_what_is_no_uploaded_run_is_named(
    run_dir: Path, caches: Path, s3_bucket: Any, tmp_path: Path
) -> None:
    for words, message in (
        (("report", LOCATION), f"{LOCATION} lies in an object store: name a file with --out"),
        (("export", LOCATION), f"{LOCATION} lies in an object store: name a folder with --out"),
        (
            ("evaluate", "checkpoint", LOCATION),
            f"{LOCATION} lies in an object store: name a folder with --out",
        ),
        (
            ("report", "s3://pictures/runs/none", "--json"),
            "s3://pictures/runs/none/record.jsonl does not exist",
        ),
        (("report", "s3://nobucket/mine", "--json"), "there is no bucket 'nobucket'; check its name"),
        (
            ("predict", "fill-mask", "--model", "https://host/run", *TEXT),
            "https://host/run: runs are read from",
        ),
        (
            ("predict", "fill-mask", "--model", f"{LOCATION}/checkpoints/step-00000004", *TEXT),
            f"{LOCATION}/checkpoints/step-00000004 is no run with a complete checkpoint that --run.upload-to",
        ),
        (("export", "s3://pictures/runs", "--out", "out"), "s3://pictures/runs is no run with a complete"),
        (
            ("evaluate", "checkpoint", str(run_dir), "--run", LOCATION),
            f"{LOCATION} lies in an object store: name a folder with --out",
        ),
        (
            ("evaluate", "checkpoint", str(run_dir), "--run", "s3://pictures/runs/none", "--out", "out"),
            "s3://pictures/runs/none is no run that --run.upload-to uploaded (it has no config.toml)",
        ),
        (
            ("finetune", "squad", "--model", LOCATION, *("--data", "q.json"), *("--eval", "q.json")),
            f"model.path {LOCATION} lies in an object store, where only shoal predict, evaluate, export and "
            f"report read models: copy it with shoal export {LOCATION} --out FOLDER",
        ),
    ):
        result = shoal(*words)
        assert result.returncode != 0 and message in " ".join(result.stderr.split()), (words, result.stderr)
        assert "Traceback" not in result.stderr


def test_a_damaged_object_is_named_and_not_kept(run_dir: Path, caches: Path, s3_bucket: Any) -> None:
    for below, bring in (("checkpoints/step-00000006.", True), ("transformers/", False)):
        (entry,) = [
            each
            for each in s3_bucket.objects.filter(Prefix=f"runs/mine/{below}")
            if each.key.endswith(".safetensors")
        ]
        data = bytearray(whole := entry.get()["Body"].read())
        data[-5] ^= 1
        s3_bucket.put_object(Key=entry.key, Body=bytes(data))
        path = LOCATION if bring else f"{LOCATION}/transformers"
        shutil.rmtree(caches, ignore_errors=True)
        with pytest.raises(
            ShoalError, match=rf"/{below.rstrip('/')}\S* is damaged: \S+ has the checksum \w+ instead"
        ):
            local_model(Path(path), checkpoint=bring)
        s3_bucket.put_object(Key=entry.key, Body=whole)
        assert local_model(Path(path), checkpoint=bring).is_dir()


def test_a_folder_of_another_user_is_refused(caches: Path, s3_bucket: Any) -> None:
    with pytest.raises(ShoalError):
        local_model(Path(LOCATION))
    (copy,) = caches.iterdir()
    copy.chmod(0o777)
    with pytest.raises(UsageError, match="set XDG_CACHE_HOME to a folder of your own"):
        local_model(Path(LOCATION))
