"""Converts polygons and run lengths of masks to one form, to bitmaps, areas and boxes.

The rasteriser and the run lengths are those of COCO, by faster-coco-eval; a polygon gives the same bits as in
the official tools. Only this module loads the library.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.data.coco.annotations import Rle, Segmentation
from shoal.errors import import_extra

_PURPOSE = "COCO's masks and scores need faster-coco-eval"


@cache
def mask_library() -> Any:
    """Return the functions of faster-coco-eval on masks (``faster_coco_eval.core.mask``).

    Raises:
        ShoalError: it is not installed.
    """
    return import_extra("faster_coco_eval.core.mask", "vision", _PURPOSE)


def evaluation_library() -> tuple[Any, Any]:
    """Return the compiled matcher of faster-coco-eval and its class of parameters, COCO's by default.

    Raises:
        ShoalError: it is not installed.
    """
    matcher = import_extra("faster_coco_eval.faster_eval_api_cpp", "vision", _PURPOSE)
    return matcher, import_extra("faster_coco_eval.core.cocoeval", "vision", _PURPOSE).Params


Bitmaps = npt.NDArray[np.uint8]


def as_compressed(segmentation: Segmentation, height: int, width: int) -> Rle | None:
    """Return compressed run lengths (COCO's string) of the union of polygons, or of run lengths of either
    form.

    Returns ``None`` if run lengths do not fit the image.
    """
    library = mask_library()
    if isinstance(segmentation, dict):
        rle = segmentation
        if isinstance(rle["counts"], list):
            if sum(rle["counts"]) != height * width:
                return None
            rle = library.frPyObjects(rle, height, width)
    else:
        polygons = library.frPyObjects([polygon.tolist() for polygon in segmentation], height, width)
        rle = polygons[0] if len(polygons) == 1 else library.merge(polygons)
    try:
        library.area([rle])
    except (ValueError, RuntimeError):
        return None
    return dict(rle)


def areas(rles: Sequence[Rle]) -> list[float]:
    """Return the number of pixels of each mask."""
    return [float(area) for area in mask_library().area(list(rles))] if rles else []


def boxes(rles: Sequence[Rle]) -> npt.NDArray[np.float64]:
    """Return the smallest box around each mask, x, y, width, height, float64 ``[N, 4]``; zeros if empty."""
    if not rles:
        return np.zeros((0, 4))
    return np.asarray(mask_library().toBbox(list(rles)), dtype=np.float64).reshape(-1, 4)


def bitmaps(rles: Sequence[Rle], height: int, width: int) -> Bitmaps:
    """Return masks as 0 and 1, uint8 ``[N, height, width]``, contiguous."""
    if not rles:
        return np.zeros((0, height, width), dtype=np.uint8)
    # the library is column-major: [height, width, N] in Fortran order is [N, width, height] in C order
    planes = np.asarray(mask_library().decode(list(rles)), dtype=np.uint8)
    return np.ascontiguousarray(planes.transpose(2, 0, 1))


def crops(rles: Sequence[Rle]) -> list[tuple[int, int, Bitmaps]]:
    """Return (first row, first column, bitmap ``[h, w]``) of a part of the image that holds each mask.

    The part is the box around the mask, or whole columns of it if a run continues from column to column. Only
    those columns are decoded: a bitmap of the whole image per mask would be most of the work of a training
    batch.
    """
    parts = []
    for rle, (x, y, w, h) in zip(rles, boxes(rles).astype(np.int64).tolist(), strict=True):
        height = rle["size"][0]
        ends = np.cumsum(runs(rle)).clip(x * height, (x + w) * height)
        lengths = np.diff(ends, prepend=x * height)
        values = np.zeros(len(lengths), dtype=np.uint8)
        values[1::2] = 1
        plane = np.repeat(values, lengths).reshape(w, height).T
        parts.append((y, x, plane[y : y + h]))
    return parts


def runs(rle: Rle) -> npt.NDArray[np.int64]:
    """Decode compressed run lengths: the lengths of alternating runs of 0 and 1.

    The string has 5 bits per character (from 48), lowest first, and a sixth that is set if the number
    continues; from the fourth number on it stores the difference to the number before the last.
    """
    text = rle["counts"]
    digits = np.frombuffer(text.encode("ascii") if isinstance(text, str) else text, dtype=np.uint8)
    digits = (digits - 48).astype(np.int64)
    last = np.flatnonzero(digits < 32)
    first = np.concatenate([[0], last[:-1] + 1])
    shifts = 5 * (np.arange(len(digits)) - np.repeat(first, last - first + 1))
    numbers = np.add.reduceat((digits & 31) << shifts, first)
    numbers -= ((digits[last] & 16) << 1) << shifts[last]  # the highest bit is the sign
    numbers[1::2] = np.cumsum(numbers[1::2])
    numbers[2::2] = np.cumsum(numbers[2::2])
    return numbers


def encoded(masks: Bitmaps) -> list[Rle]:
    """Return compressed run lengths, as text, of masks ``[N, height, width]`` of 0 and 1."""
    if not len(masks):
        return []
    planes = np.asfortranarray(masks.transpose(1, 2, 0), dtype=np.uint8)
    return [
        {"size": [int(n) for n in rle["size"]], "counts": rle["counts"].decode("ascii")}
        for rle in mask_library().encode(planes)
    ]
