"""Made images: coloured shapes on noise, for a first run and for tests without a data set.

A class is a shape in a colour ("red-disc"). Place, size, brightness and background vary, so that a network
has something to learn and a small one can.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.data.images.folder import FolderSource
from shoal.data.images.manifest import ImageManifest
from shoal.data.images.prepare import ImagePrepareConfig, prepare_images
from shoal.data.images.reencode import check_pillow
from shoal.data.manifest import MANIFEST
from shoal.errors import UsageError

COLOURS = {
    "red": (0.9, 0.2, 0.2),
    "blue": (0.2, 0.3, 0.9),
    "green": (0.2, 0.8, 0.3),
    "yellow": (0.9, 0.8, 0.2),
}
SHAPES = ("disc", "square", "triangle", "cross", "ring")


def class_names(num_classes: int) -> tuple[str, ...]:
    """Return the names of the classes, sorted as their labels are.

    Raises:
        UsageError: there are not so many.
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
    across, down = (columns - x) / radius, (rows - y) / radius
    inside = covered(shape, across, down)
    background = rng.uniform(0.2, 0.7, 3) + rng.normal(0.0, 0.08, (size, size, 3))
    paint = np.array(COLOURS[colour]) * rng.uniform(0.7, 1.0) + rng.normal(0.0, 0.04, (size, size, 3))
    pixels: npt.NDArray[Any] = np.where(inside[..., None], paint, background)
    return (pixels.clip(0, 1) * 255).round().astype(np.uint8)


def make_folder(
    path: Path, *, num_classes: int, num_train: int, num_validation: int, size: int, seed: int
) -> None:
    """Write made images to ``path/train/CLASS/`` and ``path/val/CLASS/``, always the same for a seed.

    Raises:
        UsageError: there are not so many classes.
        ShoalError: Pillow is not installed.
    """
    check_pillow()
    from PIL import Image

    names = class_names(num_classes)
    for split, count in (("train", num_train), ("val", num_validation)):
        for number in range(count):
            label = number % num_classes
            rng = np.random.default_rng([seed, split == "val", number])
            file = path / split / names[label] / f"{number:06d}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw_image(names[label], size, rng)).save(file, quality=92)


def make_images(
    out: Path,
    *,
    num_classes: int = 10,
    num_train: int = 2_000,
    num_validation: int = 500,
    size: int = 48,
    seed: int = 0,
    processes: int = 0,
    progress: bool = False,
) -> ImageManifest:
    """Make images and prepare them into ``out``; what is there from the same call before is returned.

    Args:
        out: directory of the shards; ``out``'s name with ``-made`` holds the images meanwhile.
        num_classes: 2 to 20.
        num_train: images of the split "train", shared evenly by the classes.
        num_validation: images of the split "validation".
        size: sides in pixels.
        seed: other seeds make other images.
        processes: worker processes; 0 takes one a core.
        progress: report on standard error.

    Raises:
        UsageError: an argument is out of its range; ``out`` holds something else.
        ShoalError: Pillow is not installed; a file cannot be written.
    """
    if min(num_train, num_validation) < num_classes:
        raise UsageError(
            f"num_train={num_train} and num_validation={num_validation} must be at least one image for each "
            f"of {num_classes} classes"
        )
    description = (
        f"made images of {num_classes} classes: {num_train} + {num_validation} of {size} pixels, seed {seed}"
    )
    if (out / MANIFEST).is_file():
        manifest = ImageManifest.load(out)
        if manifest.source != description:
            raise UsageError(f"{out} holds {manifest.source}, not {description}; give another directory")
        return manifest
    raw = out.with_name(f"{out.name}-made")
    make_folder(
        raw,
        num_classes=num_classes,
        num_train=num_train,
        num_validation=num_validation,
        size=size,
        seed=seed,
    )
    source = _MadeSource(raw, description)
    manifest = prepare_images(
        source, out, config=ImagePrepareConfig(processes=processes, shard_bytes=1 << 20), progress=progress
    )
    shutil.rmtree(raw)
    return manifest


class _MadeSource(FolderSource):
    """A folder of made images; what it is says all about it, so a second making continues a first one."""

    def __init__(self, path: Path, description: str) -> None:
        super().__init__(path)
        self._description = description

    @property
    def description(self) -> str:
        return self._description

    def state(self) -> str:
        return self._description


def covered(
    shape: str, across: npt.NDArray[np.float64], down: npt.NDArray[np.float64]
) -> npt.NDArray[np.bool_]:
    """Return which pixels a shape covers; coordinates are in units of its radius."""
    distance = np.hypot(across, down)
    inside: npt.NDArray[np.bool_]
    match shape:
        case "disc":
            inside = distance < 1
        case "ring":
            inside = (distance < 1) & (distance > 0.6)
        case "square":
            inside = np.maximum(abs(across), abs(down)) < 0.85
        case "triangle":
            inside = (down < 0.8) & (abs(across) < (down + 1) / 1.8)
        case _:
            inside = (np.minimum(abs(across), abs(down)) < 0.3) & (np.maximum(abs(across), abs(down)) < 1)
    return inside
