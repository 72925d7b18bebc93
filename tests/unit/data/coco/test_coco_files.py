"""Faults in files of annotations and results: a clear refusal, or a counted skip."""

from __future__ import annotations

import copy
import gzip
import json
import math
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_coco import made_results, made_truth, write

from shoal.cli.app import app
from shoal.data import json_stream
from shoal.data.coco.annotations import CocoAnnotations, read_annotations
from shoal.data.coco.results import read_results, write_results
from shoal.data.json_stream import top_level_entries
from shoal.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools

Change = Callable[[dict[str, Any]], None]


def first(tree: dict[str, Any], **values: Any) -> None:
    tree["annotations"][0].update(values)


def another(tree: dict[str, Any], key: str) -> None:
    tree[key].append(copy.deepcopy(tree[key][0]))


def an_rle(size: list[int], counts: Any) -> dict[str, Any]:
    return {"size": size, "counts": counts}


BAD_ENTRIES: dict[str, tuple[Change, str]] = {
    "doubled annotation": (
        lambda t: another(t, "annotations"),
        "an annotation that is there twice: id 40",
    ),
    "doubled image": (lambda t: another(t, "images"), "an image whose id another one has: id 100"),
    "doubled category": (lambda t: another(t, "categories"), "a category whose id another one has: id 8"),
    "no such image": (lambda t: first(t, image_id=5), "an annotation of an image that is not in the file"),
    "no such category": (lambda t: first(t, category_id=5), "an annotation of a category that is not in"),
    "box of no area": (lambda t: first(t, bbox=[3, 4, 0, 5]), "whose box has no area inside its image"),
    "polygon of all memory": (
        lambda t: first(t, segmentation=[[5, 5, 1e300, 5, 25, 1e300]]),
        "ends more than 100,000 pixels outside of its image",
    ),
    "box outside": (lambda t: first(t, bbox=[70, 4, 9, 5]), r"inside its image: \[70.0, 4.0, 9.0, 5.0\] in"),
    "box of text": (lambda t: first(t, bbox=["left", 2, 3, 4]), "whose bbox is not 4 finite numbers"),
    "box of three": (lambda t: first(t, bbox=[1, 2, 3]), "whose bbox is not 4 finite numbers"),
    "box of 400 digits": (lambda t: first(t, bbox=[1, 2, 3, 10**400]), "whose bbox is not 4 finite numbers"),
    "polygon of a name": (
        lambda t: first(t, segmentation=[["a"] * 6]),
        "polygons are not lists of at least 3",
    ),
    "points of one number": (
        lambda t: first(t, segmentation=[[[1], [2], [3]]]),
        "polygons are not lists of at least 3",
    ),
    "box of NaN": (lambda t: first(t, bbox=[1, 2, 3, float("nan")]), "whose bbox is not 4 finite numbers"),
    "area of text": (lambda t: first(t, area="big"), "whose area is no finite number: 'big'"),
    "crowd of two": (lambda t: first(t, iscrowd=2), "whose iscrowd is neither 0 nor 1: 2"),
    "id of text": (lambda t: first(t, id=1.5), "an entry whose id is no whole number of 63 bits: 1.5"),
    "polygon of two": (
        lambda t: first(t, segmentation=[[1, 2, 3, 4]]),
        "polygons are not lists of at least 3",
    ),
    "run lengths short": (lambda t: first(t, segmentation=an_rle([50, 60], [5, 5])), "do not fill the image"),
    "run lengths turned": (
        lambda t: first(t, segmentation=an_rle([60, 50], [3000])),
        "for another size than",
    ),
    "run lengths below 0": (
        lambda t: first(t, segmentation=an_rle([50, 60], [-1])),
        "run lengths are not COCO's",
    ),
    "run lengths of what": (
        lambda t: first(t, segmentation=an_rle([50, 60], "é")),
        "run lengths are not COCO's",
    ),
    "image of no size": (lambda t: t["images"][-1].update(width=0), "an image without a size"),
    "entry of text": (lambda t: t["annotations"].append("dog"), "an entry that is no object: 'dog'"),
}


def num_objects(annotations: CocoAnnotations) -> int:
    return sum(map(len, annotations.objects.values()))


