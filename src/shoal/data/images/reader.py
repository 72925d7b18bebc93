"""Batches of images: read, decoded and varied by a transform, in threads. A pure function of a seed.

The transform is handed in (``transform.TrainTransform``, ``transform.CentreTransform``, or any callable like
them). It releases the GIL while it decodes and resizes, so threads of the worker keep all processors busy and
write side by side into one array a batch; nothing is copied between processes. This module does not import
torch.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from shoal.data.images.shards import ImageShards
from shoal.data.images.storage import Bytes
from shoal.decide.rng import Int64Array, Stream, below, draw, random_keys
from shoal.errors import ShoalError, UsageError

_PIECES_A_THREAD = 8
"""A batch is cut into so many pieces for each thread: few enough to hand out, enough to end together."""


def default_decode_threads(num_local_workers: int = 1, num_loader_processes: int = 0) -> int:
    """Return the processors of this host for each of its workers, or for each of their loader processes."""
    num_processes = num_local_workers * max(1, num_loader_processes)
    return max(1, len(os.sched_getaffinity(0)) // num_processes)


class DecodeThreads:
    """Started when they are first needed; several batches may be in the making at a time."""

    def __init__(self, count: int | None = None) -> None:
        """Use ``count`` threads; default: the processors that this process may use.

        Raises:
            UsageError: there are no threads.
        """
        if count is not None and count < 1:
            raise UsageError(f"decode_threads {count} must be at least 1")
        self.count = count or default_decode_threads()
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def run(self, make: Callable[[int], None], count: int) -> None:
        """Call ``make`` with each number below ``count``; the first error is raised, and ends the rest."""
        if self.count == 1:
            for number in range(count):
                make(number)
            return

        def make_piece(numbers: range) -> None:
            for number in numbers:
                make(number)

        size = max(1, count // (self.count * _PIECES_A_THREAD))
        pieces = [range(count)[first : first + size] for first in range(0, count, size)]
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.count, thread_name_prefix="shoal-decode")
        futures = [self._pool.submit(make_piece, piece) for piece in pieces]
        try:
            for done in futures:
                done.result()
        finally:
            for left in futures:
                left.cancel()


_TRIES = 8

DTypeName = Literal["float32", "uint16", "uint8"]
OnBad = Literal["refuse", "skip"]


class Transform(Protocol):
    """Makes the model's input of an encoded image. Picklable; called by several threads at a time."""

    def size_at(self, epoch: int) -> int:
        """Return the side of the images of an epoch, in pixels."""

    def __call__(self, encoded: Bytes, out: npt.NDArray[Any], key: tuple[int, int, int]) -> None:
        """Write the image to ``out`` ``[3, S, S]``; ``key`` is (seed, epoch, index) of its draws.

        Raises:
            ShoalError: the bytes are not an image that can be decoded.
        """


