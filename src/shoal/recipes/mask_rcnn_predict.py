"""Finds objects in pictures, lists them in JSON and draws them: ``shoal predict mask_rcnn``."""

from __future__ import annotations

import colorsys
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shoal.atomic_io import write_atomically
from shoal.data.coco.augment import SIZE_STEP, DetectionAugmentConfig, placement
from shoal.data.coco.masks import bitmaps
from shoal.data.coco.results import KINDS
from shoal.data.coco.transform import unflipped_pixels
from shoal.data.images.augment import IMAGENET_MEAN, IMAGENET_STD
from shoal.data.images.files import read_image
from shoal.data.images.pixels import Pixels, finish
from shoal.data.images.reencode import check_pillow
from shoal.data.images.transform import decode, normalisation
from shoal.errors import ShoalError, UsageError, did_you_mean
from shoal.recipes.images import find_network
from shoal.recipes.mask_rcnn_export import Exported, read_checkpoint, read_export
from shoal.recipes.mask_rcnn_score import Found, add_found, results_of
from shoal.train.config import DistributedConfig, required
from shoal.train.gradients import Precision, choose_precision
from shoal.train.run_dir import require_writable
from shoal.train.world import World, all_gather_json, choose_device, infer

_ENDING = ".objects"
"""Between the name of a picture and that of what is written about it."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Pictures, a detector, and the objects to look for."""

    images: tuple[Path, ...]
    model: Path
    """Run, checkpoint of a run, or exported detector."""
    out: Path
    """Folder for the pictures and the JSON files."""
    min_score: float
    classes: tuple[str, ...]
    """Names of categories; empty: all."""

    def __post_init__(self) -> None:
        """Check what can be checked without the model.

        Raises:
            UsageError: a value is out of its range, a picture is not there, or two would have one name.
        """
        if not 0 <= self.min_score <= 1:
            raise UsageError(f"--min-score {self.min_score} must be from 0 to 1")
        if not self.images:
            raise UsageError("no picture is named: give image files")
        names: dict[str, Path] = {}
        for image in self.images:
            if not image.is_file():
                raise UsageError(
                    f"{image} {'is a folder' if image.is_dir() else 'does not exist'}: name image files"
                )
            other = names.setdefault(image.stem, image)
            if other != image:
                raise UsageError(
                    f"{other} and {image}: both would be written as {image.stem}{_ENDING}.png; predict them "
                    "into different folders (--out)"
                )


def run(what: Prediction, world: World | None = None, precision: Precision | None = None) -> None:
    """Find objects in each picture, write ``NAME.objects.json`` and ``NAME.objects.png``, say what was found.

    Args:
        world: of the workers that share the pictures, of which the first says it; default: there is one.
        precision: of the computation; default: that of the device.

    Raises:
        UsageError: there is no model, it does not know a class, or a file is no image.
        ShoalError: the model is damaged, or a file cannot be written.
    """
    detector = read_detector(what.model)
    wanted = _known_classes(what, list(detector.categories.values()))
    require_writable(what.out)
    device = world.device if world else choose_device(DistributedConfig(), 0, 1)
    precision = precision or choose_precision("auto", device)
    rank, num_workers = (world.place.rank, world.num_workers) if world else (0, 1)
    detector.model.to(device).eval()
    lines: list[str] = []

    def found_in(path: Path) -> tuple[Path, Pixels, list[dict[str, Any]]]:
        pixels = _pixels_of(path)
        return path, pixels, objects_in(detector, pixels, device, precision)

    for path, pixels, found in infer(found_in, list(dict.fromkeys(what.images))[rank::num_workers], device):
        objects = [one for one in found if one["score"] >= what.min_score and one["category"] in wanted]
        height, width, _ = pixels.shape
        tree = {"image": str(path), "height": height, "width": width, "objects": objects}
        tree["precision"] = precision.name
        target = what.out / f"{path.stem}{_ENDING}"
        text = json.dumps(tree, indent=1, ensure_ascii=False)
        write_atomically(target.with_name(f"{target.name}.json"), f"{text}\n".encode())
        picture = target.with_name(f"{target.name}.png")
        write_atomically(picture, png(drawn(pixels, _drawn_objects(objects, detector, height, width))))
        lines.append(f"{path}: {_told(objects)} ({picture})")
    parts = all_gather_json(world.control if world else None, lines)
    if rank == 0:
        print("\n".join(line for row in zip_longest(*parts) for line in row if line is not None))


def read_detector(source: Path) -> Exported:
    """Return the detector of an export (a run's own where it has one), else of a checkpoint.

    Raises:
        UsageError: ``source`` has no model of this recipe.
        ShoalError: it is damaged, or has no checkpoint yet.
    """
    found = find_network(source)
    return read_export(required(found.directory)) if found.checkpoint is None else read_checkpoint(source)[0]


