"""Boxes and masks go where the pixels go: rectangles on whole pixels, against slices, repeats and mirrors."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from shoal.data.coco.augment import DetectionAugmentConfig, Placement, placement
from shoal.data.coco.masks import bitmaps, crops, encoded
from shoal.data.coco.transform import DetectionTransform, placed_boxes, placed_objects, unflipped_pixels
from shoal.errors import ShoalError, UsageError

HEIGHT, WIDTH = 40, 60
RECTANGLES = [(4, 6, 20, 10), (0, 0, 60, 40), (50, 30, 10, 10), (33, 5, 3, 30)]  # x, y, width, height


def rectangle_mask(x: int, y: int, width: int, height: int) -> npt.NDArray[np.uint8]:
    mask = np.zeros((HEIGHT, WIDTH), dtype=np.uint8)
    mask[y : y + height, x : x + width] = 1
    return mask


def an_image(*, as_polygons: bool) -> tuple[npt.NDArray[np.uint8], bytes]:
    """Black, with a rectangle of a colour of its own for each object; later ones lie above."""
    pixels = np.zeros((HEIGHT, WIDTH, 3), dtype=np.uint8)
    objects = []
    for n, (x, y, width, height) in enumerate(RECTANGLES):
        pixels[y : y + height, x : x + width] = 50 * (n + 1)
        polygon = [x, y, x + width, y, x + width, y + height, x, y + height]
        segmentation: Any = (
            [polygon] if as_polygons else encoded(rectangle_mask(x, y, width, height)[None])[0]
        )
        objects.append(
            {
                "id": n,
                "category_id": 10 + n,
                "bbox": [x, y, width, height],
                "area": width * height,
                "iscrowd": 0,
                "segmentation": segmentation,
            }
        )
    tree = {"image_id": 7, "width": WIDTH, "height": HEIGHT, "annotations": objects}
    return pixels, json.dumps(tree).encode()


def by_hand(plane: npt.NDArray[Any], factor: int, place: Placement) -> npt.NDArray[Any]:
    """Return a plane of pixels after the image has grown by a whole factor."""
    large = plane.repeat(factor, axis=0).repeat(factor, axis=1)
    out = np.zeros((*place.frame, *plane.shape[2:]), dtype=plane.dtype)
    part = large[place.top : place.top + place.frame[0], place.left : place.left + place.frame[1]]
    out[: part.shape[0], : part.shape[1]] = part
    return out[:, ::-1] if place.flip else out


def box_of(mask: npt.NDArray[np.uint8]) -> list[float]:
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]


PLACEMENTS = {
    "as it is": (1, (0, 0), (40, 60)),
    "twice as large": (2, (0, 0), (80, 120)),
    "cut out": (3, (17, 31), (60, 90)),
    "cut out, some objects gone": (1, (12, 30), (28, 15)),
    "padded": (1, (0, 0), (64, 64)),
}


@pytest.mark.parametrize("as_polygons", [True, False])
@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_boxes_and_masks_follow(name: str, flip: bool, as_polygons: bool) -> None:
    factor, (top, left), frame = PLACEMENTS[name]
    resized = (HEIGHT * factor, WIDTH * factor)
    place = Placement(resized=resized, top=top, left=left, frame=frame, flip=flip)
    pixels, extra = an_image(as_polygons=as_polygons)
    objects, image = placed_objects(extra, pixels.shape[:2], place), unflipped_pixels(pixels, place)
    image = image[:, ::-1] if flip else image

    masks = [by_hand(rectangle_mask(*rectangle), factor, place) for rectangle in RECTANGLES]
    seen = [n for n, mask in enumerate(masks) if mask.any()]
    assert objects.categories.tolist() == [10 + n for n in seen]
    assert np.array_equal(bitmaps(objects.masks, *frame), np.stack([masks[n] for n in seen]))
    assert objects.boxes.tolist() == [box_of(masks[n]) for n in seen]
    assert (objects.image_id, objects.original_size) == (7, (HEIGHT, WIDTH))
    for (top, left, part), mask in zip(crops(objects.masks), (masks[n] for n in seen), strict=True):
        whole = np.zeros(frame, dtype=np.uint8)
        whole[top : top + part.shape[0], left : left + part.shape[1]] = part
        assert np.array_equal(whole, mask)
    if factor == 1:
        assert np.array_equal(image, by_hand(pixels, 1, place))
    else:  # colours blend at edges only
        same = (image == by_hand(pixels, factor, place)).all(axis=2)
        assert image.shape == (*frame, 3)
        assert same.mean() > 0.8


def test_crowds_are_left_out_and_an_object_needs_a_mask() -> None:
    pixels, extra = an_image(as_polygons=True)
    place = placement(DetectionAugmentConfig(shorter=(40,)), (0, 0, 0), HEIGHT, WIDTH)
    tree = json.loads(extra)
    tree["annotations"][1]["iscrowd"] = 1
    tree["annotations"][1]["segmentation"] = None
    objects = placed_objects(json.dumps(tree).encode(), pixels.shape[:2], place)
    assert objects.categories.tolist() == [10, 12, 13]
    tree["annotations"][1]["iscrowd"] = 0
    with pytest.raises(ShoalError, match="object 1 of image 7 has a box but no segmentation"):
        placed_objects(json.dumps(tree).encode(), pixels.shape[:2], place)


def test_annotations_of_an_image_that_was_made_smaller() -> None:
    """Prepared with --resize: the boxes are for the original size."""
    pixels, extra = an_image(as_polygons=True)
    config = DetectionAugmentConfig(shorter=(40,), longer=1000, flip=0.0)
    small = np.ascontiguousarray(pixels[::2, ::2])
    objects = placed_objects(extra, small.shape[:2], placement(config, (0, 0, 0), *small.shape[:2]))
    assert objects.boxes.tolist() == [[x, y, x + w, y + h] for x, y, w, h in RECTANGLES]
    with pytest.raises(ShoalError, match=r"image 7 has 40 x 60 pixels, but its annotations are for 60 x 40"):
        placed_objects(extra, (60, 40), placement(config, (0, 0, 0), 60, 40))
    with pytest.raises(ShoalError, match="annotations of an image cannot be read"):
        placed_objects(b"{}", (40, 60), placement(config, (0, 0, 0), 40, 60))


@pytest.mark.parametrize("size", [(480, 640), (640, 427), (333, 1000), (100, 100), (51, 997)])
def test_sizes_and_boxes_as_torchvision(size: tuple[int, int]) -> None:
    theirs = GeneralizedRCNNTransform(200, 333, [0.0] * 3, [1.0] * 3)
    target = {"boxes": torch.tensor([[3.0, 5, 40, 41]])}
    image, scaled = theirs.resize(torch.zeros(3, *size), target)
    place = placement(DetectionAugmentConfig(shorter=(200,), longer=333, flip=0), (1, 2, 3), *size)
    assert place.frame == place.resized == image.shape[1:]
    boxes = placed_boxes(np.array([[3.0, 5, 37, 36]]), size, place)
    np.testing.assert_allclose(boxes, scaled["boxes"].numpy(), rtol=1e-6)


def test_large_scale_jitter() -> None:
    config = DetectionAugmentConfig(scales=(0.1, 2.0), canvas=50)
    places = [placement(config, (5, 0, n), HEIGHT, WIDTH) for n in range(2000)]
    widths = np.array([place.resized[1] for place in places])
    assert {place.frame for place in places} == {(50, 50)}
    assert widths.min() == 5
    assert widths.max() == 100
    assert abs(widths.mean() - 52.5) < 2.5
    assert abs(np.mean([place.flip for place in places]) - 0.5) < 0.05
    for place in places:
        for first, side in zip((place.top, place.left), place.resized, strict=True):
            assert 0 <= first <= max(0, side - 50)
    assert len({place.left for place in places if place.resized[1] > 98}) > 20


def test_draws_depend_on_the_key_alone() -> None:
    config = DetectionAugmentConfig(shorter=(640, 672, 704, 800))
    places = {n: placement(config, (1, 2, n), 480, 640) for n in range(200)}
    assert placement(config, (1, 2, 77), 480, 640) == places[77]
    assert {min(place.resized) for place in places.values()} == {640, 672, 704, 800}
    assert any(placement(config, (1, 3, n), 480, 640) != places[n] for n in range(9))
    assert isinstance(pickle.loads(pickle.dumps(DetectionTransform(config))), DetectionTransform)


@pytest.mark.parametrize(
    "values", [{"shorter": ()}, {"longer": 0}, {"canvas": -1}, {"flip": 1.5}, {"scales": (0.0, 1.0)}]
)
def test_refusals(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(values))):
        DetectionAugmentConfig(**values)