@pytest.mark.parametrize("name", BAD_ENTRIES)
def test_bad_annotations(name: str, tmp_path: Path) -> None:
    change, rule = BAD_ENTRIES[name]
    truth = made_truth(1)
    whole = read_annotations(write(tmp_path / "good.json", truth))
    change(truth)
    path = write(tmp_path / "bad.json", truth)
    with pytest.raises(
        UsageError, match=rf"^{path}: (annotations|images|categories)\[\d+\].* is .*{rule}.*skip"
    ):
        read_annotations(path, on_bad="refuse")
    skipped = read_annotations(path)
    assert sum(skipped.bad.counts.values()) == 1
    (line,) = skipped.bad.lines()
    assert line.startswith(f"{path}: left out 1: ")
    gone = 0 if name in ("doubled annotation", "doubled image", "doubled category", "entry of text") else 1
    if name == "image of no size":  # the last image, which has no object
        assert len(skipped.images) == len(whole.images) - 1
        gone = 0
    assert num_objects(skipped) == num_objects(whole) - gone


def square(x: float, y: float, side: float) -> list[float]:
    return [x, y, x + side, y, x + side, y + side, x, y + side]


def pairs(polygon: list[float]) -> list[list[float]]:
    return [list(point) for point in zip(polygon[::2], polygon[1::2], strict=True)]


FORMS_OF_TOOLS: dict[str, tuple[Change, Change]] = {
    "flat polygon": (
        lambda t: first(t, segmentation=square(3, 4, 9)),
        lambda t: first(t, segmentation=[square(3, 4, 9)]),
    ),
    "polygon of points": (
        lambda t: first(t, segmentation=pairs(square(3, 4, 9))),
        lambda t: first(t, segmentation=[square(3, 4, 9)]),
    ),
    "polygons of points": (
        lambda t: first(t, segmentation=[pairs(square(3, 4, 9)), square(1, 1, 2)]),
        lambda t: first(t, segmentation=[square(3, 4, 9), square(1, 1, 2)]),
    ),
    "contours of OpenCV": (
        lambda t: first(t, segmentation=[[[point] for point in pairs(square(3, 4, 9))], []]),
        lambda t: first(t, segmentation=[square(3, 4, 9)]),
    ),
    "one contour of OpenCV": (
        lambda t: first(t, segmentation=[[point] for point in pairs(square(3, 4, 9))]),
        lambda t: first(t, segmentation=[square(3, 4, 9)]),
    ),
    "numbers as texts": (
        lambda t: first(
            t, segmentation=[list(map(str, square(3, 4, 9)))], bbox=["3", "4.0", 9, 9], area="45"
        ),
        lambda t: first(t, segmentation=[square(3, 4, 9)], bbox=[3, 4, 9, 9], area=45),
    ),
    "run lengths as floats": (
        lambda t: first(t, segmentation={"size": [50.0, 60.0], "counts": [9.0, 3, 2988.0]}),
        lambda t: first(t, segmentation={"size": [50, 60], "counts": [9, 3, 2988]}),
    ),
    "NaN of pandas": (
        lambda t: first(t, area=math.nan, iscrowd=math.nan, segmentation=math.nan, bbox=[3, 4, 9, 5]),
        lambda t: first(t, area=45, iscrowd=0, segmentation=None, bbox=[3, 4, 9, 5]),
    ),
    "crowd as a word": (lambda t: first(t, iscrowd="True"), lambda t: first(t, iscrowd=1)),
    "empty polygon": (lambda t: first(t, segmentation=[[]]), lambda t: first(t, segmentation=None)),
    "no polygon": (lambda t: first(t, segmentation=[]), lambda t: first(t, segmentation=None)),
    "missing segmentation": (
        lambda t: t["annotations"][0].pop("segmentation"),
        lambda t: first(t, segmentation=None),
    ),
    "area null": (
        lambda t: first(t, area=None, bbox=[3, 4, 9, 5]),
        lambda t: first(t, area=45, bbox=[3, 4, 9, 5]),
    ),
    "crowd false": (lambda t: first(t, iscrowd=False), lambda t: first(t, iscrowd=0)),
    "crowd null": (lambda t: first(t, iscrowd=None), lambda t: first(t, iscrowd=0)),
    "crowd as text": (lambda t: first(t, iscrowd="1"), lambda t: first(t, iscrowd=1)),
    "category without a name": (
        lambda t: t["categories"][0].update(name=None),
        lambda t: t["categories"][0].update(name=str(t["categories"][0]["id"])),
    ),
    "box of its polygons": (
        lambda t: first(t, bbox=None, area=1, segmentation=[square(3, 4, 9), square(8, 2, 3)]),
        lambda t: first(t, bbox=[3, 2, 9, 11], area=1, segmentation=[square(3, 4, 9), square(8, 2, 3)]),
    ),
    "box of no area beside polygons": (
        lambda t: first(t, bbox=[0, 0, 0, 0], area=1, segmentation=[square(3, 4, 9)]),
        lambda t: first(t, bbox=[3, 4, 9, 9], area=1, segmentation=[square(3, 4, 9)]),
    ),
    "ids are texts": (
        lambda t: [
            one.update({k: str(one[k]) for k in ("id", "image_id", "category_id") if k in one})
            for key in ("images", "categories", "annotations")
            for one in t[key]
        ],
        lambda t: None,
    ),
    "ids are floats": (
        lambda t: [one.update(image_id=float(one["image_id"])) for one in t["annotations"]],
        lambda t: None,
    ),
    "LVIS": (
        lambda t: [one.update(coco_url=f"http://h/train2017/{one.pop('file_name')}") for one in t["images"]],
        lambda t: None,
    ),
}