def objects_in(
    detector: Exported, pixels: Pixels, device: torch.device, precision: Precision
) -> list[dict[str, Any]]:
    """Return the objects of a picture uint8 ``[H, W, 3]``, the surest first, as in COCO's results.

    Each has ``category_id``, ``category`` (its name), ``score``, ``bbox`` (x, y, width, height in pixels) and
    ``segmentation`` (run lengths). The picture is brought to the form of the run's validation images.
    """
    height, width, _ = pixels.shape
    view = DetectionAugmentConfig(shorter=(detector.shorter,), longer=detector.longer, flip=0.0)
    place = placement(view, (0, 0, 0), height, width)
    frame = [-(-side // SIZE_STEP) * SIZE_STEP for side in place.frame]
    image = np.zeros((1, 3, *frame), dtype=np.float32)
    scale, shift = normalisation(IMAGENET_MEAN, IMAGENET_STD)
    part = image[0, :, : place.frame[0], : place.frame[1]]
    finish(unflipped_pixels(pixels, place), part, scale=scale, shift=shift)
    batch = {
        "sizes": torch.tensor([place.frame]),
        "original_size": torch.tensor([[height, width]]),
        "image_id": torch.tensor([0]),
    }
    with torch.inference_mode(), precision.autocast():
        detections = detector.model.detect(torch.from_numpy(image).to(device), batch["sizes"].to(device))
    found: Found = {kind: {} for kind in KINDS}
    add_found(found, detections, batch, list(detector.categories))
    return [{"category": detector.categories[one["category_id"]], **one} for one in results_of(found, 0)]


def _pixels_of(path: Path) -> Pixels:
    image = read_image(path)
    try:
        return decode(image)
    except ShoalError as error:
        raise UsageError(f"{path}: {error}") from None


def _known_classes(what: Prediction, known: Sequence[str]) -> set[str]:
    for name in what.classes:
        if name not in known:
            raise UsageError(
                f"--classes {name!r} is none of the {len(known)} that the model {what.model} knows: "
                f"{', '.join(known[:5])}{', …' * (len(known) > 5)}.{did_you_mean(name, known)}"
            )
    return set(what.classes or known)


def _drawn_objects(
    objects: Sequence[dict[str, Any]], detector: Exported, height: int, width: int
) -> list[Drawn]:
    """Return them as they are drawn, the surest last."""
    labels = {number: label for label, number in enumerate(detector.categories, 1)}
    masks = bitmaps([one["segmentation"] for one in objects], height, width).astype(bool)
    found = []
    for one, mask in zip(objects, masks, strict=True):
        x, y, w, h = one["bbox"]
        text = f"{one['category']} {one['score']:.0%}"
        label = labels[one["category_id"]]
        found.append(Drawn(label=label, text=text, box=(x, y, x + w, y + h), mask=mask))
    return found[::-1]


def _told(objects: Sequence[dict[str, Any]]) -> str:
    counts = Counter(one["category"] for one in objects)
    return ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "nothing found"


# ------------------------------------------------------------------------------------------------- drawing

Colour = tuple[int, int, int]

MASK_OPACITY = 0.45
_GOLDEN = 0.6180339887
"""Steps of this part of the circle of hues keep any number of them apart."""
_GREY = (0.299, 0.587, 0.114)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Label, text, box and mask of an object to draw."""

    label: int
    """Decides the colour, from 1."""
    text: str
    box: tuple[float, float, float, float]
    """x1, y1, x2, y2 in pixels."""
    mask: npt.NDArray[np.bool_]
    """``[H, W]``, of the whole picture."""


def colour_of(label: int) -> Colour:
    """Return the red, green and blue of a label, the same in every picture."""
    red, green, blue = colorsys.hsv_to_rgb(label * _GOLDEN % 1.0, 0.8, 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)


def line_width(height: int, width: int) -> int:
    """Return the width of the lines of boxes in pixels, inwards from their edge."""
    return max(1, round(min(height, width) / 250))


def drawn(pixels: Pixels, objects: Sequence[Drawn]) -> Pixels:
    """Return a copy of a picture ``[H, W, 3]`` with ``objects``, later ones on earlier ones, texts on all.

    Raises:
        ShoalError: Pillow is not installed.
    """
    check_pillow()
    from PIL import Image, ImageDraw, ImageFont

    height, width, _ = pixels.shape
    mixed = pixels.astype(np.float32)
    for one in objects:
        mixed[one.mask] += MASK_OPACITY * (np.array(colour_of(one.label), dtype=np.float32) - mixed[one.mask])
    picture = Image.fromarray(np.rint(mixed).astype(np.uint8))
    pen, line = ImageDraw.Draw(picture), line_width(height, width)
    font = ImageFont.load_default(size=max(10, round(min(height, width) / 30)))
    for one in objects:
        pen.rectangle(_edges(one, height, width), outline=colour_of(one.label), width=line)
    for one in objects:
        left, top, _, _ = _edges(one, height, width)
        x1, y1, x2, y2 = pen.textbbox((0, 0), one.text, font=font)
        text_width, text_height = round(x2 - x1) + 2 * line, round(y2 - y1) + 2 * line
        left = max(0, min(left, width - text_width))
        top = top - text_height if top >= text_height else top  # above the box where there is room
        pen.rectangle((left, top, left + text_width - 1, top + text_height - 1), fill=colour_of(one.label))
        ink = "black" if np.dot(_GREY, colour_of(one.label)) > 128 else "white"
        pen.text((left + line - x1, top + line - y1), one.text, fill=ink, font=font)
    return np.array(picture)


def png(pixels: Pixels) -> bytes:
    """Return a picture as a PNG file."""
    from PIL import Image

    out = BytesIO()
    Image.fromarray(pixels).save(out, format="PNG")
    return out.getvalue()


def _edges(one: Drawn, height: int, width: int) -> tuple[int, int, int, int]:
    """Return the first and last column and row that a box covers at least half of, at least one of each."""
    x1, y1, x2, y2 = one.box
    left, top = min(max(round(x1), 0), width - 1), min(max(round(y1), 0), height - 1)
    right, bottom = min(max(round(x2) - 1, left), width - 1), min(max(round(y2) - 1, top), height - 1)
    return left, top, right, bottom
