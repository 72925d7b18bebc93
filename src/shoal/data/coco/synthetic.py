"""Draws images with several objects: coloured shapes on noise, with exact masks in COCO's form.

A category is a shape, in any colour. A later object may cover an earlier one; the mask of an object is its
visible part, and its box the smallest one around the mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shoal.data.coco.annotations import CocoImage, CocoObject
from shoal.data.coco.masks import areas, boxes, encoded
from shoal.data.coco.source import as_json, write_categories
from shoal.data.images.manifest import ImageManifest
from shoal.data.images.synthetic import COLOURS, SHAPES, DrawnImage, covered, encode_drawn, write_drawn
from shoal.errors import UsageError

NUM_CATEGORIES = len(SHAPES)
_MOST_OBJECTS = 4
_LEAST_SEEN = 0.4
"""Least visible fraction of its area; an object of which less is visible is left out."""


@dataclass(frozen=True)
class Scene:
    """An image and its objects."""

    pixels: npt.NDArray[np.uint8]
    """``[height, width, 3]``."""
    shapes: list[int]
    """Index of each object in :data:`~shoal.data.images.synthetic.SHAPES`."""
    masks: npt.NDArray[np.bool_]
    """The visible part of each, ``[N, height, width]``."""


def draw_scene(size: int, rng: np.random.Generator) -> Scene:
    """Return a wide or a tall image whose longer side has ``size`` pixels, with 1 to 4 objects."""
    height, width = (size, size * 3 // 4)[:: 1 if rng.random() < 0.5 else -1]
    rows, columns = np.mgrid[:height, :width].astype(np.float64)
    colour = rng.uniform(0.2, 0.7, 3) + rng.normal(0.0, 0.05, (height, width, 3))
    shapes: list[int] = []
    owner = np.full((height, width), -1)
    painted = []
    for number in range(int(rng.integers(1, _MOST_OBJECTS + 1))):
        shapes.append(int(rng.integers(NUM_CATEGORIES)))
        radius = size * rng.uniform(0.1, 0.25)
        x, y = rng.uniform(0.15, 0.85) * width, rng.uniform(0.15, 0.85) * height
        inside = covered(SHAPES[shapes[-1]], (columns - x) / radius, (rows - y) / radius)
        paint = np.array(list(COLOURS.values())[rng.integers(len(COLOURS))]) * rng.uniform(0.7, 1.0)
        colour = np.where(inside[..., None], paint + rng.normal(0.0, 0.04, (height, width, 3)), colour)
        owner[inside] = number
        painted.append(int(inside.sum()))
    masks = owner == np.arange(len(shapes))[:, None, None]
    seen = [n for n, area in enumerate(painted) if masks[n].sum() > _LEAST_SEEN * area]
    pixels = (colour.clip(0, 1) * 255).round().astype(np.uint8)
    return Scene(pixels=pixels, shapes=[shapes[n] for n in seen], masks=masks[seen])


def make_coco(out: Path, *, num_train: int, num_validation: int, size: int, seed: int = 0) -> ImageManifest:
    """Draw scenes into the shards of ``out``; return the manifest if the same call has done so before.

    Args:
        out: directory of the shards and of the categories.
        num_train: images of the split "train".
        num_validation: images of the split "validation".
        size: longer side in pixels.
        seed: other seeds draw other images.

    Raises:
        UsageError: a number is out of its range; ``out`` holds something else.
        ShoalError: Pillow or faster-coco-eval is not installed; a file cannot be written.
    """
    counts = (num_train, num_validation)
    if min(counts) < 1 or size < 32:
        raise UsageError(
            f"num_train={num_train} and num_validation={num_validation} must be at least 1 image, and "
            f"size={size} at least 32 pixels"
        )

    def draw(split: int) -> list[DrawnImage]:
        images, num_objects = [], 0
        for number in range(counts[split]):
            scene = draw_scene(size, np.random.default_rng([seed, split, number]))
            height, width, _ = scene.pixels.shape
            image = CocoImage(number + 1, f"{number:06d}.jpg", width, height)
            text = as_json(image, _objects(scene, num_objects + 1))
            num_objects += len(scene.shapes)
            images.append(encode_drawn(f"{number:06d}", scene.pixels, annotations=text.encode()))
        return images

    description = f"made scenes: {num_train} + {num_validation} of {size} pixels, seed {seed}"
    manifest = write_drawn(out, description, (), draw)
    write_categories(out, dict(enumerate(SHAPES, 1)))
    return manifest


def _objects(scene: Scene, first_id: int) -> tuple[CocoObject, ...]:
    """Return the objects of a scene, numbered from ``first_id``."""
    rles = encoded(scene.masks.astype(np.uint8))
    measured = zip(scene.shapes, boxes(rles).tolist(), areas(rles), rles, strict=True)
    return tuple(
        CocoObject(number, shape + 1, (x, y, width, height), area, is_crowd=False, segmentation=rle)
        for number, (shape, (x, y, width, height), area, rle) in enumerate(measured, first_id)
    )
