"""Makes batches for a detector: images padded to one size, with their boxes, labels and masks.

Images come from prepared shards (``source.prepare_coco``) and are augmented by ``transform`` in threads, a
pure function of a seed. Each micro-batch holds its largest image, so
``shoal.decide.bucketing.GroupedOrder``, handed to ``shoal.data.loader.streamed_steps``, puts images of one
aspect together.

A bitmap of the whole image per object would be ten times the image; a mask is stored as the bitmap of the
part of the image that holds it. The bitmaps of an image are concatenated in one row of bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from shoal.data.bad_entries import MOST_BAD, OnBad
from shoal.data.coco.augment import in_steps
from shoal.data.coco.masks import Bitmaps, crops
from shoal.data.coco.transform import DetectionObjects, DetectionTransform
from shoal.data.images.reader import DecodeThreads, ShardReader
from shoal.data.images.shards import ImageShards
from shoal.data.steps import example_names
from shoal.decide.bucketing import aspect_groups
from shoal.errors import ShoalError, UsageError

Arrays = dict[str, npt.NDArray[Any]]
Problems = dict[int, str]


class DetectionReader(ShardReader):
    """Reads, decodes and augments the images of a split with their objects. Picklable."""

    def __init__(
        self,
        shards: ImageShards,
        transform: DetectionTransform,
        categories: Mapping[int, str],
        *,
        seed: int,
        threads: int | None = None,
        dtype: Literal["float32", "uint8"] = "float32",
        canvases: Sequence[tuple[int, int]] = (),
        on_bad: OnBad = "refuse",
        most_bad: float = MOST_BAD,
    ) -> None:
        """Read ``shards``.

        Args:
            shards: of a split of a directory that ``prepare_coco`` wrote.
            transform: decodes and augments an image and its objects.
            categories: names by id (``source.read_categories``); labels are 1, 2, … in this order.
            seed: decides the order, and is part of the transform's key.
            threads: that decode; default: the cores that this process may use.
            dtype: of the images; uint8: as decoded, for
                :class:`~shoal.data.images.normalise.Normalisation`.
            canvases: heights and widths that batches take, the smallest that holds the frames; default, and
                where none does: the least multiples of :data:`SIZE_STEP`.
            on_bad: see :class:`~shoal.data.images.reader.ShardReader`; an image is replaced by one of the
                same aspect.
            most_bad: see there.

        Raises:
            UsageError: the split has no images, or ``threads`` is below 1.
        """
        super().__init__(shards, seed, on_bad, most_bad)
        self.transform = transform
        self.categories = dict(categories)
        self.example_tokens = 3 * math.prod(transform.config.largest_batch)
        self._threads = DecodeThreads(threads)
        self._dtype = np.dtype(dtype)
        self._canvases = tuple(canvases)
        self._labels = {category: label for label, category in enumerate(self.categories, 1)}

    @property
    def example_bytes(self) -> int:
        """Bytes of the largest image in a batch, with masks that cover it once."""
        return self._dtype.itemsize * self.example_tokens + self.example_tokens // 3

    def batch(self, epochs: npt.ArrayLike, indices: npt.ArrayLike) -> Arrays:
        """Return the images ``indices`` (``[B]``, below ``num_examples``) as they are in ``epochs``.

        - ``images`` ``[B, 3, H, W]``, normalised float32 or uint8: each frame at the top left, padded with 0;
          H and W are those of a canvas, or the least multiples of :data:`SIZE_STEP` that hold all frames;
        - ``sizes`` int64 ``[B, 2]``: height and width of each frame;
        - ``num_objects`` int64 ``[B]``; M below is the largest; other images are padded with 0;
        - ``boxes`` float32 ``[B, M, 4]``: x1, y1, x2, y2 in pixels of the frame;
        - ``labels`` int64 ``[B, M]``, from 1;
        - ``masks`` uint8 ``[B, P]``: bitmaps of 0 and 1, row by row, concatenated per image;
        - ``mask_places`` int64 ``[B, M, 5]``: offset in ``masks``, row and column of the first pixel in the
          frame, height, width; beyond it the mask is 0;
        - ``image_id`` int64 ``[B]``, ``original_size`` int64 ``[B, 2]``: height and width in the annotations;
        - ``replaced`` bool ``[B]``: the image is another one, because this one cannot be used;
        - ``epoch``, ``index`` int64 ``[B]``: of the examples.

        Raises:
            ShoalError: an image or its annotations cannot be used, or a shard cannot be read.
            UsageError: so many images cannot be used that the set is damaged.
        """
        epochs_, indices_ = example_names(epochs, indices)
        self.shards.will_need(indices_.tolist())
        used = indices_.copy()
        arrays, problems = self._made(epochs_, used)
        if problems:
            for row, problem in sorted(problems.items()):
                used[row] = self._other(problem, int(epochs_[row]), int(indices_[row]))
            arrays, _ = self._made(epochs_, used)
        return {**arrays, "replaced": used != indices_, "epoch": epochs_, "index": indices_}

    def _made(self, epochs: npt.NDArray[np.int64], indices: npt.NDArray[np.int64]) -> tuple[Arrays, Problems]:
        """Return the arrays of images, or, by row, the problems of unusable ones."""
        names = zip(epochs.tolist(), indices.tolist(), strict=True)
        keys = [(self.seed, epoch, index) for epoch, index in names]
        frames = [self._frame(key) for key in keys]
        height, width = self._canvas(*map(max, zip(*frames, strict=True)))
        images = np.zeros((len(keys), 3, height, width), self._dtype)
        made: dict[int, tuple[DetectionObjects, list[tuple[int, int, Bitmaps]]]] = {}
        problems: Problems = {}

        def make(row: int) -> None:
            height, width = frames[row]
            objects = self._load(images[row, :, :height, :width], keys[row])
            if isinstance(objects, str):
                problems[row] = objects
            else:
                made[row] = objects, crops(objects.masks)

        self._threads.run(make, len(keys))
        if problems:
            return {}, problems
        return {
            "images": images,
            "sizes": np.array(frames, dtype=np.int64),
            **self._padded([made[row][0] for row in range(len(keys))]),
            **_packed([made[row][1] for row in range(len(keys))]),
        }, {}

    def _canvas(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of a batch whose frames have at most these."""
        holding = [each for each in self._canvases if each[0] >= height and each[1] >= width]
        return min(holding, key=math.prod, default=in_steps((height, width)))

    def _frame(self, key: tuple[int, int, int]) -> tuple[int, int]:
        width, height = self.shards.sizes[key[-1]].tolist()
        return self.transform.frame(key, height, width)

    def _load(self, out: npt.NDArray[Any], key: tuple[int, int, int]) -> DetectionObjects | str:
        """Write an image to ``out`` and return its objects, or the problem if it cannot be used."""
        index = key[-1]
        encoded, extra = self.shards.read(index), self.shards.extra(index)
        try:
            return self.transform(encoded, extra, out, key)
        except UsageError as error:
            raise UsageError(f"{self.shards.name(index)}: {error}") from None
        except ShoalError as error:
            return f"{self.shards.name(index)}: {error}"

    def _other(self, problem: str, epoch: int, index: int) -> int:
        """Return an image of the same aspect, since the batch holds its largest image."""
        aspects = aspect_groups(self.shards.sizes)

        def attempt(other: int) -> str | None:
            key = (self.seed, epoch, other)
            objects = self._load(np.zeros((3, *self._frame(key)), self._dtype), key)
            return objects if isinstance(objects, str) else None

        candidates = np.flatnonzero(aspects == aspects[index])
        return self._replacement(problem, epoch, index, candidates, attempt)

    def _padded(self, images: Sequence[DetectionObjects]) -> Arrays:
        counts = np.array([len(one.boxes) for one in images], dtype=np.int64)
        boxes = np.zeros((len(images), counts.max(), 4), dtype=np.float32)
        labels = np.zeros((len(images), counts.max()), dtype=np.int64)
        for row, (one, count) in enumerate(zip(images, counts.tolist(), strict=True)):
            boxes[row, :count] = one.boxes
            try:
                labels[row, :count] = [self._labels[category] for category in one.categories.tolist()]
            except KeyError as category:
                raise ShoalError(
                    f"{self.shards.location}: an object has the category {category}, which the list of "
                    "categories does not have; they come from different preparations"
                ) from None
        return {
            "num_objects": counts,
            "boxes": boxes,
            "labels": labels,
            "image_id": np.array([one.image_id for one in images], dtype=np.int64),
            "original_size": np.array([one.original_size for one in images], dtype=np.int64),
        }


def _packed(images: Sequence[Sequence[tuple[int, int, Bitmaps]]]) -> Arrays:
    """Return ``masks`` and ``mask_places`` of the parts of each image."""
    num_bytes = [sum(bitmap.size for _, _, bitmap in parts) for parts in images]
    masks = np.zeros((len(images), max(num_bytes)), dtype=np.uint8)
    extents = np.zeros((len(images), max(map(len, images)), 5), dtype=np.int64)
    for row, parts in enumerate(images):
        start = 0
        for number, (top, left, bitmap) in enumerate(parts):
            masks[row, start : start + bitmap.size].reshape(bitmap.shape)[...] = bitmap
            extents[row, number] = start, top, left, *bitmap.shape
            start += bitmap.size
    return {"masks": masks, "mask_places": extents}
