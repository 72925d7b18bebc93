"""The one function that says which model a path names: runs, checkpoints, exports and the hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import UsageError
from shoal.recipes.model_source import find_model, find_run

PRETRAINED, FINETUNED, IMAGES = (
    "[model]\nhidden_size = 8\n",
    '[model]\npath = "x"\n',
    "[model]\nnetwork = 'n'\n",
)


def run_in(folder: Path, settings: str, *exports: str) -> Path:
    run = folder / "run"
    (run / "checkpoints" / "step-00000002").mkdir(parents=True)
    (run / "config.toml").write_text(settings)
    for name in exports:
        (run / name).mkdir()
        (run / name / "config.json").write_text("{}")
    return run


@pytest.mark.parametrize(
    ("settings", "export", "is_final"),
    [
        (PRETRAINED, "transformers", False),  # it may have been continued since
        (FINETUNED, "transformers", True),
        (IMAGES, "model", True),
        (PRETRAINED, None, False),
        (FINETUNED, None, False),
    ],
)
def test_a_run_is_its_export_or_its_newest_checkpoint(
    settings: str, export: str | None, is_final: bool, tmp_path: Path
) -> None:
    run = run_in(tmp_path, settings, *filter(None, [export]))
    source = find_model(run)
    assert (source.kind, source.run) == ("run", run)
    assert source.directory == (run / export if export else None)
    assert source.checkpoint == (None if is_final else run)


def test_a_checkpoint_and_an_export_belong_to_their_run(tmp_path: Path) -> None:
    run = run_in(tmp_path, FINETUNED, "transformers")
    step = run / "checkpoints" / "step-00000002"
    source = find_model(step)
    assert (source.kind, source.run, source.checkpoint) == ("checkpoint", run, step)
    assert source.directory == run / "transformers" and find_run(step, "SOURCE") == run
    source = find_model(run / "transformers")
    assert (source.kind, source.run, source.checkpoint) == ("export", run, None)
    moved = (run / "transformers").rename(tmp_path / "moved")
    assert (find_model(moved).run, find_model(moved).directory) == (None, moved)


def test_the_hub_is_named_by_its_prefix(tmp_path: Path) -> None:
    source = find_model(Path("hub:some/name"))
    assert (source.kind, source.run, source.checkpoint) == ("hub", None, None)
    with pytest.raises(UsageError, match=r"^--model hub:some/name is not a run of shoal"):
        find_model(source.path, kinds=("run", "export"))


def test_other_paths_are_refused_with_what_may_be_named(tmp_path: Path) -> None:
    every = (
        r"a run of shoal \(with config.toml\), a checkpoint in one, a directory of an exported model \(with "
        r"config.json\) or a model of the hub \(hub:NAME\)$"
    )
    with pytest.raises(UsageError, match=f"^model.path {tmp_path} is not {every}"):
        find_model(tmp_path, "model.path")
    with pytest.raises(UsageError, match=f"^--model {tmp_path}/no does not exist: name {every}"):
        find_model(tmp_path / "no")
    run = run_in(tmp_path, FINETUNED, "transformers")
    with pytest.raises(UsageError, match=r"transformers is not a run .* or a checkpoint in one$"):
        find_run(run / "transformers", "SOURCE")


@pytest.mark.parametrize("path", ["s3://bucket/runs/mine/", "gs://bucket/model"])
def test_a_model_in_a_store_is_refused_by_name(path: str) -> None:
    location = path.rstrip("/")
    with pytest.raises(UsageError, match=rf"model\.path {location} lies .* export {location} --out"):
        find_model(Path(path), "model.path")