@pytest.mark.parametrize("name", FORMS_OF_TOOLS)
def test_forms_that_annotation_tools_write(name: str, tmp_path: Path) -> None:
    trees = [made_truth(1), made_truth(1)]
    for change, tree in zip(FORMS_OF_TOOLS[name], trees, strict=True):
        change(tree)
    found, plain = (read_annotations(write(tmp_path / f"{n}.json", tree)) for n, tree in enumerate(trees))
    assert found.bad.counts == plain.bad.counts == {}
    assert (found.images, found.categories, found.objects) == (plain.images, plain.categories, plain.objects)


def test_annotations_without_ids_are_kept(tmp_path: Path) -> None:
    truth = made_truth(1)
    plain = read_annotations(write(tmp_path / "plain.json", truth))
    for number, one in enumerate(truth["annotations"]):
        one.pop("id") if number % 2 else one.update(id=None)
    found = read_annotations(write(tmp_path / "bare.json", truth))
    assert found.bad.counts == {}
    own = [one.id for some in found.objects.values() for one in some]
    assert len(set(own)) == len(own) == len(truth["annotations"]) and max(own) < 0
    for number, some in plain.objects.items():
        assert [one.box for one in found.objects[number]] == [one.box for one in some]


def test_ids_of_annotations_that_begin_again_with_each_image(tmp_path: Path) -> None:
    truth = made_truth(1)
    plain = read_annotations(write(tmp_path / "plain.json", truth))
    for one in truth["annotations"]:
        one["id"] = sum(other is one for other in truth["annotations"])
    found = read_annotations(write(tmp_path / "again.json", truth), on_bad="refuse")
    own = [one.id for some in found.objects.values() for one in some]
    assert found.bad.counts == {} and len(set(own)) == len(own) == len(truth["annotations"])
    for number, some in plain.objects.items():
        assert [one.box for one in found.objects[number]] == [one.box for one in some]


def a_box(box: list[float], polygon: list[float] | None = None) -> dict[str, Any]:
    return {"image_id": 1, "category_id": 3, "bbox": box, "segmentation": [polygon] if polygon else []}


def of_boxes(path: Path, objects: list[dict[str, Any]]) -> Path:
    image = {"id": 1, "file_name": "a.jpg", "width": 60, "height": 50}
    tree = {"images": [image], "categories": [{"id": 3, "name": "hen"}], "annotations": objects}
    return write(path, tree)


TWO_CORNERS = [a_box([1, 2, 9, 9]), a_box([2, 3, 40, 20]), a_box([30, 20, 50, 40])]


