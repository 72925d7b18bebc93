"""COCO's figures: the official regression, and pycocotools on made data with ties and crowds."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_coco import made_results, made_truth, write
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from shoal.cli.app import app
from shoal.data.coco.annotations import read_annotations
from shoal.data.coco.results import KINDS, Kind, read_results
from shoal.data.coco.score import CocoScore, overlaps_of, summarise
from shoal.env.settings import test_data_dir as data_dir
from shoal.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools

GOLDEN = data_dir() / "coco_eval_golden"


def official(truth: dict[str, Any], results: list[dict[str, Any]], kind: Kind) -> list[float]:
    """The twelve figures of pycocotools; masks without boxes, so that a mask's area is its own."""
    other = {"bbox": "segmentation", "segm": "bbox"}[kind]
    results = [{key: value for key, value in one.items() if key != other} for one in copy.deepcopy(results)]
    with contextlib.redirect_stdout(io.StringIO()):
        ground = COCO()
        ground.dataset = copy.deepcopy(truth)
        ground.createIndex()
        evaluation = COCOeval(ground, ground.loadRes(results), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return list(evaluation.stats)


def ours(folder: Path, truth: Any, results: Any, kind: Kind, **settings: Any) -> CocoScore:
    annotations = read_annotations(write(folder / "truth.json", truth), boxes="keep", **settings)
    found = read_results([write(folder / "results.json", results)], annotations, **settings)
    return summarise(annotations, [overlaps_of(annotations, found.detections.get(kind, {}), kind)], kind)


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="SHOAL_TEST_DATA has no coco_eval_golden")
def test_official_regression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = GOLDEN / "cocoapi"
    results = [str(files / f"instances_val2014_fake{kind}100_results.json") for kind in KINDS]
    out = tmp_path / "scores.json"
    truth = files / "instances_val2014_100.json"
    app(
        ["evaluate", "coco", "--annotations", str(truth), "--results", *results, "--json", str(out)],
        result_action="return_value",
    )
    printed = [line for line in capsys.readouterr().out.splitlines() if " = " in line]
    wanted = (GOLDEN / "val2014_fake_eval_res.txt").read_text()
    blocks = {
        kind: [re.sub(r" +", " ", line) for line in block.splitlines() if " = " in line]
        for kind, block in re.findall(r"type=(\w+)\n(.*?)(?:-----|\Z)", wanted, flags=re.S)
    }
    assert [re.sub(r" +", " ", line) for line in printed] == blocks["bbox"] + blocks["segm"]
    assert len(printed) == 24

    tree, ground = json.loads(out.read_text()), json.loads(truth.read_text())
    for kind, path in zip(KINDS, results, strict=True):
        figures = official(ground, json.loads(Path(path).read_text()), kind)
        np.testing.assert_allclose(list(tree[kind].values()), figures, rtol=0, atol=1e-15)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_as_pycocotools(kind: Kind, seed: int, tmp_path: Path) -> None:
    truth = made_truth(seed)
    results = made_results(truth, seed + 50)
    score = ours(tmp_path, truth, results, kind)
    np.testing.assert_allclose(
        list(score.figures.values()), official(truth, results, kind), rtol=0, atol=1e-15
    )
    assert 0.02 < score.figures["AP"] < 0.98


def test_at_most_100_detections_of_an_image_and_category(tmp_path: Path) -> None:
    truth = made_truth(5, num_images=3)
    results = made_results(truth, 6)
    crowd = [{**results[n % len(results)], "score": n / 500} for n in range(400)]
    score = ours(tmp_path, truth, results + crowd, "bbox")
    wanted = official(truth, results + crowd, "bbox")
    np.testing.assert_allclose(list(score.figures.values()), wanted, rtol=0, atol=1e-15)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_make_the_whole(kind: Kind, tmp_path: Path) -> None:
    """The same bits, however the images are dealt out and in whichever order the parts arrive."""
    truth = made_truth(9)
    whole = ours(tmp_path, truth, made_results(truth, 10), kind)
    annotations = read_annotations(tmp_path / "truth.json")
    found = read_results([tmp_path / "results.json"], annotations).detections[kind]
    for num_parts in (2, 3, 5):
        parts = [
            overlaps_of(annotations, {i: one for i, one in found.items() if i % num_parts == rank}, kind)
            for rank in reversed(range(num_parts))
        ]
        assert summarise(annotations, parts, kind) == whole


def test_image_of_two_workers_is_refused(tmp_path: Path) -> None:
    truth = made_truth(9)
    ours(tmp_path, truth, made_results(truth, 10), "bbox")
    annotations = read_annotations(tmp_path / "truth.json")
    found = read_results([tmp_path / "results.json"], annotations).detections["bbox"]
    part = overlaps_of(annotations, found, "bbox")
    with pytest.raises(UsageError, match=r"image \d+ was evaluated by workers 0 and 1"):
        summarise(annotations, [part, part], "bbox")


def test_an_annotation_may_have_the_id_0(tmp_path: Path) -> None:
    """pycocotools takes its match for none."""
    truth = made_truth(2)
    results = made_results(truth, 3)
    wanted = ours(tmp_path, truth, results, "bbox")
    for n, one in enumerate(truth["annotations"]):
        one["id"] = n
    assert ours(tmp_path, truth, results, "bbox") == wanted


def test_nothing_found_and_nothing_to_find(tmp_path: Path) -> None:
    truth = made_truth(2)
    assert set(ours(tmp_path, truth, [], "segm").figures.values()) == {0.0}
    empty = {**truth, "annotations": []}
    assert set(ours(tmp_path, empty, made_results(truth, 3), "bbox").figures.values()) == {-1.0}


def test_masks_need_masks(tmp_path: Path) -> None:
    truth = made_truth(2)
    results = made_results(truth, 3)
    for one in truth["annotations"]:
        del one["segmentation"]
    with pytest.raises(UsageError, match=r"truth.json: annotation \d+ has no segmentation"):
        ours(tmp_path, truth, results, "segm")
