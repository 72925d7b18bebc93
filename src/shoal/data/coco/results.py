"""Reads and writes detections of a model in COCO's format: boxes and masks.

A file of results is an array of objects with image_id, category_id, score and bbox, segmentation, or both;
see https://cocodataset.org/#format-results.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shoal.atomic_io import write_atomically
from shoal.data.bad_entries import MOST_BAD, BadEntries, BadEntry, OnBad
from shoal.data.coco.annotations import (
    CocoAnnotations,
    CocoImage,
    Rle,
    check_corners,
    check_pixels,
    finite_numbers,
    is_far_outside,
    read_segmentation,
    shown,
)
from shoal.data.coco.masks import areas, as_compressed
from shoal.data.json_stream import top_level_entries
from shoal.errors import UsageError

Kind = Literal["bbox", "segm"]
KINDS: tuple[Kind, ...] = ("bbox", "segm")
_SHAPES = ("bbox", "segmentation")


@dataclass(frozen=True, slots=True)
class Detection:
    """One detected object."""

    category_id: int
    score: float
    shape: list[float] | Rle
    """Box: x, y, width, height in pixels; mask: compressed run lengths."""
    area: float
    """In square pixels."""


@dataclass(frozen=True, kw_only=True)
class CocoResults:
    """The valid entries of files of results."""

    detections: dict[Kind, dict[int, list[Detection]]] = field(default_factory=dict)
    """By kind and id of the image, in the order of the files; has only the kinds that occur."""
    bad: list[BadEntries] = field(default_factory=list)
    """Counts of what was skipped, per file."""


def read_results(
    paths: Sequence[Path],
    annotations: CocoAnnotations,
    *,
    on_bad: OnBad = "skip",
    most_bad: float = MOST_BAD,
) -> CocoResults:
    """Read files of results, those of several workers for example.

    An entry is bad if the ground truth has no such image or category, if a value is invalid, or if an earlier
    file has entries of the same kind for the image: two workers with the same image would count its objects
    twice.

    Args:
        on_bad: leave bad entries out and count them, or refuse a file at the first one.
        most_bad: see :class:`shoal.data.bad_entries.BadEntries`.

    Raises:
        UsageError: a file cannot be read, is not an array, has a bad entry, which is refused, or too many; or
            its boxes are fractions of their images, or corners.
    """
    reader = _Reader(annotations)
    for path in paths:
        reader.read(path, BadEntries(path, on_bad, most_bad))
    return reader.results


def write_results(path: Path, entries: Sequence[dict[str, Any]]) -> None:
    """Write results as COCO's JSON, one entry per line.

    Raises:
        ShoalError: the disk is full or the folder cannot be written.
    """
    lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries)
    write_atomically(path, f"[{lines}]\n".encode())


class _Reader:
    def __init__(self, annotations: CocoAnnotations) -> None:
        self._annotations = annotations
        self.results = CocoResults()
        self._owners: dict[tuple[Kind, int], Path] = {}
        self._num_good = 0
        """Shapes of the present file."""
        self._boxes: list[tuple[list[float], None, CocoImage]] = []
        """Those of the present file, with their images."""

    def read(self, path: Path, bad: BadEntries) -> None:
        self.results.bad.append(bad)
        self._num_good, self._boxes = 0, []
        for key, index, entry in top_level_entries(path):
            if key:
                raise UsageError(
                    f"{path}: is an object with the key {key!r}; results of COCO are an array of objects "
                    "with image_id, category_id, score and bbox or segmentation"
                )
            if index is not None:
                self._take(entry, path, f"[{index}]", bad)
        check_pixels(path, [box for box, _, _ in self._boxes])
        check_corners(path, self._boxes)
        bad.check(self._num_good)

    def _take(self, entry: Any, path: Path, location: str, bad: BadEntries) -> None:
        try:
            image, category, score = self._checked(entry)
        except BadEntry as error:
            return bad.add(error, location)
        for kind, name in zip(KINDS, _SHAPES, strict=True):
            if not entry.get(name):
                continue
            try:
                shape, area = _box(entry[name]) if kind == "bbox" else _mask(entry[name], image)
                if (owner := self._owners.setdefault((kind, image.id), path)) != path:
                    rule = "a result for an image of which another file holds results"
                    raise BadEntry(rule, f"image_id {image.id}, in {owner} too")
            except BadEntry as error:
                bad.add(error, location)
            else:
                of_kind = self.results.detections.setdefault(kind, {})
                of_kind.setdefault(image.id, []).append(Detection(category, score, shape, area))
                self._num_good += 1
                if not isinstance(shape, dict):
                    self._boxes.append((shape, None, image))
        return None

    def _checked(self, entry: Any) -> tuple[CocoImage, int, float]:
        """Return the image, the category and the score of an entry that has a shape."""
        if not isinstance(entry, dict):
            raise BadEntry("a result that is no object", shown(entry))
        known = self._annotations
        image = known.image_of(entry.get("image_id"))
        category = known.category_of(entry.get("category_id"))
        if image is None:
            rule = "a result for an image that is not in the ground truth"
            raise BadEntry(rule, shown(entry.get("image_id")))
        if category is None:
            rule = "a result of a category that is not in the ground truth"
            raise BadEntry(rule, shown(entry.get("category_id")))
        score = finite_numbers([entry.get("score")], 1)
        if score is None:
            raise BadEntry("a result whose score is no finite number", shown(entry.get("score")))
        # an empty bbox or segmentation counts as none, as in the official reader
        if not any(map(entry.get, _SHAPES)):
            raise BadEntry("a result with neither bbox nor segmentation", "")
        return image, category, score[0]


def _box(value: Any) -> tuple[list[float] | Rle, float]:
    box = finite_numbers(value, 4)
    if box is None or box[2] < 0 or box[3] < 0:
        raise BadEntry("a result whose bbox is not x, y, width, height", shown(value))
    return box, box[2] * box[3]


def _mask(value: Any, image: CocoImage) -> tuple[list[float] | Rle, float]:
    shape = read_segmentation(value)
    if isinstance(shape, dict) and shape["size"] != [image.height, image.width]:
        sizes = f"{shape['size']}, the image has {[image.height, image.width]}"
        raise BadEntry("a result whose mask is for another size than the image's", sizes)
    is_usable = shape is not None and not is_far_outside(shape, image)
    rle = as_compressed(shape, image.height, image.width) if shape is not None and is_usable else None
    if rle is None:
        raise BadEntry("a result whose segmentation is not COCO's", shown(value))
    return rle, areas([rle])[0]