@pytest.mark.parametrize(
    "objects",
    [
        pytest.param(TWO_CORNERS, id="one ends outside"),
        pytest.param(
            [a_box([3, 4, 12, 13], square(3, 4, 9)), a_box([5, 5, 25, 25], square(5, 5, 20))], id="polygons"
        ),
    ],
)
def test_boxes_that_are_two_corners_are_refused(objects: list[dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"are two corners, but .*: write \[x0, y0, x1 - x0, y1 - y0\]"):
        read_annotations(of_boxes(tmp_path / "a.json", objects))


@pytest.mark.parametrize(
    "objects",
    [
        pytest.param([*TWO_CORNERS, a_box([9, 9, 5, 5])], id="one cannot be"),
        pytest.param([*TWO_CORNERS, a_box([3, 4, 9, 9], square(3, 4, 9))], id="one has a polygon"),
        pytest.param([a_box([1, 2, 9, 9])] * 4 + [a_box([30, 20, 50, 40])], id="few end outside"),
        pytest.param([a_box([1, 2, 9, 9]), a_box([2, 3, 40, 20])], id="none ends outside"),
    ],
)
def test_boxes_that_may_be_right_are_taken(objects: list[dict[str, Any]], tmp_path: Path) -> None:
    numbered = [one | {"id": number} for number, one in enumerate(objects)]
    assert num_objects(read_annotations(of_boxes(tmp_path / "a.json", numbered))) == len(objects)


def test_detections_that_are_two_corners_are_refused(tmp_path: Path) -> None:
    truth = read_annotations(of_boxes(tmp_path / "a.json", [a_box([1, 2, 9, 9]), a_box([9, 9, 5, 5])]))
    path = tmp_path / "results.json"
    path.write_text(json.dumps([one | {"score": 0.5} for one in TWO_CORNERS]))
    with pytest.raises(UsageError, match=r"results.json: boxes such as \[30.*\] in .* are two corners"):
        read_results([path], truth)


def test_images_whose_ids_are_words(tmp_path: Path) -> None:
    truth = made_truth(1)
    names = {one["id"]: f"scan-{one['id']:x}" for one in truth["images"]}
    plain = read_annotations(write(tmp_path / "plain.json", truth))
    for one in truth["images"]:
        one["id"] = names[one["id"]]
    for one in truth["annotations"]:
        one["image_id"] = names[one["image_id"]]
    found = read_annotations(write(tmp_path / "words.json", truth))
    assert found.bad.counts == {} and found.objects != plain.objects
    for number, name in names.items():
        image = found.image_of(name)
        assert image is not None and image.file_name == plain.images[number].file_name
        assert found.objects[image.id] == plain.objects[number]
    assert found.image_of("scan-none") is None and found.image_of(names) is None


def test_an_object_keeps_its_good_polygons(tmp_path: Path) -> None:
    truth = made_truth(1)
    first(truth, segmentation=[square(3, 4, 9), [128, 100], square(1, 1, 2)])
    found = read_annotations(write(tmp_path / "mixed.json", truth))
    first(truth, segmentation=[square(3, 4, 9), square(1, 1, 2)])
    assert found.objects == read_annotations(write(tmp_path / "good.json", truth)).objects
    assert found.bad.counts == {"a polygon of fewer than 3 points; its object has others": 1}


def test_annotations_without_ids_are_numbered(tmp_path: Path) -> None:
    truth = made_truth(1)
    whole = read_annotations(write(tmp_path / "whole.json", truth))
    for one in truth["annotations"]:
        del one["id"]
    found = read_annotations(write(tmp_path / "ids.json", truth))
    ids = [one.id for some in found.objects.values() for one in some]
    assert found.bad.counts == {} and len(set(ids)) == len(ids) == num_objects(whole)


def test_odd_boxes_can_be_kept(tmp_path: Path) -> None:
    truth = made_truth(1)
    first(truth, bbox=[70, 4, 0, 5])
    kept = read_annotations(write(tmp_path / "odd.json", truth), boxes="keep")
    assert num_objects(kept) == len(truth["annotations"])
    assert not kept.bad.counts


def test_annotations_as_they_are(tmp_path: Path) -> None:
    truth = made_truth(4)
    found = read_annotations(write(tmp_path / "truth.json", truth))
    assert list(found.images) == [image["id"] for image in truth["images"]]
    assert list(found.categories.items()) == [(3, "hen"), (7, "fox"), (8, "egg")]
    assert found.objects[truth["images"][-1]["id"]] == ()
    for image, objects in found.objects.items():
        wanted = [one for one in truth["annotations"] if one["image_id"] == image]
        assert [(o.id, o.category_id, list(o.box), o.is_crowd) for o in objects] == [
            (w["id"], w["category_id"], w["bbox"], bool(w["iscrowd"])) for w in wanted
        ]
        for one, want in zip(objects, wanted, strict=True):
            shape = one.segmentation
            assert isinstance(shape, tuple | dict)
            lists = [polygon.tolist() for polygon in shape] if isinstance(shape, tuple) else shape
            assert lists == want["segmentation"]


NOT_COCO = {
    "": "the file is empty",
    "  \n": "the file is empty",
    "hello": "begins with 'h'",
    "[]": "an array; that is the form of COCO results",
    "{}": "has no key 'images'",
    '{"images": [], "annotation": [], "categories": []}': "Did you mean 'annotation'",
    '{"images": [], "annotations": [], "categories": []}': "'images' is empty",
    '{"images": {}, "annotations": [], "categories": []}': "'images' is no array",
    '{"images": [], "images": []}': "the key 'images' is there twice",
    '{"infos_": [1 2]}': "line 1, character 14: is not JSON: ',' is expected",
    '{"info": [{"id": 1},\n {"id": ]}': "line 2, .*is not JSON: Expecting value",
    '{"images": [': "at its end: is not JSON",
    '{"images": []} x': "text follows after the end",
    "[[[" * 200_000: "nested too deeply",
}


@pytest.mark.parametrize("text", NOT_COCO, ids=range(len(NOT_COCO)))
def test_files_that_are_not_coco(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=NOT_COCO[text]) as caught:
        read_annotations(path)
    assert str(caught.value).startswith(str(path))


NOTHING_LEFT: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "categories without ids": (
        lambda t: [one.pop("id") for one in t["categories"]],
        r"no entry of 'categories' can be used; left out 3: entry whose id is no .* \(categories\[0\]: None",
    ),
    "categories that are words": (
        lambda t: t.update(categories=["cat", "dog"]),
        r"'categories' can be used; .*categories\[0\]: 'cat'; write an object with 'id', categories\[1\]\)",
    ),
    "no category": (lambda t: t.update(categories=[]), r"'categories' is empty; is it a file of COCO"),
    "polygons of named points": (
        lambda t: [one.update(segmentation=[[{"x": 1, "y": 1}] * 3]) for one in t["annotations"]],
        r"no annotation can be used; left out .* polygons are not .*; write \[\[x1, y1, ",
    ),
    "boxes with names": (
        lambda t: [one.update(bbox={"x": 1}) for one in t["annotations"]],
        r"no annotation can be used; left out .* \{'x': 1\}; write \[x, y, width, height\], annotations\[1\]",
    ),
    "other images": (
        lambda t: [one.update(image_id=10**6) for one in t["annotations"]],
        r"no annotation can be used; left out .* of an image that is not in the file: .*1000000",
    ),
    "images without names": (
        lambda t: [one.update(file_name=7) for one in t["images"]],
        r"no entry of 'images' can be used; left out .* without a file_name: .*images\[0\] \(id .*\): 7",
    ),
}


