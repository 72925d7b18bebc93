"""Reads batches of images and decodes and augments them in threads, as a pure function of a seed.

The transform is an argument (``transform.TrainTransform``, ``transform.CentreTransform``, or any callable
like them). It releases the GIL while it decodes and resizes, so threads of the worker keep all cores busy and
write into one array per batch; nothing is copied between processes. This module does not import torch.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from shoal.data.bad_entries import MOST_BAD, BadEntries, OnBad
from shoal.data.images.shards import ImageShards
from shoal.data.steps import SizedReader, example_names
from shoal.data.storage import Bytes
from shoal.decide.rng import Stream, below, draw, random_keys
from shoal.env.machine import num_cores
from shoal.errors import ShoalError, UsageError

_RANGES_PER_THREAD = 8
"""A batch is cut into this many ranges per thread: few enough to submit, enough to finish together."""


class DecodeThreads:
    """A pool of threads that is started when first needed; several batches may use it at a time."""

    def __init__(self, count: int | None = None) -> None:
        """Use ``count`` threads; default: the cores that this process may use.

        Raises:
            UsageError: ``count`` is below 1.
        """
        if count is not None and count < 1:
            raise UsageError(f"decode_threads {count} must be at least 1")
        self.count = count or num_cores()
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._pid = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return (DecodeThreads, (self.count,))

    def run(self, make: Callable[[int], None], count: int) -> None:
        """Call ``make`` with each number below ``count``; the first error is raised, and ends the rest."""
        if self.count == 1:
            for number in range(count):
                make(number)
            return

        def make_all(numbers: range) -> None:
            for number in numbers:
                make(number)

        size = max(1, count // (self.count * _RANGES_PER_THREAD))
        parts = [range(count)[first : first + size] for first in range(0, count, size)]
        with self._lock:
            if self._pool is None or self._pid != os.getpid():  # a fork has none of its parent's threads
                self._pool = ThreadPoolExecutor(self.count, thread_name_prefix="shoal-decode")
                self._pid = os.getpid()
        deque(self._pool.map(make_all, parts), maxlen=0)


_TRIES = 8
UNUSABLE = "an image that cannot be decoded, or not with its annotations"

DTypeName = Literal["float32", "uint16", "uint8"]


class Transform(Protocol):
    """Turns an encoded image into the model's input. Picklable; called by several threads at a time."""

    def size_at(self, epoch: int) -> int:
        """Return the side of the images of an epoch, in pixels."""

    def __call__(self, encoded: Bytes, out: npt.NDArray[Any], key: tuple[int, int, int]) -> None:
        """Write the image to ``out`` ``[3, S, S]``; ``key`` is (seed, epoch, index) of its draws.

        Raises:
            ShoalError: the bytes are not an image that can be decoded.
        """


