"""Draws labelled images of coloured shapes on noise, for a first run and for tests without a data set.

A class is a shape in a colour ("red-disc"). Position, size, brightness and background vary, so that there is
something to learn for a network and a small one can.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.data.images.manifest import ImageManifest, ImageShardInfo
from shoal.data.images.prepare import KIND, SPLITS, ShardTask, images_of, num_shards
from shoal.data.images.reencode import check_pillow
from shoal.data.images.shards import ImageShardWriter
from shoal.data.manifest import MANIFEST, VERSION
from shoal.data.prepare_dir import locked, open_plan
from shoal.errors import UsageError

COLOURS = {
    "red": (0.9, 0.2, 0.2),
    "blue": (0.2, 0.3, 0.9),
    "green": (0.2, 0.8, 0.3),
    "yellow": (0.9, 0.8, 0.2),
}
SHAPES = ("disc", "square", "triangle", "cross", "ring")
_SHARD_BYTES = 1 << 20


class DrawnImage(NamedTuple):
    """A drawn image, encoded, with its label or its annotations."""

    key: str
    data: bytes
    width: int
    height: int
    label: int = -1
    annotations: bytes | None = None


def class_names(num_classes: int) -> tuple[str, ...]:
    """Return the class names, sorted as their labels are.

    Raises:
        UsageError: there are fewer classes.
    """
    names = [f"{colour}-{shape}" for colour in COLOURS for shape in SHAPES]
    if not 2 <= num_classes <= len(names):
        raise UsageError(f"num_classes={num_classes} must be 2 to {len(names)}: made images have no more")
    return tuple(sorted(names[:num_classes]))


def draw_image(name: str, size: int, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Return an image of class ``name``, uint8 ``[size, size, 3]``."""
    colour, shape = name.split("-")
    radius = size * rng.uniform(0.18, 0.32)
    x, y = (size * rng.uniform(0.35, 0.65) for _ in range(2))
    rows, columns = np.mgrid[:size, :size].astype(np.float64)
    inside = covered(shape, (columns - x) / radius, (rows - y) / radius)
    background = rng.uniform(0.2, 0.7, 3) + rng.normal(0.0, 0.08, (size, size, 3))
    paint = np.array(COLOURS[colour]) * rng.uniform(0.7, 1.0) + rng.normal(0.0, 0.04, (size, size, 3))
    pixels: npt.NDArray[Any] = np.where(inside[..., None], paint, background)
    return (pixels.clip(0, 1) * 255).round().astype(np.uint8)


def covered(
    shape: str, across: npt.NDArray[np.float64], down: npt.NDArray[np.float64]
) -> npt.NDArray[np.bool_]:
    """Return the mask of a shape; coordinates are in units of its radius."""
    distance, side = np.hypot(across, down), np.maximum(abs(across), abs(down))
    masks: dict[str, npt.NDArray[np.bool_]] = {
        "disc": distance < 1,
        "ring": (distance < 1) & (distance > 0.6),
        "square": side < 0.85,
        "triangle": (down < 0.8) & (abs(across) < (down + 1) / 1.8),
        "cross": (np.minimum(abs(across), abs(down)) < 0.3) & (side < 1),
    }
    return masks[shape]


def make_images(
    out: Path,
    *,
    num_classes: int = 10,
    num_train: int = 2_000,
    num_validation: int = 500,
    size: int = 48,
    seed: int = 0,
) -> ImageManifest:
    """Draw images into the shards of ``out``; return the manifest if the same call has done so before.

    Args:
        out: directory of the shards.
        num_classes: 2 to 20.
        num_train: images of the split "train", shared evenly by the classes.
        num_validation: images of the split "validation".
        size: sides in pixels.
        seed: other seeds draw other images.

    Raises:
        UsageError: an argument is out of its range; ``out`` holds something else.
        ShoalError: Pillow is not installed; a file cannot be written.
    """
    counts = (num_train, num_validation)
    if min(counts) < num_classes:
        raise UsageError(
            f"num_train={num_train} and num_validation={num_validation} must be at least one image for each "
            f"of {num_classes} classes"
        )
    names = class_names(num_classes)

    def draw(split: int) -> list[DrawnImage]:
        images = []
        for label, name in enumerate(names):
            for number in range(label, counts[split], num_classes):
                pixels = draw_image(name, size, np.random.default_rng([seed, split, number]))
                images.append(encode_drawn(f"{name}/{number:06d}", pixels, label=label))
        return images

    description = (
        f"made images of {num_classes} classes: {num_train} + {num_validation} of {size} pixels, seed {seed}"
    )
    return write_drawn(out, description, names, draw)


def encode_drawn(key: str, pixels: npt.NDArray[np.uint8], **fields: Any) -> DrawnImage:
    """Encode pixels ``[H, W, 3]`` as a JPEG; ``fields`` are the label or the annotations."""
    check_pillow()
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=92)
    return DrawnImage(key, buffer.getvalue(), pixels.shape[1], pixels.shape[0], **fields)


def write_drawn(
    out: Path, description: str, classes: tuple[str, ...], draw: Callable[[int], list[DrawnImage]]
) -> ImageManifest:
    """Write the images of ``draw(0)`` and ``draw(1)`` as the shards of the splits "train" and "validation".

    Images are shuffled over the shards as :func:`shoal.data.images.prepare.prepare_images` does.

    Raises:
        UsageError: ``out`` holds something else.
        ShoalError: a file cannot be written.
    """
    with locked(out):
        open_plan(out, {"kind": KIND, "version": VERSION, "source": description})
        if (out / MANIFEST).is_file():
            return ImageManifest.load(out)
        splits = {}
        for number, split in enumerate(SPLITS):
            images = draw(number)
            count = num_shards(len(images), sum(len(image.data) for image in images), _SHARD_BYTES)
            tasks = [ShardTask(split, shard, count) for shard in range(count)]
            splits[split] = tuple(_write_shard(out, task, images) for task in tasks)
        manifest = ImageManifest(classes=classes, source=description, splits=splits)
        manifest.save(out)
        return manifest


def _write_shard(out: Path, task: ShardTask, images: list[DrawnImage]) -> ImageShardInfo:
    with ImageShardWriter(out, task.name) as writer:
        for number in images_of(task, len(images), seed=0):
            writer.add(**images[number]._asdict())
        return writer.finish()
