"""Made images with several objects: coloured shapes on noise, their exact masks, in COCO's form.

A category is a shape, in any colour. A later object may lie on an earlier one; the mask of an object is what
can be seen of it, its box the smallest around that.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.data.atomic_io import write_atomically
from shoal.data.coco.masks import encoded
from shoal.data.coco.source import CocoSource, CocoSplit, prepare_coco
from shoal.data.images.manifest import ImageManifest
from shoal.data.images.prepare import ImagePrepareConfig
from shoal.data.images.reencode import check_pillow
from shoal.data.images.synthetic import COLOURS, SHAPES, covered
from shoal.errors import UsageError

NUM_CATEGORIES = len(SHAPES)
_MOST_OBJECTS = 4
_LEAST_SEEN = 0.4
"""An object of which less of its area can be seen is not there."""


@dataclass(frozen=True)
class Scene:
    """An image and its objects."""

    pixels: npt.NDArray[np.uint8]
    """``[height, width, 3]``."""
    shapes: list[int]
    """Of each object, its place in :data:`~shoal.data.images.synthetic.SHAPES`."""
    masks: npt.NDArray[np.bool_]
    """What can be seen of each, ``[N, height, width]``."""


def draw_scene(size: int, rng: np.random.Generator) -> Scene:
    """Return a wide or a tall image whose longer side has ``size`` pixels, with 1 to 4 objects."""
    height, width = (size, size * 3 // 4)[:: 1 if rng.random() < 0.5 else -1]
    rows, columns = np.mgrid[:height, :width].astype(np.float64)
    colour = rng.uniform(0.2, 0.7, 3) + rng.normal(0.0, 0.05, (height, width, 3))
    shapes: list[int] = []
    owner = np.full((height, width), -1)
    areas = []
    for number in range(int(rng.integers(1, _MOST_OBJECTS + 1))):
        shapes.append(int(rng.integers(NUM_CATEGORIES)))
        radius = size * rng.uniform(0.1, 0.25)
        x, y = rng.uniform(0.15, 0.85) * width, rng.uniform(0.15, 0.85) * height
        inside = covered(SHAPES[shapes[-1]], (columns - x) / radius, (rows - y) / radius)
        paint = np.array(list(COLOURS.values())[rng.integers(len(COLOURS))]) * rng.uniform(0.7, 1.0)
        colour = np.where(inside[..., None], paint + rng.normal(0.0, 0.04, (height, width, 3)), colour)
        owner[inside] = number
        areas.append(int(inside.sum()))
    masks = owner == np.arange(len(shapes))[:, None, None]
    seen = [n for n, area in enumerate(areas) if masks[n].sum() > _LEAST_SEEN * area]
    pixels = (colour.clip(0, 1) * 255).round().astype(np.uint8)
    return Scene(pixels=pixels, shapes=[shapes[n] for n in seen], masks=masks[seen])


def make_coco(
    out: Path, *, num_train: int, num_validation: int, size: int, seed: int = 0, processes: int = 0
) -> ImageManifest:
    """Make images and prepare them into ``out``; what an interrupted call left is continued.

    Args:
        out: directory of the shards; ``out``'s name with ``-made`` holds the images meanwhile.
        num_train: images of the split "train".
        num_validation: images of the split "validation".
        size: longer side in pixels.
        seed: other seeds make other images.
        processes: worker processes; 0 takes one a core.

    Raises:
        UsageError: a number is out of its range; ``out`` holds something else.
        ShoalError: Pillow or faster-coco-eval is not installed; a file cannot be written.
    """
    if min(num_train, num_validation) < 1 or size < 32:
        raise UsageError(
            f"num_train={num_train} and num_validation={num_validation} must be at least 1 image, and "
            f"size={size} at least 32 pixels"
        )
    raw = out.with_name(f"{out.name}-made")
    train, validation = (
        _write_split(raw / split, count, size, [seed, number])
        for number, (split, count) in enumerate((("train", num_train), ("val", num_validation)))
    )
    description = f"made scenes: {num_train} + {num_validation} of {size} pixels, seed {seed}"
    config = ImagePrepareConfig(processes=processes, shard_bytes=1 << 20)
    manifest = prepare_coco(_MadeSource(train, validation, description), out, config=config)
    shutil.rmtree(raw)
    return manifest


class _MadeSource(CocoSource):
    """Made scenes; what they are says all about them, so a second making continues a first one."""

    def __init__(self, train: CocoSplit, validation: CocoSplit, description: str) -> None:
        super().__init__(train, validation, keep_empty=True)
        self._description = description

    @property
    def description(self) -> str:
        return self._description

    def state(self) -> str:
        return self._description


def _write_split(folder: Path, count: int, size: int, seed: list[int]) -> CocoSplit:
    check_pillow()
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number in range(count):
        scene = draw_scene(size, np.random.default_rng([*seed, number]))
        height, width, _ = scene.pixels.shape
        name = f"{number:06d}.jpg"
        Image.fromarray(scene.pixels).save(folder / name, quality=92)
        images.append({"id": number + 1, "file_name": name, "width": width, "height": height})
        for one in _objects(scene):
            annotations.append({"id": len(annotations) + 1, "image_id": number + 1, **one})
    categories = [{"id": number, "name": name} for number, name in enumerate(SHAPES, 1)]
    file = folder.with_suffix(".json")
    tree = {"images": images, "annotations": annotations, "categories": categories}
    write_atomically(file, json.dumps(tree).encode())
    return CocoSplit(folder, file)


def _objects(scene: Scene) -> list[dict[str, Any]]:
    objects = []
    for shape, mask, rle in zip(
        scene.shapes, scene.masks, encoded(scene.masks.astype(np.uint8)), strict=True
    ):
        rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
        top, left = int(rows[0]), int(columns[0])
        objects.append(
            {
                "category_id": shape + 1,
                "bbox": [left, top, int(columns[-1]) + 1 - left, int(rows[-1]) + 1 - top],
                "area": int(mask.sum()),
                "iscrowd": 0,
                "segmentation": rle,
            }
        )
    return objects