class ImageReader:
    """Makes batches of images from the shards of a split (``steps.SizedReader``). Picklable."""

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
    ) -> None:
        """Read ``shards``.

        Args:
            shards: of a split.
            transform: what becomes of each image.
            seed: decides the order, and is the transform's first word.
            threads: that decode; default: the processors that this process may use.
            dtype: of the images: what the transform writes (uint16: the bits of bfloat16).
            channels_last: whether the three values of a pixel lie together in memory. Images from loader
                processes never do.
            on_bad: refuse: an image that cannot be decoded ends the training, named; skip: another image,
                drawn from (seed, epoch, index), takes its place, and ``replaced`` counts it. Not for
                validation, where an image would count twice.

        Raises:
            UsageError: the split has no images, or there are no threads.
        """
        if not len(shards):
            raise UsageError(f"{shards.location}: the split {shards.split!r} has no images; prepare some")
        self.shards = shards
        self.transform = transform
        self._threads = DecodeThreads(threads)
        self._seed = seed
        self._dtype: DTypeName = dtype
        self._channels_last = channels_last
        self._on_bad: OnBad = on_bad
        self._labels = shards.labels
        self._lock = threading.Lock()
        self._told: set[int] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        again = partial(
            ImageReader,
            seed=self._seed,
            threads=self.num_threads,
            dtype=self._dtype,
            channels_last=self._channels_last,
            on_bad=self._on_bad,
        )
        return (again, (self.shards, self.transform))

    @property
    def num_threads(self) -> int:
        """Threads that decode."""
        return self._threads.count

    @property
    def num_examples(self) -> int:
        """Images in one epoch."""
        return len(self.shards)

    @property
    def seed(self) -> int:
        """What decides the order of the images."""
        return self._seed

    @property
    def example_tokens(self) -> int:
        """Values of one image: as many as make a block of one micro-batch."""
        return 3 * max(self.transform.size_at(epoch) for epoch in (0, 1 << 31)) ** 2

    @property
    def example_bytes(self) -> int:
        """Bytes of one image in a batch, at its largest."""
        return self.example_tokens * np.dtype(self._dtype).itemsize

    def batch(self, epochs: npt.ArrayLike, indices: npt.ArrayLike) -> dict[str, npt.NDArray[Any]]:
        """Return the images ``indices`` (``[B]``, below ``num_examples``) as they are in ``epochs``.

        - ``images`` ``[B, 3, S, S]``: as the transform writes them. If epochs of different sizes meet in
          one batch, all have the larger size;
        - ``labels`` int64 ``[B]``;
        - ``replaced`` bool ``[B]``: another image stands here, because this one cannot be decoded;
        - ``epoch``, ``index`` int64 ``[B]``: the names of the examples.

        Raises:
            ShoalError: an image cannot be decoded, or a shard cannot be read.
        """
        indices_ = np.array(indices, dtype=np.int64, ndmin=1)
        epochs_ = np.empty_like(indices_)
        epochs_[:] = epochs
        count = len(indices_)
        images = self._empty(count, epochs_)
        used = indices_.copy()

        def make(row: int) -> None:
            used[row] = self._make(images[row], int(epochs_[row]), int(indices_[row]))

        self.shards.will_need(indices_.tolist())
        self._threads.run(make, count)
        return {
            "images": images,
            "labels": self._labels[used],
            "replaced": used != indices_,
            "epoch": epochs_,
            "index": indices_,
        }

    def micro_batch(self, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Return them as they are."""
        return dict(arrays)

    def _empty(self, count: int, epochs: Int64Array) -> npt.NDArray[Any]:
        side = max((self.transform.size_at(epoch) for epoch in np.unique(epochs).tolist()), default=1)
        if self._channels_last:
            return np.empty((count, side, side, 3), self._dtype).transpose(0, 3, 1, 2)
        return np.empty((count, 3, side, side), self._dtype)

    def _make(self, out: npt.NDArray[Any], epoch: int, index: int) -> int:
        """Write an image to ``out``; return its index, or that of the image that replaces it."""
        problem = self._try(out, epoch, index)
        if problem is None:
            return index
        if self._on_bad == "refuse":
            raise ShoalError(
                f"{problem}; repair it and prepare the images again, or have such images replaced "
                "(on_bad skip)"
            )
        self._tell(index, problem)
        draws = draw(random_keys(self._seed, Stream.IMAGE_REPLACEMENT, epoch, index), np.arange(_TRIES))
        for other in below(draws, self.num_examples).tolist():
            if self._try(out, epoch, other) is None:
                return int(other)
        raise ShoalError(
            f"{problem}; nor can any of {_TRIES} others that were drawn in its place: are these images?"
        )

    def _try(self, out: npt.NDArray[Any], epoch: int, index: int) -> str | None:
        """Write an image to ``out``, or return why that cannot be."""
        encoded = self.shards.read(index)
        try:
            self.transform(encoded, out, (self._seed, epoch, index))
        except UsageError as error:
            raise UsageError(f"{self.shards.name(index)}: {error}") from None
        except ShoalError as error:
            return f"{self.shards.name(index)}: {error}"
        return None

    def _tell(self, index: int, problem: str) -> None:
        with self._lock:
            is_new = index not in self._told
            self._told.add(index)
        if is_new:
            # in one piece: print() writes the end of the line apart, and another thread may come between
            sys.stderr.write(f"{problem}; another image takes its place\n")