@pytest.mark.parametrize("name", NOTHING_LEFT)
def test_a_file_of_which_nothing_is_left_says_what_was_left_out(name: str, tmp_path: Path) -> None:
    change, words = NOTHING_LEFT[name]
    truth = made_truth(1)
    change(truth)
    with pytest.raises(UsageError, match=words):
        read_annotations(write(tmp_path / "a.json", truth))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_annotations(tmp_path / "none.json")
    (tmp_path / "latin.json").write_bytes(b'{"images": ["\xe9"]}')
    with pytest.raises(UsageError, match=r"latin.json: 0xe9, byte 14 of the file, is not UTF-8; .*iconv -f"):
        read_annotations(tmp_path / "latin.json")
    far = b'\xef\xbb\xbf{"images": [' + b" " * (5 << 20) + '"é'.encode() + b'\xe9"]}'
    (tmp_path / "latin.json").write_bytes(far)
    with pytest.raises(UsageError, match=rf"0xe9, byte {far.index(0xE9) + 1} of the file"):
        read_annotations(tmp_path / "latin.json")
    (tmp_path / "wide.json").write_bytes('{"images": []}'.encode("utf-16"))
    (tmp_path / "packed.json").write_bytes(gzip.compress(b'{"images": []}'))
    with pytest.raises(UsageError, match=r"packed.json: its content is compressed by gzip"):
        read_annotations(tmp_path / "packed.json")
    with pytest.raises(UsageError, match=r"wide.json: its content is UTF-16; convert it: iconv"):
        read_annotations(tmp_path / "wide.json")


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64])
def test_entries_do_not_depend_on_the_window(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {"a": [1234, -5.5e-30, "x,]", {"b": [1, {}]}], "n": 120, "é\n": [], "o": {"p": [7]}, "t": True}
    path = tmp_path / "x.json"
    path.write_text(json.dumps(tree, indent=1), encoding="utf-8")
    monkeypatch.setattr(json_stream, "_BLOCK_CHARS", block)
    assert list(top_level_entries(path)) == [
        ("a", 0, 1234),
        ("a", 1, -5.5e-30),
        ("a", 2, "x,]"),
        ("a", 3, {"b": [1, {}]}),
        ("n", None, 120),
        ("é\n", None, []),
        ("o", None, {"p": [7]}),
        ("t", None, True),
    ]
    path.write_text("[10, 20\n, 30]", encoding="utf-8")
    assert [value for _, _, value in top_level_entries(path)] == [10, 20, 30]


# ---- results --------------------------------------------------------------------------------------------

BAD_RESULTS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown image": ({"image_id": 5}, "a result for an image that is not in the ground truth: 5"),
    "unknown category": ({"category_id": 5}, "a result of a category that is not in the ground truth: 5"),
    "no score": ({"score": None}, "a result whose score is no finite number: None"),
    "endless score": ({"score": float("inf")}, "a result whose score is no finite number: inf"),
    "neither": ({"bbox": [], "segmentation": None}, "a result with neither bbox nor segmentation"),
    "box of less": ({"bbox": [1, 2, -3, 4]}, "a result whose bbox is not x, y, width, height"),
    "mask of another size": (
        {"segmentation": an_rle([9, 9], "P1")},
        "a result whose mask is for another size than the image's",
    ),
    "damaged mask": ({"segmentation": "abc"}, "a result whose segmentation is not COCO's: 'abc'"),
}


