"""Made scenes: exact masks, tight boxes, and a ground truth that the prepared images give back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shoal.data.coco.masks import areas, as_compressed
from shoal.data.coco.results import KINDS, Detection
from shoal.data.coco.score import overlaps_of, summarise
from shoal.data.coco.source import BoxesOnly, CocoSource, CocoSplit, prepared_truth, read_categories
from shoal.data.coco.synthetic import draw_scene, make_coco
from shoal.data.images.shards import ImageShards
from shoal.data.images.synthetic import SHAPES
from shoal.errors import ShoalError, UsageError


def test_a_mask_is_what_can_be_seen() -> None:
    scenes = [draw_scene(96, np.random.default_rng(seed)) for seed in range(20)]
    assert {scene.pixels.shape for scene in scenes} == {(96, 72, 3), (72, 96, 3)}
    assert {len(scene.shapes) for scene in scenes} == {1, 2, 3, 4}
    for scene in scenes:
        assert scene.masks.sum(axis=0).max() == 1  # no pixel belongs to two
        seen = scene.masks.any(axis=0)
        if seen.any():  # paint varies less than the background does
            pixels = scene.pixels[scene.masks[-1]].astype(float)
            assert pixels.std(axis=0).max() < scene.pixels[~seen].astype(float).std(axis=0).min() + 5


def test_the_truth_comes_back_from_the_shards(tmp_path: Path) -> None:
    """Objects that are found exactly have an AP of 1; one box moved by a pixel has less."""
    make_coco(tmp_path / "scenes", num_train=4, num_validation=6, size=64, seed=2)
    assert list(tmp_path.iterdir()) == [tmp_path / "scenes"]
    shards, categories = ImageShards(tmp_path / "scenes", "validation"), read_categories(tmp_path / "scenes")
    assert tuple(categories.values()) == SHAPES
    truth = prepared_truth(shards, categories, range(len(shards)))
    assert len(truth.images) == 6 and sum(map(len, truth.objects.values())) > 6
    figures = {}
    for kind in KINDS:
        found = {}
        for image in truth.images.values():
            found[image.id] = []
            for one in truth.objects[image.id]:
                assert one.segmentation is not None
                rle = as_compressed(one.segmentation, image.height, image.width)
                assert rle is not None and areas([rle]) == [one.area]
                shape = list(one.box) if kind == "bbox" else rle
                found[image.id].append(Detection(one.category_id, 1.0, shape, one.area))
        figures[kind] = summarise(truth, [overlaps_of(truth, found, kind)], kind).figures["AP"]
    assert figures == {"bbox": 1.0, "segm": 1.0}


def test_objects_with_a_box_alone_are_said(tmp_path: Path) -> None:
    """Exports of LabelImg and others have no masks; they are kept, left out, or their masks."""
    box = {"image_id": 1, "category_id": 1, "bbox": [1, 1, 4, 4], "area": 16, "iscrowd": 0}
    polygon = {"segmentation": [[1, 1, 5, 1, 5, 5, 1, 5]]}
    tree = {
        "images": [{"id": 1, "file_name": "a.png", "width": 8, "height": 8}],
        "categories": [{"id": 1, "name": "square"}],
        "annotations": [{"id": 1, **box}, {"id": 2, **box, **polygon}, {"id": 3, **box, "segmentation": []}],
    }
    (tmp_path / "boxes.json").write_text(json.dumps(tree))
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    means = {
        "keep": "train Faster R-CNN on them (--preset faster-rcnn-coco-1x)",
        "skip": "they are left out",
        "fill": "their boxes are their masks",
    }
    choices: tuple[BoxesOnly, ...] = ("keep", "skip", "fill")
    for how in choices:
        source = CocoSource(CocoSplit(tmp_path, tmp_path / "boxes.json"), boxes_only=how)
        assert source.remarks == (
            f"2 of the 3 objects of {tmp_path / 'boxes.json'} have no segmentation, only a box: {means[how]}",
        )
        assert source.boxes_only == {"train": 2 if how == "keep" else 0}


@pytest.mark.parametrize("version", [0, 2, None])
def test_categories_of_another_format_version(tmp_path: Path, version: int | None) -> None:
    make_coco(tmp_path, num_train=1, num_validation=1, size=32)
    path = tmp_path / "categories.json"
    tree = json.loads(path.read_bytes())
    assert (tree["format"], tree["version"]) == ("shoal-coco", 1)
    path.write_text(json.dumps(tree["categories"] if version is None else {**tree, "version": version}))
    with pytest.raises(
        ShoalError, match=rf"{path} has format version {version}; .* `shoal prepare coco"
    ) as error:
        read_categories(tmp_path)
    assert str(error.value).endswith(f"--out {tmp_path} --overwrite`")


def test_out_of_range(tmp_path: Path) -> None:
    for changes in ({"num_train": 0}, {"size": 31}):
        with pytest.raises(UsageError, match=next(iter(changes))):
            make_coco(tmp_path, **{"num_train": 1, "num_validation": 1, "size": 64, **changes})
