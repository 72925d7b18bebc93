"""``shoal prepare coco``: from images and annotations to shards that are read again."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.cli.app import app
from shoal.data.coco.annotations import read_annotations
from shoal.data.coco.augment import DetectionAugmentConfig, Placement
from shoal.data.coco.masks import bitmaps
from shoal.data.coco.results import KINDS
from shoal.data.coco.source import read_categories
from shoal.data.coco.transform import DetectionTransform, placed_objects
from shoal.data.images.shards import ImageShards
from shoal.env.settings import test_data_dir as data_dir
from shoal.errors import UsageError

TINY = data_dir() / "coco_tiny100" / "tiny_coco"
pytestmark = pytest.mark.skipif(not TINY.is_dir(), reason="SHOAL_TEST_DATA has no coco_tiny100")


def files(split: str) -> tuple[Path, Path]:
    return TINY / f"{split}2017", TINY / "annotations" / f"instances_{split}2017.json"


def prepare(out: Path, images: Path, annotations: Path, *options: str) -> None:
    command = ["prepare", "coco", "--images", images, "--annotations", annotations, "--out", out, *options]
    app([*map(str, command), "--processes", "2"], result_action="return_value", exit_on_error=False)


def test_shards_of_coco(tmp_path: Path) -> None:
    images, annotations = files("train")
    other_images, other_annotations = files("val")
    out = tmp_path / "out"
    options = ["--validation-images", str(other_images), "--validation-annotations", str(other_annotations)]
    prepare(out, images, annotations, *options, "--shard-bytes", "4000000")
    assert KINDS == ("bbox", "segm")
    transform = DetectionTransform(DetectionAugmentConfig(shorter=(160,), longer=300))
    for split, path in (("train", annotations), ("validation", other_annotations)):
        truth = read_annotations(path)
        shards = ImageShards(out, split)
        seen = set()
        for number in range(len(shards)):
            tree = json.loads(bytes(shards.extra(number)))
            image = truth.images[tree["image_id"]]
            seen.add(image.id)
            assert (image.width, image.height) == (tree["width"], tree["height"])
            assert shards.sizes[number].tolist() == [image.width, image.height]
            assert (
                bytes(shards.read(number))
                == (path.parents[1] / f"{path.stem[10:]}" / image.file_name).read_bytes()
            )
            found = [(one["id"], one["category_id"], one["bbox"]) for one in tree["annotations"]]
            assert found == [(o.id, o.category_id, list(o.box)) for o in truth.objects[image.id]]
            if number < 5:
                key = (1, 0, number)
                height, width = transform.frame(key, image.height, image.width)
                pixels = np.full((3, height, width), np.nan, dtype=np.float32)
                objects = transform(shards.read(number), shards.extra(number), pixels, key)
                assert min(height, width) <= 160 and np.isfinite(pixels).all()
                assert len(objects.boxes) == len(objects.masks) <= len(found)
        empty = {n for n, found in truth.objects.items() if all(o.is_crowd for o in found)}
        assert seen == truth.images.keys() - (empty if split == "train" else set())
        assert read_categories(out) == truth.categories


def test_masks_are_computed_beforehand(tmp_path: Path) -> None:
    """In the frame of the image itself they are the masks that polygons give, to the bit."""
    found: dict[str, dict[int, list[Any]]] = {}
    for name, options in (("given", ()), ("runs", ("--masks", "run-lengths"))):
        prepare(tmp_path / name, *files("val"), *options)
        shards = ImageShards(tmp_path / name, "train")
        found[name] = {}
        for number in range(10):
            tree = json.loads(bytes(shards.extra(number)))
            kinds = {type(one["segmentation"]) for one in tree["annotations"] if not one["iscrowd"]}
            assert kinds == {dict if name == "runs" else list}
            shape = tree["height"], tree["width"]
            place = Placement(resized=shape, top=0, left=0, frame=shape, flip=False)
            objects = placed_objects(shards.extra(number), shape, place)
            found[name][tree["image_id"]] = [bitmaps([mask], *place.frame) for mask in objects.masks]
    for image, masks in found["given"].items():
        assert len(masks) == len(found["runs"][image])
        for mask, other in zip(masks, found["runs"][image], strict=True):
            np.testing.assert_array_equal(mask, other)


def packed(folder: Path) -> dict[str, Path]:
    """COCO's zips as they are downloaded: images are stored, annotations compressed."""
    paths = {name: folder / f"{name}2017.zip" for name in ("train", "val", "annotations_trainval")}
    for name in ("train", "val"):
        with zipfile.ZipFile(paths[name], "w") as file:
            for image in sorted((TINY / f"{name}2017").iterdir()):
                file.write(image, f"{name}2017/{image.name}")
    with zipfile.ZipFile(paths["annotations_trainval"], "w", zipfile.ZIP_DEFLATED) as file:
        for name in ("train", "val"):
            file.write(files(name)[1], f"annotations/instances_{name}2017.json")
    return paths


