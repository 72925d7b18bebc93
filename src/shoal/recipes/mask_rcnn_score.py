"""Finds objects in held-out images with all workers and scores them by COCO's official rules."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from shoal.data.coco.annotations import CocoAnnotations
from shoal.data.coco.masks import areas, encoded
from shoal.data.coco.reader import DetectionReader
from shoal.data.coco.results import KINDS, Detection, Kind
from shoal.data.coco.score import CocoScore, Overlaps, overlaps_of, summarise
from shoal.data.coco.source import prepared_truth
from shoal.data.loader import Batch
from shoal.json_text import parse_json
from shoal.models.detection.mask_rcnn import Detections, MaskRCNN
from shoal.recipes.images import like_weights, shared_batches
from shoal.train.gradients import Precision
from shoal.train.world import World, gather_arrays, infer

NAMES: dict[Kind, str] = {"bbox": "box", "segm": "mask"}
_RECORDED = ("AP", "AP50", "AP75")

Found = dict[Kind, dict[int, list[Detection]]]
"""Objects by kind and id of the image."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Objects that were found; on the main worker their scores, too."""

    found: Found
    """This worker's part."""
    truth: CocoAnnotations | None = None
    scores: list[CocoScore] = field(default_factory=list)
    """Of boxes and of masks."""


def evaluate(
    model: MaskRCNN,
    reader: DetectionReader,
    world: World,
    precision: Precision,
    *,
    batch_size: int,
) -> Scored:
    """Find objects in all images of ``reader`` and score them; all workers call it.

    The images are cut into the same batches however many workers share them, and an image belongs to one of
    them, so the figures are the same to the last digit. A batch has images of similar aspect, with little
    padding, as in training.

    Raises:
        UsageError: an object of the ground truth has no mask.
        ShoalError: an image or its annotations cannot be read.
    """

    def detect(batch: Batch) -> tuple[Detections, Batch]:
        images = like_weights(batch["images"], model)
        with precision.autocast():
            return model.detect(images, batch["sizes"].to(world.device, non_blocking=True)), batch

    found: Found = {kind: {} for kind in KINDS}
    numbers: list[int] = []
    was_training = model.training
    model.eval()
    width, height = reader.shards.sizes.T
    by_aspect = np.argsort(width / height, kind="stable")
    batches = shared_batches(reader, world, batch_size, indices=by_aspect)
    for detections, batch in infer(detect, batches, world.device):
        add_found(found, detections, batch, list(reader.categories))
        numbers += batch["index"].tolist()
    model.train(was_training)
    truth = prepared_truth(
        reader.shards, reader.categories, range(reader.num_examples) if world.is_main else numbers
    )
    scores = [score_across_workers(world, truth, found[kind], kind) for kind in KINDS]
    there = [score for score in scores if score]
    return Scored(found=found, truth=truth if there else None, scores=there)


def score_across_workers(
    world: World, annotations: CocoAnnotations, detections: Mapping[int, Sequence[Detection]], kind: Kind
) -> CocoScore | None:
    """Return the figures on the main worker, ``None`` on the others; to the last digit those of one worker.

    Masks are not sent: each worker measures the overlaps of its own, and the main worker sums up scores,
    areas and overlaps, some 50 bytes per detection.

    Args:
        detections: objects that this worker found, by id of the image. An image belongs to one worker.

    Raises:
        UsageError: two workers bring detections of the same image (on the main one); see
            :func:`~shoal.data.coco.score.overlaps_of` too.
    """
    own = overlaps_of(annotations, detections, kind)
    columns = {field.name: gather_arrays(world, getattr(own, field.name)) for field in fields(Overlaps)}
    parts = [
        Overlaps(**{name: column[rank] for name, column in columns.items() if column is not None})
        for rank in range(world.num_workers)
        if world.is_main
    ]
    return summarise(annotations, parts, kind) if world.is_main else None


def recorded(scores: Sequence[CocoScore]) -> dict[str, float]:
    """Return the figures for the record, without those that have no object to find."""
    figures = {f"{NAMES[one.kind]}_{name}": one.figures[name] for one in scores for name in _RECORDED}
    return {name: value for name, value in figures.items() if value >= 0}


def add_found(found: Found, detections: Detections, batch: Batch, categories: Sequence[int]) -> None:
    """Add the detections of a batch, in the images' own sizes.

    Args:
        found: by kind and id of the image; both kinds in the same order.
        detections: of the batch.
        batch: its ``sizes``, ``original_size`` and ``image_id``, as of ``DetectionReader.batch``.
        categories: their ids in the order of the labels.
    """
    sizes = batch["original_size"]
    boxes = detections.scaled(batch["sizes"], sizes)
    bitmaps = detections.bitmaps(boxes, [(int(height), int(width)) for height, width in sizes])
    labels, scores, corners = detections.labels.tolist(), detections.scores.tolist(), boxes.tolist()
    first = 0
    for image, count, masks in zip(batch["image_id"].tolist(), detections.counts, bitmaps, strict=True):
        part = slice(first, first + count)
        names = [categories[label - 1] for label in labels[part]]
        shapes = [[x1, y1, x2 - x1, y2 - y1] for x1, y1, x2, y2 in corners[part]]
        found["bbox"][image] = [
            Detection(name, score, box, box[2] * box[3])
            for name, score, box in zip(names, scores[part], shapes, strict=True)
        ]
        rles = encoded(masks.cpu().numpy().astype(np.uint8))
        found["segm"][image] = [
            Detection(name, score, rle, area)
            for name, score, rle, area in zip(names, scores[part], rles, areas(rles), strict=True)
        ]
        first += count


def results_of(found: Mapping[Kind, Mapping[int, Sequence[Detection]]], image: int) -> list[dict[str, Any]]:
    """Return the objects of an image as in COCO's results."""
    return [
        {"category_id": box.category_id, "score": box.score, "bbox": box.shape, "segmentation": mask.shape}
        for box, mask in zip(found["bbox"][image], found["segm"][image], strict=True)
    ]


def gather_results(world: World, found: Mapping[Kind, Mapping[int, Sequence[Detection]]]) -> list[Any] | None:
    """Return COCO's results of all workers by image id on the main worker, ``None`` on the others."""
    own = [{"image_id": image, **result} for image in found["bbox"] for result in results_of(found, image)]
    parts = gather_arrays(world, np.frombuffer(json.dumps(own).encode(), dtype=np.uint8))
    if not world.is_main or parts is None:
        return None
    entries = [
        entry
        for rank, part in enumerate(parts)
        for entry in parse_json(part.tobytes(), f"the detections of worker {rank}")
    ]
    return sorted(entries, key=lambda entry: int(entry["image_id"]))
