"""``shoal predict mask_rcnn``: what is found is what the network finds, and it is drawn where it lies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from shoal.data.coco.augment import DetectionAugmentConfig
from shoal.data.coco.drawing import Drawn, drawn
from shoal.data.coco.masks import bitmaps
from shoal.data.coco.reader import DetectionReader
from shoal.data.coco.source import read_categories
from shoal.data.coco.synthetic import make_coco
from shoal.data.coco.transform import DetectionTransform
from shoal.data.images.shards import ImageShards
from shoal.data.images.transform import decode
from shoal.env.worker import alone
from shoal.errors import UsageError
from shoal.models.detection.config import MaskRCNNConfig
from shoal.models.detection.mask_rcnn import MaskRCNN
from shoal.recipes import using
from shoal.recipes.mask_rcnn import ExportedDetector, MaskRCNNPredictConfig, objects_in, use
from shoal.train.config import DistributedConfig
from shoal.train.gradients import Precision
from shoal.train.model_setup import choose_precision
from shoal.train.world import join_world

CPU = torch.device("cpu")
FP32 = choose_precision("fp32", CPU)
SHORTER, LONGER = 60, 96
NETWORK = MaskRCNNConfig(
    backbone="resnet18",
    channels=8,
    anchor_sizes=(8, 16, 32, 64, 128),
    proposals_a_level=30,
    proposals=20,
    detections=4,
)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data") / "scenes"
    make_coco(out, num_train=1, num_validation=3, size=64, seed=3)
    return out


@pytest.fixture(scope="module")
def detector(scenes: Path) -> ExportedDetector:
    """A network of random weights that are large enough for scores and boxes to differ."""
    torch.manual_seed(4)
    categories = read_categories(scenes)
    model = MaskRCNN(NETWORK, len(categories)).eval()
    for layer in (model.roi_heads.box_predictor.cls_score, model.roi_heads.mask_predictor.mask_fcn_logits):
        torch.nn.init.normal_(layer.weight, std=2.0)
    return ExportedDetector(model=model, categories=categories, shorter=SHORTER, longer=LONGER)


@pytest.fixture(scope="module")
def exported(detector: ExportedDetector, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "detector"
    use.write_export(detector, out)
    return out


@pytest.fixture
def pictures(scenes: Path, tmp_path: Path) -> list[Path]:
    shards = ImageShards(scenes, "validation")
    paths = [tmp_path / f"picture-{index}.jpg" for index in range(len(shards))]
    for index, path in enumerate(paths):
        path.write_bytes(bytes(shards.read(index)))
    return paths


Asked = tuple[MaskRCNNPredictConfig, tuple[Path, ...]]


def asked(pictures: list[Path], model: Path, out: Path, **changes: Any) -> Asked:
    settings = {"model": model, "out": out, "min_score": 0.0, "device": "cpu", **changes}
    return MaskRCNNPredictConfig(**settings), tuple(pictures)


def run(ask: Asked, precision: Precision = FP32) -> None:
    """Predict as the command does on one worker, its checks before it."""
    settings, images = ask
    using.check_prediction(use(settings), images)
    with (
        TemporaryDirectory() as folder,
        join_world(alone(Path(folder)), DistributedConfig(device="cpu")) as one,
    ):
        using.predict(use(settings), images, one, precision)


def found_in(out: Path, picture: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((out / f"{picture.stem}.objects.json").read_text())
    return tree


def test_objects_are_those_of_the_network_on_the_readers_batch(
    scenes: Path, detector: ExportedDetector, pictures: list[Path]
) -> None:
    """The oracle goes the way of training and evaluation: shards, reader, a batch of one."""
    view = DetectionAugmentConfig(shorter=(SHORTER,), longer=LONGER, flip=0.0)
    shards = ImageShards(scenes, "validation")
    reader = DetectionReader(shards, DetectionTransform(view), detector.categories, seed=0, threads=1)
    names = list(detector.categories.values())
    for index, picture in enumerate(pictures):
        batch = {name: torch.from_numpy(values) for name, values in reader.batch(0, [index]).items()}
        theirs = detector.model.detect(batch["images"], batch["sizes"])
        boxes = theirs.scaled(batch["sizes"], batch["original_size"])
        height, width = batch["original_size"][0].tolist()
        masks = theirs.bitmaps(boxes, [(height, width)])[0]
        ours = objects_in(detector, decode(picture.read_bytes()), CPU, FP32)
        assert len(ours) == NETWORK.detections
        assert [one["score"] for one in ours] == theirs.scores.tolist()
        assert [one["category"] for one in ours] == [names[label - 1] for label in theirs.labels.tolist()]
        corners = [[x, y, x + w, y + h] for x, y, w, h in (one["bbox"] for one in ours)]
        assert np.allclose(corners, boxes.numpy(), atol=1e-4)
        found = bitmaps([one["segmentation"] for one in ours], height, width)
        assert np.array_equal(found, masks.numpy()) and found.any()


def test_what_was_found_is_written_and_drawn(
    detector: ExportedDetector,
    exported: Path,
    pictures: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    run(asked(pictures, exported, out))
    assert sorted(path.name for path in out.iterdir()) == sorted(
        f"{picture.stem}.objects.{kind}" for picture in pictures for kind in ("json", "png")
    )
    for picture, line in zip(pictures, capsys.readouterr().out.splitlines(), strict=True):
        pixels = decode(picture.read_bytes())
        objects = objects_in(detector, pixels, CPU, FP32)
        tree = found_in(out, picture)
        assert (tree["image"], tree["objects"], tree["precision"]) == (str(picture), objects, "fp32")
        assert line.startswith(f"{picture}: ") and objects[0]["category"] in line
        painted = np.array(Image.open(out / f"{picture.stem}.objects.png"))
        masks = bitmaps([one["segmentation"] for one in objects], *pixels.shape[:2]).astype(bool)
        shown = [
            Drawn(
                label=one["category_id"],
                text=f"{one['category']} {100 * one['score']:.0f}%",
                box=(x, y, x + w, y + h),
                mask=mask,
            )
            for one, mask in zip(objects, masks, strict=True)
            for x, y, w, h in [one["bbox"]]
        ]
        assert np.array_equal(painted, drawn(pixels, shown[::-1]))  # the surest on top


def test_objects_in_the_precision_that_was_asked_for(
    detector: ExportedDetector, exported: Path, pictures: list[Path], tmp_path: Path
) -> None:
    bf16 = choose_precision("bf16", CPU)
    run(asked(pictures[:1], exported, tmp_path), precision=bf16)
    pixels = decode(pictures[0].read_bytes())
    objects = objects_in(detector, pixels, CPU, bf16)
    tree = found_in(tmp_path, pictures[0])
    assert (tree["objects"], tree["precision"]) == (objects, "bf16")
    assert objects != objects_in(detector, pixels, CPU, FP32)


def test_scores_and_classes_choose(
    detector: ExportedDetector, exported: Path, pictures: list[Path], tmp_path: Path
) -> None:
    every = objects_in(detector, decode(pictures[0].read_bytes()), CPU, FP32)
    score, name = every[1]["score"], every[0]["category"]
    run(asked(pictures[:1], exported, tmp_path / "sure", min_score=score))
    assert found_in(tmp_path / "sure", pictures[0])["objects"] == every[:2]
    run(asked(pictures[:1], exported, tmp_path / "one", classes=(name,)))
    some = [one for one in every if one["category"] == name]
    assert found_in(tmp_path / "one", pictures[0])["objects"] == some


def test_nothing_found_leaves_the_picture_as_it_is(
    exported: Path, pictures: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(asked(pictures[:1], exported, tmp_path / "out", min_score=1.0))
    painted = np.array(Image.open(tmp_path / "out" / f"{pictures[0].stem}.objects.png"))
    assert np.array_equal(painted, decode(pictures[0].read_bytes()))
    assert f"{pictures[0]}: nothing found" in capsys.readouterr().out


# ---- mistakes ---------------------------------------------------------------------------------------------


def no_image(pictures: list[Path], model: Path, out: Path) -> Asked:
    pictures[1].write_text("not a picture")
    return asked(pictures, model, out)


MISTAKES: dict[str, tuple[Callable[[list[Path], Path, Path], Asked], str]] = {
    "no image": (no_image, "picture-1.jpg: not an image that can be decoded"),
    "missing": (lambda p, m, o: asked([o / "x.jpg"], m, o), "x.jpg does not exist"),
    "folder": (lambda p, m, o: asked([m], m, o), "no file in this folder has the suffix of an image"),
    "one name": (
        lambda p, m, o: asked([p[0], p[0].with_suffix(".JPG")], m, o),
        "both would be written as picture-0.objects.png",
    ),
    "none": (lambda p, m, o: asked([], m, o), "no image is named"),
    "score": (lambda p, m, o: asked(p, m, o, min_score=1.5), "--min-score 1.5 must be from 0 to 1"),
    "no model": (
        lambda p, m, o: asked(p, o, o),
        r"does not exist: name a run of shoal .* a checkpoint in one or a directory",
    ),
    "class": (
        lambda p, m, o: asked(p, m, o, classes=("disk",)),
        "'disk' is none of the .* Did you mean 'disc'",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told(name: str, pictures: list[Path], exported: Path, tmp_path: Path) -> None:
    pictures[0].with_suffix(".JPG").write_bytes(pictures[0].read_bytes())
    ask, message = MISTAKES[name]
    with pytest.raises(UsageError, match=message):
        run(ask(pictures, exported, tmp_path / "out"))


def test_a_model_of_another_kind_is_refused(pictures: list[Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"format": "shoal-resnet"}')
    with pytest.raises(UsageError, match="it is no shoal-mask-rcnn"):
        run(asked(pictures, tmp_path, tmp_path / "out"))
