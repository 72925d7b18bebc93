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

from shoal.data.atomic_io import write_atomically
from shoal.data.coco.annotations import (
    CocoAnnotations,
    Rle,
    finite_numbers,
    polygon_arrays,
    run_lengths,
    shown,
)
from shoal.data.coco.bad_entries import BadEntries, OnBad
from shoal.data.coco.json_stream import top_level_entries
from shoal.data.coco.masks import areas, as_compressed
from shoal.errors import UsageError

Kind = Literal["bbox", "segm"]
KINDS: tuple[Kind, ...] = ("bbox", "segm")


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
    paths: Sequence[Path], annotations: CocoAnnotations, *, on_bad: OnBad = "refuse"
) -> CocoResults:
    """Read files of results, those of several workers for example.

    An entry is bad if the ground truth has no such image or category, if a value is invalid, or if an earlier
    file has entries of the same kind for the image: two workers with the same image would count its objects
    twice.

    Raises:
        UsageError: a file cannot be read, is not an array, or has a bad entry, which is refused; or no file
            holds a result that can be used while some are bad.
    """
    results = CocoResults()
    owners: dict[tuple[Kind, int], Path] = {}
    for path in paths:
        reader = _Reader(path, annotations, on_bad, results.detections, owners)
        reader.read()
        results.bad.append(reader.bad)
    return results


def write_results(path: Path, entries: Sequence[dict[str, Any]]) -> None:
    """Write results as COCO's JSON, one entry per line.

    Raises:
        ShoalError: the disk is full or the folder cannot be written.
    """
    lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries)
    write_atomically(path, f"[{lines}]\n".encode())


class _Reader:
    def __init__(
        self,
        path: Path,
        annotations: CocoAnnotations,
        on_bad: OnBad,
        out: dict[Kind, dict[int, list[Detection]]],
        owners: dict[tuple[Kind, int], Path],
    ) -> None:
        self._path = path
        self._annotations = annotations
        self.bad = BadEntries(path, on_bad)
        self._out = out
        self._owners = owners

    def read(self) -> None:
        for key, index, entry in top_level_entries(self._path):
            if key:
                raise UsageError(
                    f"{self._path}: is an object with the key {key!r}; results of COCO are an array of "
                    "objects with image_id, category_id, score and bbox or segmentation"
                )
            if index is not None:
                self._take(entry, f"[{index}]")

    def _take(self, entry: Any, place: str) -> None:
        if not isinstance(entry, dict):
            return self.bad.add("a result that is no object", place, shown(entry))
        image, category = entry.get("image_id"), entry.get("category_id")
        known = self._annotations
        if type(image) is not int or image not in known.images:
            return self.bad.add("a result for an image that is not in the ground truth", place, shown(image))
        if type(category) is not int or category not in known.categories:
            rule = "a result of a category that is not in the ground truth"
            return self.bad.add(rule, place, shown(category))
        score = finite_numbers([entry.get("score")], 1)
        if score is None:
            return self.bad.add("a result whose score is no finite number", place, shown(entry.get("score")))
        # an empty bbox or segmentation counts as none, as in the official reader
        present = [name for name in ("bbox", "segmentation") if entry.get(name)]
        if not present:
            return self.bad.add("a result with neither bbox nor segmentation", place)
        if "bbox" in present and (box := self._box(entry["bbox"], place)):
            self._keep("bbox", image, Detection(category, score[0], box, box[2] * box[3]), place)
        if "segmentation" in present and (rle := self._mask(entry["segmentation"], image, place)):
            self._keep("segm", image, Detection(category, score[0], rle, areas([rle])[0]), place)
        return None

    def _box(self, value: Any, place: str) -> list[float] | None:
        box = finite_numbers(value, 4)
        if box is None or box[2] < 0 or box[3] < 0:
            self.bad.add("a result whose bbox is not x, y, width, height", place, shown(value))
            return None
        return box

    def _mask(self, value: Any, image_id: int, place: str) -> Rle | None:
        image = self._annotations.images[image_id]
        shape = run_lengths(value) if isinstance(value, dict) else polygon_arrays(value)
        if isinstance(shape, dict) and shape["size"] != [image.height, image.width]:
            what = f"{shape['size']}, the image has {[image.height, image.width]}"
            self.bad.add("a result whose mask is for another size than the image's", place, what)
            return None
        rle = None if shape is None else as_compressed(shape, image.height, image.width)
        if rle is None:
            self.bad.add("a result whose segmentation is not COCO's", place, shown(value))
        return rle

    def _keep(self, kind: Kind, image: int, found: Detection, place: str) -> None:
        owner = self._owners.setdefault((kind, image), self._path)
        if owner != self._path:
            rule = "a result for an image of which another file holds results"
            self.bad.add(rule, place, f"image_id {image}, in {owner} too")
        else:
            self._out.setdefault(kind, {}).setdefault(image, []).append(found)
