"""Objects are drawn where they lie: lines on the edges of boxes, masks within, texts in the picture."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal.data.coco.drawing import MASK_OPACITY, Drawn, colour_of, drawn, line_width

HEIGHT, WIDTH = 500, 600


def painted_with(*objects: Drawn) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    pixels = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    return pixels, drawn(pixels, objects)


def an_object(box: tuple[float, float, float, float], label: int = 1, text: str = "cat 90%") -> Drawn:
    mask = np.zeros((HEIGHT, WIDTH), dtype=bool)
    x1, y1, x2, y2 = (round(side) for side in box)
    mask[y1 + 20 : y2 - 20, x1 + 20 : x2 - 20] = True
    return Drawn(label=label, text=text, box=box, mask=mask)


def test_lines_lie_on_the_edge_of_the_box_and_masks_within() -> None:
    one = an_object((200.4, 150.2, 400.3, 299.8))
    pixels, painted = painted_with(one)
    line, colour = line_width(HEIGHT, WIDTH), np.array(colour_of(1))
    assert line == 2
    edge = np.zeros((HEIGHT, WIDTH), dtype=bool)
    edge[150:300, 200:400] = True
    edge[150 + line : 300 - line, 200 + line : 400 - line] = False
    assert (painted[edge] == colour).all()
    mixed = pixels[one.mask] + MASK_OPACITY * (colour - pixels[one.mask].astype(float))
    assert np.abs(painted[one.mask] - mixed).max() <= 0.51
    text = np.zeros((HEIGHT, WIDTH), dtype=bool)
    text[100:150, 200:400] = True  # above the box
    assert (painted[text] != pixels[text]).any()
    elsewhere = ~(edge | one.mask | text)
    assert np.array_equal(painted[elsewhere], pixels[elsewhere])


def test_texts_stay_in_the_picture() -> None:
    corner = an_object((560.0, 0.0, 600.0, 120.0), label=2, text="refrigerator 100%")
    pixels, painted = painted_with(corner)
    changed = (painted != pixels).any(axis=2)
    rows, columns = np.flatnonzero(changed.any(axis=1)), np.flatnonzero(changed.any(axis=0))
    assert (rows[0], columns[-1]) == (0, WIDTH - 1)
    assert columns[0] < 560 - 50 and rows[-1] == 119


def test_later_objects_lie_on_earlier_ones() -> None:
    _, painted = painted_with(
        an_object((100.0, 100.0, 300.0, 300.0)), an_object((100.0, 100.0, 300.0, 300.0), label=5)
    )
    assert tuple(painted[299, 200]) == colour_of(5)


@pytest.mark.parametrize(
    "box", [(-5.0, -5.0, 1.0, 1.0), (599.9, 499.9, 700.0, 700.0), (10.2, 10.2, 10.3, 10.3)]
)
def test_boxes_without_a_whole_pixel_can_be_drawn(box: tuple[float, float, float, float]) -> None:
    mask = np.zeros((HEIGHT, WIDTH), dtype=bool)
    painted_with(Drawn(label=3, text="", box=box, mask=mask))
