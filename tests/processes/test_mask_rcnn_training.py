"""Whole trainings of a small Mask R-CNN: what they leave, taken up and scored on other worlds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mask_rcnn_jobs
import pretrain_jobs as jobs
import pytest
import torch
import torchvision
import use_jobs
from PIL import Image as PILImage

from shoal import record
from shoal.cli.app import app
from shoal.data.coco.augment import DetectionAugmentConfig
from shoal.data.coco.reader import DetectionReader
from shoal.data.coco.results import KINDS, read_results
from shoal.data.coco.score import score_results
from shoal.data.coco.source import check_masks, prepared_truth, read_categories
from shoal.data.coco.transform import DetectionTransform
from shoal.data.images.shards import ImageShards
from shoal.errors import EXIT_OK, EXIT_USAGE, UsageError
from shoal.recipes.export import export_model
from shoal.recipes.mask_rcnn import check, use
from shoal.recipes.memory import MemoryCount
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


# --------------------------------------------------------------------------------------------- boxes only


def boxes_only(scenes: Path, folder: Path) -> Path:
    """Prepare the scenes again, as a tool writes them that knows boxes only."""
    command = ["prepare", "coco", "--out", str(folder / "boxes"), "--processes", "1"]
    for split, prefix in (("train", ""), ("validation", "validation-")):
        shards, images = ImageShards(scenes, split), folder / split
        images.mkdir()
        tree: dict[str, list[dict[str, object]]] = {"images": [], "annotations": [], "categories": []}
        tree["categories"] = [
            {"id": number, "name": name} for number, name in read_categories(scenes).items()
        ]
        for index in range(len(shards)):
            (images / f"{index}.jpg").write_bytes(bytes(shards.read(index)))
            of_image = json.loads(bytes(shards.extra(index)))
            size = {"width": of_image["width"], "height": of_image["height"]}
            tree["images"].append({"id": index, "file_name": f"{index}.jpg", **size})
            tree["annotations"] += [
                {"image_id": index, "category_id": one["category_id"], "bbox": one["bbox"]}
                for one in of_image["annotations"]
            ]
        (folder / f"{split}.json").write_text(json.dumps(tree))
        command += [f"--{prefix}images", str(images), f"--{prefix}annotations", str(folder / f"{split}.json")]
    app(command, result_action="return_value", exit_on_error=False)
    return folder / "boxes"


def test_faster_r_cnn_learns_from_boxes(
    scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prepared from boxes: refused where masks are learnt, trained, scored, used and exported where not."""
    data, run_dir = boxes_only(scenes, tmp_path), tmp_path / "run"
    assert "no segmentation, only a box: train Faster R-CNN on them" in capsys.readouterr().err
    with pytest.raises(
        UsageError, match=r"\d+ of train, \d+ of validation\)\. Mask R-CNN learns from masks: train"
    ):
        check(mask_rcnn_jobs.small_config(data, run_dir), 1, None)
    assert jobs.run(mask_rcnn_jobs.small_config(data, run_dir), 1) == [EXIT_USAGE]
    shutil.rmtree(run_dir)
    config = mask_rcnn_jobs.small_config(data, run_dir, model={"masks": False})
    assert any("parameters" in line for line in check(config, 2, MemoryCount()))
    assert jobs.run(config) == [EXIT_OK, EXIT_OK]
    rows = read_record(run_dir)
    names = {"loss_objectness", "loss_rpn_box_reg", "loss_classifier", "loss_box_reg"}
    assert all(row.metrics.keys() == names for row in rows if isinstance(row, record.Step))
    evaluations = [row for row in rows if isinstance(row, record.Evaluation)]
    assert all(name.startswith("box_") for row in evaluations for name in row.metrics) and evaluations
    figures = json.loads((run_dir / "scores.json").read_text())
    assert figures.keys() == {"bbox", "by_category"}
    truth = prepared_truth(ImageShards(data, "validation"), read_categories(data), range(5))
    found = read_results([run_dir / "results.json"], truth)
    assert found.detections.keys() == {"bbox"} and sum(map(len, found.detections["bbox"].values())) > 10
    assert dict(score_results(truth, found, "bbox").figures) == figures["bbox"]

    detector = use.read_export(run_dir / "model")
    theirs = torchvision.models.detection.FasterRCNN(detector.model.backbone, len(detector.categories) + 1)
    names = {name for name in detector.model.state_dict() if not name.startswith("backbone")}
    assert names == {name for name in theirs.state_dict() if not name.startswith("backbone")}
    scored = use_jobs.said(
        tmp_path, "evaluate", "mask_rcnn", "--model", run_dir, "--data", data, "--out", "scored"
    )
    assert scored.startswith("box, in fp32\n") and "mask" not in scored
    assert (tmp_path / "scored" / "scores.json").read_bytes() == (run_dir / "scores.json").read_bytes()
    picture = tmp_path / "train" / "0.jpg"
    use_jobs.said(
        tmp_path, "predict", "mask_rcnn", picture, "--model", run_dir, "--min-score", 0, "--out", "found"
    )
    objects = json.loads((tmp_path / "found" / "0.objects.json").read_text())["objects"]
    assert objects and all("bbox" in one and "segmentation" not in one for one in objects)
    assert (tmp_path / "found" / "0.objects.png").is_file()


@pytest.mark.parametrize(("how", "num_objects"), [("skip", 1), ("fill", 2)])
def test_rectangles_beside_polygons(tmp_path: Path, how: str, num_objects: int) -> None:
    """As annotation tools write them: left out, or a mask that is the box."""
    PILImage.new("RGB", (40, 30)).save(tmp_path / "1.jpg")
    common = {"image_id": 1, "category_id": 1}
    tree = {
        "images": [{"id": 1, "file_name": "1.jpg", "width": 40, "height": 30}],
        "categories": [{"id": 1, "name": "kite"}],
        "annotations": [
            {**common, "id": 1, "bbox": [2, 2, 10, 10], "segmentation": [[2, 2, 12, 2, 12, 12]]},
            {**common, "id": 2, "bbox": [20, 5, 10, 20], "segmentation": []},
        ],
    }
    (tmp_path / "a.json").write_text(json.dumps(tree))
    command = ["prepare", "coco", "--images", str(tmp_path), "--annotations", str(tmp_path / "a.json")]
    command += ["--out", str(tmp_path / "out"), "--processes", "1", "--boxes-only", how]
    app(command, result_action="return_value", exit_on_error=False)
    check_masks(tmp_path / "out")
    view = DetectionAugmentConfig(shorter=(30,), longer=40, flip=0.0)
    reader = DetectionReader(
        ImageShards(tmp_path / "out", "train"), DetectionTransform(view), {1: "kite"}, seed=0, threads=1
    )
    batch = reader.batch(0, [0])
    assert batch["num_objects"].tolist() == [num_objects]
    areas = [int(batch["masks"][0, at : at + h * w].sum()) for at, _, _, h, w in batch["mask_places"][0]]
    assert areas[1:] == [200] * (num_objects - 1)


def test_a_target_of_masks_is_refused_where_there_are_none(tmp_path: Path) -> None:
    command = ["train", "mask_rcnn", "--preset", "faster-rcnn-tiny", "--run.dir", str(tmp_path / "run")]
    with pytest.raises(UsageError, match=r"run\.until 'mask_AP>=0\.3'"):
        app(
            [*command, "--run.until", "mask_AP>=0.3", "--dry-run"],
            result_action="return_value",
            exit_on_error=False,
        )