@pytest.mark.parametrize("name", BAD_RESULTS)
def test_bad_results(name: str, tmp_path: Path) -> None:
    values, rule = BAD_RESULTS[name]
    annotations, results = a_truth(tmp_path)
    results[3].update(values)
    path = write(tmp_path / "results.json", results)
    with pytest.raises(UsageError, match=rf"^{path}: \[3\] is {rule}"):
        read_results([path], annotations, on_bad="refuse")
    found = read_results([path], annotations, on_bad="skip")
    assert sum(found.bad[0].counts.values()) == 1
    kept = sum(len(one) for kinds in found.detections.values() for one in kinds.values())
    assert kept == 2 * len(results) - (1 if name.startswith(("box", "mask", "damaged")) else 2)


def a_truth(folder: Path) -> tuple[CocoAnnotations, list[dict[str, Any]]]:
    truth = made_truth(1)
    return read_annotations(write(folder / "truth.json", truth)), made_results(truth, 2)


def test_run_lengths_beyond_the_image(tmp_path: Path) -> None:
    annotations, results = a_truth(tmp_path)
    shape = results[0]["segmentation"]
    for counts in ("o" * 9, shape["counts"] + "000", [5000]):
        results[0]["segmentation"] = {**shape, "counts": counts}
        with pytest.raises(UsageError, match="segmentation is not COCO's"):
            read_results([write(tmp_path / "r.json", results)], annotations, on_bad="refuse")


def test_an_image_in_two_files(tmp_path: Path) -> None:
    annotations, results = a_truth(tmp_path)
    paths = [write(tmp_path / "a.json", results[:9]), write(tmp_path / "b.json", results[8:])]
    with pytest.raises(
        UsageError, match=r"b.json: .* of which another file holds results: image_id \d+, in "
    ):
        read_results(paths, annotations, on_bad="refuse")
    images = {one["image_id"] for one in results[:9]}
    found = read_results(paths, annotations, most_bad=1.0)
    assert sum(map(len, found.detections["bbox"].values())) == 9 + sum(
        one["image_id"] not in images for one in results[8:]
    )


def test_many_bad_results_are_a_wrong_file(tmp_path: Path) -> None:
    """The rule of all readers: 20 of them pass, 21 do not, unless that share is allowed."""
    annotations, results = a_truth(tmp_path)
    wrong = [{**results[0], "image_id": "none"}] * 21
    read_results([write(tmp_path / "a.json", results + wrong[1:])], annotations)
    path = write(tmp_path / "b.json", results + wrong)
    with pytest.raises(UsageError, match=r"21 of \d+ entries are invalid, .*--most-bad 0\."):
        read_results([path], annotations)
    assert read_results([path], annotations, most_bad=0.9).bad[0].total == 21


@pytest.mark.parametrize("what", ["annotations", "results"])
def test_boxes_as_fractions_of_the_image_are_refused(tmp_path: Path, what: str) -> None:
    annotations, results = a_truth(tmp_path)
    box = {"bbox": [0.25, 0.1, 0.5, 0.4], "segmentation": None}
    match = r"all boxes lie between 0 and 1, .*multiply x and width by the image's width"
    if what == "results":
        with pytest.raises(UsageError, match=match):
            read_results([write(tmp_path / "r.json", [{**one, **box} for one in results])], annotations)
    else:
        tree = json.loads((tmp_path / "truth.json").read_text())
        tree["annotations"] = [{**one, **box} for one in tree["annotations"]]
        with pytest.raises(UsageError, match=match):
            read_annotations(write(tmp_path / "t.json", tree))
        tree["annotations"][0]["bbox"] = [0, 0, 5, 5]  # others may be smaller than a pixel
        assert not read_annotations(write(tmp_path / "t.json", tree)).bad.total


