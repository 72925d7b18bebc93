"""Pieces of a Mask R-CNN run: which images share a micro-batch, what is sampled of them, what is recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from shoal.data.coco.annotations import read_annotations
from shoal.data.coco.augment import DetectionAugmentConfig
from shoal.data.coco.results import Detection, read_results, write_results
from shoal.data.coco.score import NAMES, CocoScore
from shoal.data.coco.source import CocoSource, CocoSplit, prepare_coco, prepared_truth
from shoal.data.coco.synthetic import make_coco
from shoal.data.images.prepare import ImagePrepareConfig
from shoal.data.images.shards import ImageShards
from shoal.data.steps import DataShard
from shoal.decide.bucketing import GroupedOrder
from shoal.env.worker import WorkerRanks
from shoal.recipes.images import ImageDataConfig
from shoal.recipes.mask_rcnn import (
    LOSSES,
    MaskRCNNTrainConfig,
    Scored,
    TrainConfig,
    ValidationConfig,
    gather_results,
    mean_losses,
    open_data,
    recorded,
    sampling_keys,
)
from shoal.train.world import World


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> MaskRCNNTrainConfig:
    scenes = tmp_path_factory.mktemp("data") / "scenes"
    make_coco(scenes, num_train=11, num_validation=3, size=64, seed=3)
    return MaskRCNNTrainConfig(
        data=ImageDataConfig(path=str(scenes), decode_threads=1),
        augment=DetectionAugmentConfig(shorter=(24,), longer=32, flip=0.5),
        train=TrainConfig(global_batch_size=4, micro_batch_size=2),
        validation=ValidationConfig(shorter=48, longer=64),
    )


@pytest.fixture(scope="module")
def world() -> World:
    ranks = WorkerRanks(rank=0, num_workers=1, local_rank=0, num_local_workers=1)
    return World(
        ranks=ranks,
        device=torch.device("cpu"),
        backend="gloo",
        control=None,
    )


def test_a_micro_batch_is_of_one_aspect(config: MaskRCNNTrainConfig, world: World) -> None:
    source, _ = open_data(config, world)
    assert isinstance(source.order, GroupedOrder)
    num_steps = source.order.samples_an_epoch // 4
    share = DataShard(global_batch_size=4, micro_batch_size=2)
    seen: dict[int, set[bool]] = {}
    for step in source.open(share, range(num_steps)):
        for batch in step:
            wide = (batch["sizes"][:, 1] > batch["sizes"][:, 0]).tolist()
            assert len(wide) == 2 and len(set(wide)) == 1
            assert set(batch["images"].shape[2:]) == {32}  # nothing but the last multiple of 32 is padding
            for index in batch["index"].tolist():
                seen.setdefault(index, set()).update(wide)
    assert len(seen) == 11 and {tuple(aspects) for aspects in seen.values()} == {(True,), (False,)}


def test_held_out_images_are_as_validation_says(config: MaskRCNNTrainConfig, world: World) -> None:
    _, reader = open_data(config, world)
    first, again = reader.batch(0, [0, 1, 2]), reader.batch(7, [0, 1, 2])
    assert {tuple(sorted(size)) for size in first["sizes"].tolist()} == {(48, 64)}
    assert (first["images"] == again["images"]).all()  # never mirrored


def test_what_is_sampled_follows_from_epoch_and_image() -> None:
    batch = {"epoch": torch.tensor([0, 0, 1]), "index": torch.tensor([5, 6, 5])}
    keys = sampling_keys(1, batch)
    assert len(set(keys.tolist())) == 3
    alone = {name: values[1:2] for name, values in batch.items()}
    assert torch.equal(sampling_keys(1, alone), keys[1:2])
    assert not torch.equal(sampling_keys(2, batch), keys)


def test_an_image_counts_as_much_as_another() -> None:
    """The mean within an image, then over images; nothing sampled is a loss of 0."""
    found = {name: torch.tensor([6.0, 10.0, 0.0]) for name in LOSSES}
    found |= {name: torch.tensor([2, 10, 0]) for name in LOSSES.values()}
    assert mean_losses(found).tolist() == [4.0] * 5
    del found["loss_mask"]
    assert mean_losses(found).tolist() == [4.0] * 4


def test_figures_without_an_object_to_find_are_not_recorded() -> None:
    figures = dict.fromkeys(NAMES, 0.5) | {"AP75": -1.0}
    scores = [CocoScore(kind="bbox", figures=figures, by_category={})]
    assert recorded(scores) == {"box_AP": 0.5, "box_AP50": 0.5}


def test_results_have_the_ids_of_the_file(world: World, tmp_path: Path) -> None:
    given = ["scan-b", 1 << 70, "0042", 7]
    truth: dict[str, list[dict[str, Any]]] = {"images": [], "annotations": []}
    truth["categories"] = [{"id": 3, "name": "hen"}]
    for number, name in enumerate(given):
        Image.new("RGB", (20, 10)).save(tmp_path / f"{number}.png")
        truth["images"].append({"id": name, "file_name": f"{number}.png", "width": 20, "height": 10})
        truth["annotations"].append(
            {"id": number, "image_id": name, "category_id": 3, "bbox": [1, 2, 8, 8], "area": 64}
        )
    annotations = tmp_path / "truth.json"
    annotations.write_text(json.dumps(truth))
    source = CocoSource(CocoSplit(tmp_path, annotations))
    prepare_coco(source, tmp_path / "out", config=ImagePrepareConfig(processes=1))
    shards = ImageShards(tmp_path / "out", "train")
    prepared = prepared_truth(shards, source.categories, range(4))
    objects = {image: [Detection(3, 0.5, [1.0, 2.0, 8.0, 8.0], 64.0)] for image in prepared.images}
    results = gather_results(world, Scored(objects={"bbox": objects}, truth=prepared))
    assert results is not None and {one["image_id"] for one in results} == set(given)
    write_results(tmp_path / "results.json", results)
    read = read_results([tmp_path / "results.json"], read_annotations(annotations), on_bad="refuse")
    assert read.detections["bbox"] == objects
