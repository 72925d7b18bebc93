"""Restores the ground truth of COCO from the annotations in prepared shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shoal.data.coco.annotations import CocoAnnotations, CocoImage, CocoObject, polygon_arrays, run_lengths
from shoal.data.coco.bad_entries import BadEntries
from shoal.data.images.shards import ImageShards
from shoal.errors import ShoalError
from shoal.json_text import parse_json


def prepared_truth(
    shards: ImageShards, categories: Mapping[int, str], numbers: Iterable[int]
) -> CocoAnnotations:
    """Return the annotations of the images ``numbers`` of ``shards``, to score detections against.

    Raises:
        ShoalError: the annotations of an image are invalid.
    """
    path = Path(str(shards.location))
    images: dict[int, CocoImage] = {}
    objects: dict[int, tuple[CocoObject, ...]] = {}
    for number in numbers:
        tree = parse_json(
            bytes(shards.extra(number)),
            f"{shards.name(number)}: its annotations",
            remedy="prepare the images again",
        )
        try:
            image = CocoImage(int(tree["image_id"]), "", int(tree["width"]), int(tree["height"]))
            found = tuple(map(_object, tree["annotations"]))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise ShoalError(
                f"{shards.name(number)}: its annotations cannot be read ({error}); prepare the images again"
            ) from None
        images[image.id] = image
        objects[image.id] = found
    return CocoAnnotations(
        path=path,
        images=images,
        categories={number: categories[number] for number in sorted(categories)},
        objects=objects,
        bad=BadEntries(path, "refuse"),
    )


def _object(tree: Mapping[str, Any]) -> CocoObject:
    box, shape = tree["bbox"], tree["segmentation"]
    x, y, width, height = map(float, box)
    return CocoObject(
        id=int(tree["id"]),
        category_id=int(tree["category_id"]),
        box=(x, y, width, height),
        area=float(tree["area"]),
        is_crowd=bool(tree["iscrowd"]),
        segmentation=run_lengths(shape) if isinstance(shape, dict) else polygon_arrays(shape),
    )