def test_zips_give_the_shards_of_the_folders(tmp_path: Path) -> None:
    zips = packed(tmp_path)
    annotations = zips["annotations_trainval"]
    for out, sources in (
        ("folders", [*files("train"), *files("val")]),
        ("zips", [zips["train"], annotations, zips["val"], annotations]),
    ):
        options = ["--validation-images", str(sources[2]), "--validation-annotations", str(sources[3])]
        prepare(tmp_path / out, sources[0], sources[1], *options, "--shard-bytes", "4000000")
    names = sorted(path.name for path in (tmp_path / "folders").glob("*-0*"))
    assert len(names) >= 4 and names == sorted(path.name for path in (tmp_path / "zips").glob("*-0*"))
    for name in (*names, "categories.json"):
        assert (tmp_path / "folders" / name).read_bytes() == (tmp_path / "zips" / name).read_bytes()


def test_what_a_zip_lacks_is_named(tmp_path: Path) -> None:
    zips = packed(tmp_path)
    images, annotations = zips["val"], zips["annotations_trainval"]
    with pytest.raises(UsageError, match=r"val2017: there is no such folder; give .*val2017.zip"):
        prepare(tmp_path / "out", images.with_suffix(""), annotations)
    with pytest.raises(
        UsageError, match=r"has no instances_test2017.json.*it has annotations/instances_train"
    ):
        prepare(tmp_path / "out", images.rename(tmp_path / "test2017.zip"), annotations)
    with pytest.raises(UsageError, match=r"image whose file is missing: 48 .*train2017.zip: 0"):
        prepare(tmp_path / "out", zips["train"], files("val")[1])
    damaged = bytearray(annotations.read_bytes())
    damaged[5000:5100] = bytes(100)
    annotations.write_bytes(damaged)
    with pytest.raises(UsageError, match=r"instances_train2017.json: the zip is damaged"):
        prepare(tmp_path / "out", zips["train"], annotations)


def changed(path: Path, tmp_path: Path, values: dict[str, Any]) -> Path:
    tree = json.loads(path.read_bytes())
    tree["annotations"][0].update(values)
    (tmp_path / "changed.json").write_text(json.dumps(tree))
    return tmp_path / "changed.json"


def test_bad_annotations_are_refused_or_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images, annotations = files("val")
    bad = changed(annotations, tmp_path, {"bbox": [1, 2, 0, 5], "segmentation": []})
    with pytest.raises(
        UsageError, match=r"changed.json: annotations\[0\] .* box has no area inside its image"
    ):
        prepare(tmp_path / "out", images, bad, "--on-bad", "refuse")
    prepare(tmp_path / "out", images, bad)
    assert (
        "left out 1: annotation whose box has no area inside its image: 1 (annotations[0] (id"
        in capsys.readouterr().err
    )


def test_missing_image_and_half_a_validation_set(tmp_path: Path) -> None:
    images, annotations = files("val")
    with pytest.raises(UsageError, match=r"image whose file is missing: \d+ \(images\[0\] "):
        prepare(tmp_path / "out", tmp_path, annotations)
    with pytest.raises(UsageError, match="belong together; give both or none"):
        prepare(tmp_path / "out", images, annotations, "--validation-images", str(images))
    with pytest.raises(UsageError, match=r"categories.json is missing"):
        read_categories(tmp_path)