class ShardReader(SizedReader):
    """Base of the readers of image shards. Picklable."""

    def __init__(
        self, shards: ImageShards, seed: int, on_bad: OnBad = "refuse", most_bad: float = MOST_BAD
    ) -> None:
        """Read ``shards``.

        Args:
            on_bad: refuse: raise at an image that cannot be used; skip: replace it by another image, drawn
                from (seed, epoch, index), and mark it in ``replaced``. Not for validation, where an image
                would count twice.
            most_bad: share of the images of the split that may be replaced, see
                :class:`~shoal.data.bad_entries.BadEntries`; each process counts those that it meets.

        Raises:
            UsageError: the split has no images.
        """
        if not len(shards):
            raise UsageError(f"{shards.location}: the split {shards.split!r} has no images; prepare some")
        self.shards, self.seed = shards, seed
        self._on_bad: OnBad = on_bad
        self._most_bad = most_bad
        self._reported: dict[int, object] = {}

    @property
    def num_examples(self) -> int:
        return len(self.shards)

    def prefetch(self, steps: Iterable[npt.NDArray[np.int64]]) -> None:
        self.shards.prefetch(steps)

    def micro_batch(self, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Return the examples unchanged."""
        return dict(arrays)

    def _replacement(
        self,
        problem: str,
        epoch: int,
        index: int,
        candidates: npt.NDArray[np.int64] | None,
        attempt: Callable[[int], str | None],
    ) -> int:
        """Return the index of the image that replaces one that cannot be used.

        Args:
            problem: place and reason.
            candidates: to draw from; default: all images.
            attempt: tries an image and returns its problem, if any.

        Raises:
            ShoalError: such images are refused, or no other can be used either.
            UsageError: so many cannot be used that the set is damaged.
        """
        if self._on_bad == "refuse":
            raise ShoalError(
                f"{problem}; repair it and prepare the images again, or have such images replaced "
                "(--data.on-bad skip)"
            )
        mine = object()
        if self._reported.setdefault(index, mine) is mine:  # the first of the threads that find it
            # one write: print() writes the line end separately, and another thread may interleave
            sys.stderr.write(f"{problem}; another image takes its place\n")
            bad = BadEntries(str(self.shards.location), "skip", self._most_bad, options="--data.")
            bad.add_counts({UNUSABLE: (len(self._reported), [self.shards.name(index)])})
            bad.check(self.num_examples - len(self._reported))
        draws = draw(random_keys(self.seed, Stream.IMAGE_REPLACEMENT, epoch, index), np.arange(_TRIES))
        count = self.num_examples if candidates is None else len(candidates)
        for drawn in below(draws, count).tolist():
            other = int(drawn if candidates is None else candidates[drawn])
            if attempt(other) is None:
                return other
        raise ShoalError(
            f"{problem}; nor can any of {_TRIES} others that were drawn in its place: are these images?"
        )


class ImageReader(ShardReader):
    """Reads, decodes and augments the images of a split, with several threads. Picklable.

    The augmentation of an image is a pure function of (seed, epoch, index). A batch has ``images``
    ``[B, 3, S, S]`` and ``labels`` ``[B]``, see :meth:`batch`.

    Example (``runs/images`` was written by ``shoal prepare images``):

        >>> from shoal.data.images.transform import CentreTransform
        >>> reader = ImageReader(ImageShards("runs/images", "train"), CentreTransform(32, 36), seed=1)
        >>> reader.batch(0, [0, 1])["images"].shape
        (2, 3, 32, 32)
    """

    def __init__(
        self,
        shards: ImageShards,
        transform: Transform,
        *,
        seed: int,
        threads: int | None = None,
        dtype: DTypeName = "float32",
        channels_last: bool = False,
        on_bad: OnBad = "refuse",
        most_bad: float = MOST_BAD,
    ) -> None:
        """Read ``shards``.

        Args:
            shards: of a split.
            transform: decodes and augments an image.
            seed: decides the order, and is part of the transform's key.
            threads: that decode; default: the cores that this process may use.
            dtype: of the images, as the transform writes them (uint16: the bits of bfloat16).
            channels_last: memory format of the images. Those from loader processes are never channels last.
            on_bad: see :class:`ShardReader`.
            most_bad: see there.

        Raises:
            UsageError: the split has no images, or ``threads`` is below 1.
        """
        super().__init__(shards, seed, on_bad, most_bad)
        self.transform = transform
        self._threads = DecodeThreads(threads)
        self.example_tokens = 3 * max(transform.size_at(epoch) for epoch in (0, 1 << 31)) ** 2
        self._dtype: DTypeName = dtype
        self._channels_last = channels_last

    @property
    def example_bytes(self) -> int:
        """Bytes of the largest image in a batch."""
        return self.example_tokens * np.dtype(self._dtype).itemsize

    def batch(self, epochs: npt.ArrayLike, indices: npt.ArrayLike) -> dict[str, npt.NDArray[Any]]:
        """Return the images ``indices`` (``[B]``, below ``num_examples``) as they are in ``epochs``.

        - ``images`` ``[B, 3, S, S]``: as the transform writes them. If a batch holds epochs of different
          sizes, all images have the larger size;
        - ``labels`` int64 ``[B]``;
        - ``replaced`` bool ``[B]``: the image is another one, because this one cannot be decoded;
        - ``epoch``, ``index`` int64 ``[B]``: of the examples.

        Raises:
            ShoalError: an image cannot be decoded, or a shard cannot be read.
            UsageError: so many images cannot be decoded that the set is damaged.
        """
        epochs_, indices_ = example_names(epochs, indices)
        count = len(indices_)
        side = max((self.transform.size_at(epoch) for epoch in np.unique(epochs_).tolist()), default=1)
        if self._channels_last:
            images = np.empty((count, side, side, 3), self._dtype).transpose(0, 3, 1, 2)
        else:
            images = np.empty((count, 3, side, side), self._dtype)
        used = indices_.copy()

        def make(row: int) -> None:
            used[row] = self._make(images[row], int(epochs_[row]), int(indices_[row]))

        self.shards.will_need(indices_.tolist())
        self._threads.run(make, count)
        return {
            "images": images,
            "labels": self.shards.labels[used],
            "replaced": used != indices_,
            "epoch": epochs_,
            "index": indices_,
        }

    def _make(self, out: npt.NDArray[Any], epoch: int, index: int) -> int:
        """Write an image to ``out``; return its index, or that of the image that replaces it."""
        problem = self._try(out, epoch, index)
        if problem is None:
            return index
        return self._replacement(problem, epoch, index, None, lambda other: self._try(out, epoch, other))

    def _try(self, out: npt.NDArray[Any], epoch: int, index: int) -> str | None:
        """Write an image to ``out``; return the problem if it cannot be decoded."""
        encoded = self.shards.read(index)
        try:
            self.transform(encoded, out, (self.seed, epoch, index))
        except UsageError as error:
            raise UsageError(f"{self.shards.name(index)}: {error}") from None
        except ShoalError as error:
            return f"{self.shards.name(index)}: {error}"
        return None