def test_ids_above_int64_and_words_are_taken(tmp_path: Path) -> None:
    a_truth(tmp_path)
    tree = json.loads((tmp_path / "truth.json").read_text())
    num_objects = len(tree["annotations"])
    large = 1 << 70
    first = tree["images"][0]["id"]
    tree["images"][0]["id"] = large
    for number, one in enumerate(tree["annotations"]):
        one["image_id"] = large if one["image_id"] == first else one["image_id"]
        one["id"] = large + number if number % 2 else f"a{number}"
    read = read_annotations(write(tmp_path / "t.json", tree))
    assert not read.bad.total and sum(map(len, read.objects.values())) == num_objects
    assert all(abs(number) < 1 << 63 for number in read.images)
    assert all(abs(one.id) < 1 << 63 for some in read.objects.values() for one in some)
    image = read.image_of(large)
    assert image is not None and image == read.image_of(str(large))
    assert image.given_id == large and image.id < 0


def with_words(tree: dict[str, Any], words: dict[int, int | str]) -> dict[str, Any]:
    """Return the tree with other ids of categories, and the annotations before the categories."""
    tree = copy.deepcopy(tree)
    for one in tree["categories"]:
        one["id"] = words[one["id"]]
    for one in tree["annotations"]:
        one["category_id"] = words[one["category_id"]]
    return tree


def test_categories_whose_ids_are_words_are_numbered_by_the_alphabet(tmp_path: Path) -> None:
    truth = made_truth(1)
    words: dict[int, int | str] = {3: "hens", 7: "foxes", 8: "eggs"}
    numbers: dict[int, int | str] = {3: 3, 7: 2, 8: 1}
    plain = read_annotations(write(tmp_path / "plain.json", with_words(truth, numbers)), on_bad="refuse")
    tree = with_words(truth, words)
    turned = {**tree, "categories": tree["categories"][::-1]}
    for name, given in (("words.json", tree), ("turned.json", turned)):
        found = read_annotations(write(tmp_path / name, given), on_bad="refuse")
        assert found.categories == plain.categories == {1: "egg", 2: "fox", 3: "hen"}
        assert found.objects == plain.objects
        (line,) = found.remarks()
        assert line == (
            f"{tmp_path / name}: ids of categories are words, numbered by the alphabet, in results too: "
            "1 'eggs', 2 'foxes', 3 'hens'"
        )
    results = made_results(truth, 2)
    detections = []
    for values in (numbers, words):  # results have the words of the ground truth, or the numbers of a model
        changed = [{**one, "category_id": values[one["category_id"]]} for one in results]
        path = write(tmp_path / "results.json", changed)
        detections.append(read_results([path], found, on_bad="refuse").detections)
    assert detections[0] == detections[1]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda x, y: [x / 60, y / 50], id="fractions"),
        pytest.param(lambda x, y: [100 * x / 60, 100 * y / 50], id="shares"),
        pytest.param(lambda x, y: [y, x], id="y before x"),
    ],
)
def test_polygons_elsewhere_than_their_boxes_are_refused(
    change: Callable[[float, float], list[float]], tmp_path: Path
) -> None:
    corners = [(2, 30, 14, 8), (20, 3, 6, 18), (30, 22, 21, 10)]
    objects = []
    for x, y, w, h in corners:
        outline = ((x, y), (x + w, y), (x + w, y + h), (x, y + h))
        objects.append(a_box([x, y, w, h], [value for point in outline for value in change(*point)]))
    path = of_boxes(tmp_path / "a.json", objects)
    with pytest.raises(
        UsageError, match=r"are elsewhere than their boxes, here .*: write x before y, in pix"
    ):
        read_annotations(path)
    assert num_objects(read_annotations(path, boxes="keep")) == 3  # the official scorer reads either
    few = [*objects[:1], *(a_box([x, y, 9, 9], square(x, y, 9)) for x, y, _, _ in corners)]
    assert num_objects(read_annotations(of_boxes(path, [o | {"id": n} for n, o in enumerate(few)]))) == 4


