"""Run lengths read here, against COCO's own reader of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from shoal.data.coco.masks import boxes, crops, encoded, mask_library, runs

Mask = npt.NDArray[np.uint8]


def masks() -> Iterator[Mask]:
    """Yield masks of all shapes: noise, bars over whole columns, rectangles, nothing, everything."""
    random = np.random.default_rng(0)
    for number in range(300):
        height, width = (int(n) for n in random.integers(1, 70, 2))
        mask = (random.random((height, width)) < random.random()).astype(np.uint8)
        if number % 3:
            mask[:] = 0
            top, left = int(random.integers(height)), int(random.integers(width))
            bottom = height if number % 3 == 1 else top + int(random.integers(height))
            mask[0 if number % 3 == 1 else top : bottom, left : left + int(random.integers(width))] = 1
        yield mask
    yield np.ones((5, 4), np.uint8)
    yield np.zeros((5, 4), np.uint8)
    tall = np.zeros((3000, 40), np.uint8)  # numbers of several characters, differences below 0
    tall[7:2900, 3] = tall[1:2, 20] = tall[5:2000, 21] = 1
    yield tall


def test_runs_are_the_masks() -> None:
    for mask in masks():
        (rle,) = encoded(mask[None])
        lengths = runs(rle)
        again = np.repeat(np.arange(len(lengths)) % 2, lengths).reshape(mask.shape[::-1]).T
        assert np.array_equal(again, mask)
        assert np.array_equal(runs({**rle, "counts": rle["counts"].encode()}), lengths)


def test_parts_hold_the_whole_mask_in_its_box() -> None:
    for mask in masks():
        (rle,) = encoded(mask[None])
        ((top, left, part),) = crops([rle])
        x, y, w, h = boxes([rle])[0].astype(int).tolist()
        assert (top, left, *part.shape) == (y, x, h, w) and part.dtype == np.uint8
        again = np.zeros_like(mask)
        again[top : top + h, left : left + w] = part
        assert np.array_equal(again, mask)


@pytest.mark.parametrize("first", [[0, 1, 2, 3, 4, 5, 5], [20, 0, 0]])
def test_runs_of_no_length(first: list[int]) -> None:
    """They are allowed in a file and mean nothing."""
    rle = mask_library().frPyObjects({"size": [4, 5], "counts": first}, 4, 5)
    assert runs(rle).tolist() == first
