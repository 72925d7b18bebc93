"""Whole trainings of a small Mask R-CNN: what they leave, taken up and scored on other worlds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mask_rcnn_jobs
import pretrain_jobs as jobs
import pytest
import torch

from shoal import record
from shoal.data.coco.results import KINDS, read_results
from shoal.data.coco.score import score_results
from shoal.data.coco.source import prepared_truth, read_categories
from shoal.data.images.shards import ImageShards
from shoal.errors import EXIT_OK, EXIT_USAGE
from shoal.recipes.export import export_model
from shoal.recipes.mask_rcnn import use
from shoal.record import read_record


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mask_rcnn_jobs.prepare_small(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole_run(scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 2 workers that nothing interrupted."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert jobs.run(mask_rcnn_jobs.small_config(scenes, run_dir)) == [EXIT_OK, EXIT_OK]
    return run_dir


def test_what_a_finished_run_leaves(whole_run: Path, scenes: Path) -> None:
    rows = read_record(whole_run)
    assert isinstance(rows[0], record.Start) and isinstance(rows[-1], record.End)
    assert (rows[0].unit, rows[0].total_steps, rows[0].num_workers) == ("images", 5, 2)
    assert (rows[0].micro_batch_size, rows[0].accumulation_steps) == (2, 1)
    steps = [row for row in rows if isinstance(row, record.Step)]
    assert [row.samples for row in steps] == [4, 8, 12, 16, 20]
    for row in steps:
        assert row.loss == pytest.approx(sum(row.metrics.values())) and len(row.metrics) == 5
    assert [row.step for row in rows if isinstance(row, record.Checkpoint)] == [3, 5]
    evaluations = [row for row in rows if isinstance(row, record.Evaluation)]
    assert [(row.step, row.num_samples) for row in evaluations] == [(3, 5), (5, 5)]
    figures = json.loads((whole_run / "scores.json").read_text())
    assert evaluations[-1].metrics["mask_AP"] == figures["segm"]["AP"]
    shards, categories = ImageShards(scenes, "validation"), read_categories(scenes)
    truth = prepared_truth(shards, categories, range(len(shards)))
    found = read_results([whole_run / "results.json"], truth)
    assert sum(map(len, found.detections["bbox"].values())) > 10
    for kind in KINDS:
        assert dict(score_results(truth, found, kind).figures) == figures[kind]


def test_scores_are_those_of_one_worker_to_the_last_digit(
    whole_run: Path, scenes: Path, tmp_path: Path
) -> None:
    """Three workers share three batches of the five images."""
    for num_workers in (1, 3):
        run_dir = jobs.copy_without_end(whole_run, tmp_path / str(num_workers))
        changes = {"train": {"global_batch_size": 4, "total_steps": 5}}
        config = mask_rcnn_jobs.small_config(scenes, run_dir, **changes)
        if num_workers == 3:  # a global batch that three workers share is another run's; its end is the same
            text = (run_dir / "config.toml").read_text()
            (run_dir / "config.toml").write_text(
                text.replace("global_batch_size = 4", "global_batch_size = 6")
            )
            config = jobs.changed(config, {"train": {"global_batch_size": 6}})
        assert jobs.run(config, num_workers) == [EXIT_OK] * num_workers
        for name in ("scores.json", "results.json"):
            assert (run_dir / name).read_bytes() == (whole_run / name).read_bytes(), name


def test_another_number_of_workers_takes_up_the_same_images(
    whole_run: Path, scenes: Path, tmp_path: Path
) -> None:
    """One worker goes on from step 3, in the middle of the first epoch, with accumulation."""
    run_dir = jobs.copy_without_end(whole_run, tmp_path / "run")
    shutil.rmtree(run_dir / "checkpoints" / "step-00000005")
    assert jobs.run(mask_rcnn_jobs.small_config(scenes, run_dir), 1) == [EXIT_OK]
    (resume,) = [row for row in read_record(run_dir) if isinstance(row, record.Resume)]
    assert resume.step == 3
    ours, theirs = jobs.losses(run_dir), jobs.losses(whole_run)
    assert [ours[step] for step in (4, 5)] == pytest.approx([theirs[step] for step in (4, 5)], rel=1e-4)
    assert theirs[4] != pytest.approx(theirs[5], rel=1e-2)


def test_what_must_stay_is_refused(whole_run: Path, scenes: Path) -> None:
    before = (whole_run / "record.jsonl").read_bytes()
    changes = {"train": {"micro_batch_size": 1}}
    assert jobs.run(mask_rcnn_jobs.small_config(scenes, whole_run, **changes), 1) == [EXIT_USAGE]
    assert "train.micro_batch_size" in (whole_run / "worker-0.log").read_text()
    assert (whole_run / "record.jsonl").read_bytes() == before


def test_what_is_exported(whole_run: Path, scenes: Path, tmp_path: Path) -> None:
    found = use.read_export(whole_run / "model")
    assert found.categories == read_categories(scenes) and (found.shorter, found.longer) == (64, 64)
    again = use.read_export(export_model(whole_run / "checkpoints" / "step-00000005", tmp_path / "five"))
    ours, theirs = again.model.state_dict(), found.model.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
