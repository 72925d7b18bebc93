"""Computes average precision and recall by COCO's official rules, in parallel over images.

A worker measures the overlaps of its own images (:func:`overlaps_of`), which is expensive and needs the
masks. It sends scores, areas and overlaps, which are small, to one worker that matches and averages
(:func:`summarise`). Images are sorted by id and the detections of an image come from one worker in its order,
so equal scores keep their order, and the figures do not depend on the number of workers.

Matching and averaging are faster-coco-eval's compiled functions with the rules of pycocotools: IoU thresholds
.50, .55, …, .95, 101 recall points, at most 1, 10 or 100 detections of a category in an image.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from shoal.atomic_io import write_json
from shoal.data.bad_entries import MOST_BAD, OnBad
from shoal.data.coco.annotations import CocoAnnotations, CocoObject, read_annotations
from shoal.data.coco.masks import as_compressed, evaluation_library, mask_library
from shoal.data.coco.results import KINDS, CocoResults, Detection, Kind, read_results
from shoal.errors import UsageError

MAX_DETECTIONS = (1, 10, 100)
"""Per category and image, those with the highest scores."""

NAMES = ("AP", "AP50", "AP75", "APsmall", "APmedium", "APlarge") + (
    ("AR1", "AR10", "AR100", "ARsmall", "ARmedium", "ARlarge")
)
"""Names of the twelve figures in the official order."""

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
_Entry = TypeVar("_Entry", CocoObject, Detection)


@dataclass(frozen=True, kw_only=True)
class Overlaps:
    """Overlaps that one worker measured on its images, as flat arrays that any transport can send."""

    images: Int64Array
    """Image id of each detection, ``[N]``; detections of an image and category are adjacent, the highest
    score first, at most 100."""
    categories: Int64Array
    """Category id of each detection, ``[N]``."""
    scores: Float64Array
    """``[N]``."""
    areas: Float64Array
    """In square pixels, ``[N]``."""
    values: Float64Array
    """Overlaps of each detection with each object of its image and category, in the order of the annotations,
    concatenated."""


def overlaps_of(
    annotations: CocoAnnotations, detections: Mapping[int, Sequence[Detection]], kind: Kind
) -> Overlaps:
    """Measure the overlaps of detections with the objects of the same image and category.

    Args:
        detections: of this worker's images, by the id of the image.

    Raises:
        UsageError: masks are scored, and an object has none or a damaged one.
    """
    iou = mask_library().iou
    rows: list[tuple[int, int, float, float]] = []
    values: list[Float64Array] = [np.zeros(0)]
    for image in sorted(detections):
        objects = _by_category(annotations.objects[image])
        for category, detected in sorted(_by_category(detections[image]).items()):
            best = sorted(detected, key=lambda one: -one.score)[: MAX_DETECTIONS[-1]]
            rows += [(image, category, one.score, one.area) for one in best]
            if truth := objects.get(category):
                shapes = [_shape(annotations, image, one, kind) for one in truth]
                crowds = [int(one.is_crowd) for one in truth]
                values.append(np.asarray(iou([one.shape for one in best], shapes, crowds)).reshape(-1))
    columns = list(zip(*rows, strict=True)) or [(), (), (), ()]
    return Overlaps(
        images=np.array(columns[0], dtype=np.int64),
        categories=np.array(columns[1], dtype=np.int64),
        scores=np.array(columns[2], dtype=np.float64),
        areas=np.array(columns[3], dtype=np.float64),
        values=np.concatenate(values),
    )


@dataclass(frozen=True, kw_only=True)
class CocoScore:
    """The official figures for boxes or for masks."""

    kind: Kind
    figures: Mapping[str, float]
    """By :data:`NAMES`; -1 if the ground truth has no such object."""
    by_category: Mapping[int, float]
    """AP of each category that has objects, by its id."""

    def table(self) -> str:
        """Return the lines that pycocotools prints."""
        lines = []
        for name, value in zip(NAMES, self.figures.values(), strict=True):
            title = "Average Precision  (AP)" if name.startswith("AP") else "Average Recall     (AR)"
            rest = name[2:]
            iou = f"0.{rest}" if name in ("AP50", "AP75") else "0.50:0.95"
            size = rest if rest in ("small", "medium", "large") else "all"
            most = int(rest) if name.startswith("AR") and rest.isdigit() else MAX_DETECTIONS[-1]
            lines.append(f" {title} @[ IoU={iou:<9} | area={size:>6s} | maxDets={most:>3d} ] = {value:0.3f}")
        return "\n".join(lines)


def summarise(annotations: CocoAnnotations, parts: Iterable[Overlaps], kind: Kind) -> CocoScore:
    """Match detections and average the figures over all images of the ground truth.

    Raises:
        UsageError: an image is in two parts.
    """
    library, params_class = evaluation_library()
    params = params_class(iouType=kind)
    params.imgIds, params.catIds = sorted(annotations.images), list(annotations.categories)
    truth, detections = library.Dataset(), library.Dataset()
    number = 0
    for image in params.imgIds:
        for one in annotations.objects[image]:
            # numbered from 1: the library, like pycocotools, takes the id 0 for no match
            number += 1
            crowd = int(one.is_crowd)
            entry = {"id": number, "area": one.area, "iscrowd": crowd, "ignore": crowd}
            truth.append(image, one.category_id, entry)
    blocks: dict[tuple[int, int], Any] = {}
    for image, category, entries, block in _groups(annotations, parts):
        for entry in entries:
            detections.append(image, category, entry)
        blocks[image, category] = block
    overlaps = [[blocks.get((image, category), []) for category in params.catIds] for image in params.imgIds]
    sums = library.COCOevalEvaluateAccumulate(
        params, overlaps, truth, detections, params.imgIds, params.catIds, True
    )
    shape = [len(params.iouThrs), len(params.recThrs), len(params.catIds), 4, len(MAX_DETECTIONS)]
    precision = np.asarray(sums["precision"]).reshape(shape)
    recall = np.asarray(sums["recall"]).reshape(shape[0], *shape[2:])
    by_category = {
        category: _mean(precision[:, :, column, 0, -1]) for column, category in enumerate(params.catIds)
    }
    return CocoScore(
        kind=kind,
        figures=dict(zip(NAMES, _figures(precision, recall), strict=True)),
        by_category={category: value for category, value in by_category.items() if value > -1},
    )


def _groups(
    annotations: CocoAnnotations, parts: Iterable[Overlaps]
) -> Iterator[tuple[int, int, list[dict[str, Any]], Any]]:
    """Yield the detections of each image and category with their overlaps ``[detections, objects]``."""
    owners: dict[int, int] = {}
    number = 0
    for worker, part in enumerate(parts):
        starts = np.flatnonzero(np.diff(part.images, prepend=-1) | np.diff(part.categories, prepend=-1))
        at = 0
        for begin, end in pairwise([*starts, len(part.images)]):
            image, category = int(part.images[begin]), int(part.categories[begin])
            if owners.setdefault(image, worker) != worker:
                raise UsageError(
                    f"image {image} was evaluated by workers {owners[image]} and {worker}; its objects would "
                    "count twice: give each image to one worker"
                )
            num_objects = sum(one.category_id == category for one in annotations.objects[image])
            entries = []
            for score, area in zip(part.scores[begin:end], part.areas[begin:end], strict=True):
                number += 1
                entries.append({"id": number, "score": float(score), "area": float(area), "iscrowd": 0})
            size = int(end - begin) * num_objects
            block: Any = part.values[at : at + size].reshape(-1, num_objects) if num_objects else []
            at += size
            yield image, category, entries, block


def _figures(precision: Float64Array, recall: Float64Array) -> list[float]:
    """Return the twelve means: of precision ``[T, R, K, A, M]`` and of recall ``[T, K, A, M]``."""
    averages = [_mean(precision[:, :, :, 0, -1])]
    averages += [_mean(precision[threshold, :, :, 0, -1]) for threshold in (0, 5)]  # .50 and .75
    averages += [_mean(precision[:, :, :, size, -1]) for size in (1, 2, 3)]
    averages += [_mean(recall[:, :, 0, most]) for most in range(len(MAX_DETECTIONS))]
    return averages + [_mean(recall[:, :, size, -1]) for size in (1, 2, 3)]


def _mean(values: Float64Array) -> float:
    valid = values[values > -1]
    return float(np.mean(valid)) if valid.size else -1.0


def _by_category(entries: Sequence[_Entry]) -> dict[int, list[_Entry]]:
    groups: dict[int, list[_Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.category_id, []).append(entry)
    return groups


def _shape(annotations: CocoAnnotations, image_id: int, one: CocoObject, kind: Kind) -> Any:
    if kind == "bbox":
        return list(one.box)
    image = annotations.images[image_id]
    rle = as_compressed(one.segmentation, image.height, image.width) if one.segmentation else None
    if rle is None:
        state = "a damaged" if one.segmentation else "no"
        raise UsageError(
            f"{annotations.path}: annotation {one.id} has {state} segmentation, so masks cannot be scored; "
            "score boxes only, or correct the file"
        )
    return rle


_WORDS: dict[Kind, str] = {"bbox": "boxes", "segm": "masks"}


def evaluate(
    annotations: Path,
    results: Sequence[Path],
    *,
    on_bad: OnBad = "skip",
    most_bad: float = MOST_BAD,
    out: Path | None = None,
) -> str:
    """Return the official tables of boxes, of masks or of both, over all images of the annotations.

    What was skipped is printed on stderr, one line per rule.

    Raises:
        UsageError: a file is not what it should be, or the files do not belong together.
        ShoalError: faster-coco-eval is not installed, or ``out`` cannot be written.
    """
    truth = read_annotations(annotations, on_bad=on_bad, most_bad=most_bad, boxes="keep")
    detected = read_results(results, truth, on_bad=on_bad, most_bad=most_bad)
    bad = [truth.bad, *detected.bad]
    for line in (*truth.remarks(), *(line for entries in bad for line in entries.lines())):
        print(f"shoal: {line}", file=sys.stderr)
    # nothing detected: 0
    kinds = detected.detections.keys() or {"bbox", *(["segm"] if truth.has_masks else [])}
    scores = [score_results(truth, detected, kind) for kind in KINDS if kind in kinds]
    if out is not None:
        tree = as_tree(truth, scores)
        tree["skipped"] = {str(entries.source): entries.counts for entries in bad if entries.counts}
        write_json(out, tree)
    return "\n\n".join(f"{_WORDS[score.kind]} ({score.kind})\n{score.table()}" for score in scores)


def score_results(truth: CocoAnnotations, detected: CocoResults, kind: Kind) -> CocoScore:
    """Compute the figures of one kind in this process."""
    return summarise(truth, [overlaps_of(truth, detected.detections.get(kind, {}), kind)], kind)


def as_tree(truth: CocoAnnotations, scores: Sequence[CocoScore]) -> dict[str, Any]:
    """Return the figures of boxes and masks in full precision, and by category, as a JSON value."""
    tree: dict[str, Any] = {score.kind: dict(score.figures) for score in scores}
    tree["by_category"] = [
        {
            "id": number,
            "name": name,
            "AP": {score.kind: score.by_category[number] for score in scores if number in score.by_category},
        }
        for number, name in truth.categories.items()
    ]
    return tree