def test_categories_of_one_name_are_told(tmp_path: Path) -> None:
    truth = made_truth(1)
    assert read_annotations(write(tmp_path / "a.json", truth)).remarks() == []
    for one, name in zip(truth["categories"], ("hen", "Hen ", "fox"), strict=True):
        one["name"] = name
    first, second = sorted(one["id"] for one in truth["categories"][:2])
    (line,) = read_annotations(write(tmp_path / "a.json", truth)).remarks()
    assert f"the categories {first}, {second} all have the name " in line
    assert line.endswith("if they are one, give their objects one category_id")


def test_words_beside_numbers_and_unknown_words(tmp_path: Path) -> None:
    truth = made_truth(1)
    tree = with_words(truth, {3: 3, 7: 1 << 70, 8: "eggs"})
    tree["annotations"][0]["category_id"] = "boat"
    found = read_annotations(write(tmp_path / "t.json", tree))
    assert found.categories == {3: "hen", 4: "fox", 5: "egg"}
    (line,) = found.bad.lines()
    assert line.endswith(
        "annotation of a category that is not in the file: 1 (annotations[0] (id 40): category_id 'boat')"
    )
    plain = read_annotations(write(tmp_path / "p.json", with_words(truth, {3: 3, 7: 4, 8: 5})))
    assert num_objects(found) == num_objects(plain) - 1
    tree["categories"].append({"id": "eggs", "name": "again"})
    assert read_annotations(write(tmp_path / "t.json", tree)).bad.counts == {
        "an annotation of a category that is not in the file": 1,
        "a category whose id another one has": 1,
    }


def test_results_that_are_annotations(tmp_path: Path) -> None:
    annotations, _ = a_truth(tmp_path)
    with pytest.raises(UsageError, match="is an object with the key 'info'; results of COCO are an array"):
        read_results([tmp_path / "truth.json"], annotations)


def test_written_results_are_read_again(tmp_path: Path) -> None:
    annotations, results = a_truth(tmp_path)
    write_results(tmp_path / "out.json", results)
    assert json.loads((tmp_path / "out.json").read_text()) == results
    assert read_results([tmp_path / "out.json"], annotations).detections.keys() == {"bbox", "segm"}


def test_command_tells_what_it_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, results = a_truth(tmp_path)
    results[0]["image_id"] = 5
    path, out = write(tmp_path / "results.json", results), tmp_path / "out.json"
    command = ["evaluate", "coco", "--annotations", str(tmp_path / "truth.json"), "--results", str(path)]
    app([*command, "--json", str(out)], result_action="return_value")
    printed = capsys.readouterr()
    assert (
        f"{path}: left out 1: result for an image that is not in the ground truth: 1 ([0]: 5)" in printed.err
    )
    assert printed.out.count(" = ") == 24
    tree = json.loads(out.read_text())
    assert tree["skipped"] == {str(path): {"a result for an image that is not in the ground truth": 1}}
    assert [one["name"] for one in tree["by_category"]] == ["hen", "fox", "egg"]
    with pytest.raises(UsageError, match="nothing can be used; left out 1: result for an image"):
        write(path, [{**results[0], "image_id": "none"}])
        app(command, result_action="return_value", exit_on_error=False)
    with pytest.raises(UsageError, match=r"\[0\] is a result for an image .*--on-bad skip"):
        app([*command, "--on-bad", "refuse"], result_action="return_value", exit_on_error=False)
    write(path, [])
    app(command, result_action="return_value")
    assert capsys.readouterr().out.count("= 0.000") == 24  # a model that detects nothing


def test_a_value_without_an_end_is_not_kept_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a zip a few bytes may stand for gigabytes."""
    monkeypatch.setattr(json_stream, "MAX_WHOLE_BYTES", 1 << 20)
    monkeypatch.setattr(json_stream, "_BLOCK_CHARS", 1 << 16)
    packed = tmp_path / "a.zip"
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("a.json", b'{"images": ["' + b"x" * (32 << 20))
        made.writestr("b.json", b'{"images": [' + b" " * (32 << 20) + b"1]}")
    for name in ("a.json", "b.json"):
        tracemalloc.start()
        try:
            entries = top_level_entries(zipfile.Path(packed, name))
            if name == "a.json":
                with pytest.raises(
                    UsageError, match=r"a\.json: has a value of more than 1,048,576 characters"
                ):
                    list(entries)
            else:
                assert list(entries) == [("images", 0, 1)]
            assert tracemalloc.get_traced_memory()[1] < 10 << 20, name
        finally:
            tracemalloc.stop()
