"""Applies an augmentation (``augment``) to an image and to the boxes and masks of its objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.data.coco.annotations import Rle
from shoal.data.coco.augment import DetectionAugmentConfig, Placement, placement
from shoal.data.coco.masks import areas, as_compressed, bitmaps, encoded, mask_library
from shoal.data.coco.source import MASKS_REMEDY
from shoal.data.images.augment import IMAGENET_MEAN, IMAGENET_STD
from shoal.data.images.pixels import Pixels, finish
from shoal.data.images.transform import IDENTITY, decode, normalisation, resized
from shoal.data.storage import Bytes
from shoal.errors import ShoalError
from shoal.json_text import parse_json

_LEAST_PIXELS = 1.0


@dataclass(frozen=True, kw_only=True)
class DetectionObjects:
    """The objects of an augmented image."""

    image_id: int
    original_size: tuple[int, int]
    """Height and width of the image that the annotations refer to."""
    boxes: npt.NDArray[np.float32]
    """x1, y1, x2, y2 in pixels, clipped to the frame, ``[N, 4]``."""
    categories: npt.NDArray[np.int64]
    """Category ids ``[N]``."""
    masks: list[Rle]
    """Run lengths in the frame; empty if masks are not read."""


def placed_objects(
    extra: Bytes, shape: tuple[int, int], geometry: Placement, *, masks: bool = True
) -> DetectionObjects:
    """Return the objects in ``extra`` (``KEY.json``) of an image of height and width ``shape``.

    Objects of which less than a pixel is visible are dropped, and so are crowds, which are not single
    objects.

    Args:
        masks: read masks too, which each object must have.

    Raises:
        ShoalError: the annotations are for an image of another shape, are damaged, or an object has no mask.
    """
    tree = parse_json(bytes(extra), "annotations of an image", remedy="prepare the images again")
    try:
        image_id, height, width = int(tree["image_id"]), tree["height"], tree["width"]
        objects = [one for one in tree["annotations"] if not one["iscrowd"]]
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ShoalError(
            f"annotations of an image cannot be read ({error}); prepare the images again"
        ) from None
    # an image may have been downscaled to whole pixels when it was prepared
    if abs(shape[0] / height - shape[1] / width) * max(height, width) > 2:
        raise ShoalError(
            f"image {image_id} has {shape[1]} x {shape[0]} pixels, but its annotations are for "
            f"{width} x {height}; was it turned? Prepare matching images and annotations"
        )
    boxes = np.array([one["bbox"] for one in objects], dtype=np.float64).reshape(-1, 4)
    boxes = placed_boxes(boxes, (height, width), geometry)
    large = np.all(boxes[:, 2:] - boxes[:, :2] >= _LEAST_PIXELS, axis=1)
    seen: list[int] = np.flatnonzero(large).tolist()
    shapes: dict[int, Rle] = {}
    for n in seen if masks else ():
        if not objects[n]["segmentation"]:
            raise ShoalError(
                f"object {objects[n]['id']} of image {image_id} has a box but no segmentation; {MASKS_REMEDY}"
            )
        shapes[n] = _placed_mask(objects[n]["segmentation"], (height, width), geometry)
    if masks:
        seen = [n for n, area in zip(seen, areas(list(shapes.values())), strict=True) if area]
    return DetectionObjects(
        image_id=image_id,
        original_size=(height, width),
        boxes=boxes[seen].astype(np.float32),
        categories=np.array([objects[n]["category_id"] for n in seen], dtype=np.int64),
        masks=[shapes[n] for n in seen if masks],
    )


class DetectionTransform:
    """Decodes and augments an image with its objects by its key. Picklable; threads may share it."""

    def __init__(self, config: DetectionAugmentConfig, *, masks: bool = True) -> None:
        """Augment as ``config`` describes.

        Args:
            config: size, crop and flip.
            masks: read masks too; without, objects may have boxes only.
        """
        self.config = config
        self._masks = masks

    def frame(self, key: tuple[int, int, int], height: int, width: int) -> tuple[int, int]:
        """Return height and width of an augmented image of ``height`` × ``width``."""
        return placement(self.config, key, height, width).frame

    def __call__(
        self, encoded_image: Bytes, extra: Bytes, out: npt.NDArray[Any], key: tuple[int, int, int]
    ) -> DetectionObjects:
        """Write the image of ``key`` = (seed, epoch, index) to ``out`` and return its objects.

        ``out`` ``[3, H, W]`` is as large as the frame: float32, normalised as ImageNet, or uint8, as decoded.

        Raises:
            ShoalError: the image or its annotations cannot be read, or do not belong together.
        """
        pixels = decode(encoded_image)
        shape = pixels.shape[0], pixels.shape[1]
        geometry = placement(self.config, key, *shape)
        if geometry.frame != out.shape[1:]:
            raise ShoalError(
                f"an image has {shape[1]} x {shape[0]} pixels, which the index of its shard does not say; "
                "prepare the images again"
            )
        of_floats = normalisation(IMAGENET_MEAN, IMAGENET_STD)
        scale, shift = IDENTITY if out.dtype == np.uint8 else of_floats
        finish(unflipped_pixels(pixels, geometry), out, scale=scale, shift=shift, flip=geometry.flip)
        return placed_objects(extra, shape, geometry, masks=self._masks)


def unflipped_pixels(pixels: Pixels, geometry: Placement) -> Pixels:
    """Return the pixels of the frame before the flip, uint8 ``[H, W, 3]``."""
    whole = resized(pixels, None, *geometry.resized)
    height, width = geometry.frame
    part = whole[geometry.top : geometry.top + height, geometry.left : geometry.left + width]
    if part.shape[:2] == geometry.frame:
        return part
    out = np.zeros((height, width, 3), dtype=np.uint8)
    out[: part.shape[0], : part.shape[1]] = part
    return out


def placed_boxes(
    boxes: npt.NDArray[np.float64], size: tuple[int, int], geometry: Placement
) -> npt.NDArray[np.float64]:
    """Return x1, y1, x2, y2 in the frame, clipped to it, of x, y, width, height in an image of ``size``."""
    scale = np.array([geometry.resized[1] / size[1], geometry.resized[0] / size[0]])
    low = boxes[:, :2] * scale - (geometry.left, geometry.top)
    high = (boxes[:, :2] + boxes[:, 2:]) * scale - (geometry.left, geometry.top)
    limit = np.minimum(
        geometry.frame, (geometry.resized[0] - geometry.top, geometry.resized[1] - geometry.left)
    )[::-1]
    low, high = low.clip(0, limit), high.clip(0, limit)
    if geometry.flip:
        low[:, 0], high[:, 0] = geometry.frame[1] - high[:, 0], geometry.frame[1] - low[:, 0]
    return np.concatenate([low, high], axis=1)


def _placed_mask(segmentation: Any, size: tuple[int, int], geometry: Placement) -> Rle:
    """Return the mask in the frame as run lengths.

    Polygons are transformed and then rasterised. Run lengths are sampled at the centre of each new pixel.

    Raises:
        ShoalError: run lengths are damaged.
    """
    height, width = geometry.frame
    if isinstance(segmentation, list):
        polygons = [
            _placed_polygon(np.asarray(points, dtype=np.float64), size, geometry) for points in segmentation
        ]
        library = mask_library()
        return dict(library.merge(library.frPyObjects(polygons, height, width)))
    rle = as_compressed(segmentation, *size)
    if rle is None:
        raise ShoalError("the run lengths of a mask are damaged; prepare the images again")
    rows, columns = (
        _sources(first, count, resized_side, side)
        for first, count, resized_side, side in zip(
            (geometry.top, geometry.left), geometry.frame, geometry.resized, size, strict=True
        )
    )
    mask = np.zeros((height, width), dtype=np.uint8)
    part = bitmaps([rle], *size)[0][rows[:, None], columns]
    mask[: len(rows), : len(columns)] = part
    return encoded((mask[:, ::-1] if geometry.flip else mask)[None])[0]


def _placed_polygon(
    points: npt.NDArray[np.float64], size: tuple[int, int], geometry: Placement
) -> list[float]:
    x = points[0::2] * (geometry.resized[1] / size[1]) - geometry.left
    y = points[1::2] * (geometry.resized[0] / size[0]) - geometry.top
    x = geometry.frame[1] - x if geometry.flip else x
    flat: list[float] = np.stack([x, y], axis=1).ravel().tolist()
    return flat


def _sources(first: int, count: int, resized_side: int, side: int) -> npt.NDArray[np.int64]:
    """Return the source pixel of each pixel of the frame along one side; padding has none."""
    at = np.arange(first, min(first + count, resized_side))
    return ((at + 0.5) * (side / resized_side)).astype(np.int64).clip(0, side - 1)
