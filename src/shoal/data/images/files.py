"""Reads images from files as a model takes them, without labels: for predictions.

Each is first brought into the form that a shard would store, so that it is predicted as it is evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.data.images.folder import SUFFIXES
from shoal.data.images.headers import BadImage
from shoal.data.images.reader import DecodeThreads, Transform
from shoal.data.images.reencode import ReencodeConfig, reencode
from shoal.data.steps import SizedReader, example_names
from shoal.errors import ShoalError, UsageError, cannot_read


def image_files(inputs: Sequence[Path]) -> list[Path]:
    """Return the files of ``inputs``, and the images in its folders and their subfolders, in order of names.

    Raises:
        UsageError: an input is not there, or a folder has no images.
    """
    paths: list[Path] = []
    for path in inputs:
        if not path.is_dir():
            if not path.is_file():
                raise UsageError(f"{path} does not exist: name images, or folders of images")
            paths.append(path)
            continue
        inside = sorted(
            file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file()
        )
        if not inside:
            raise UsageError(f"{path}: no file in this folder has the suffix of an image")
        paths += inside
    return paths


def read_image(path: Path) -> bytes:
    """Return an image file as ``shoal prepare images`` stores it: upright, RGB or greyscale of 8 bits.

    Raises:
        UsageError: it cannot be read, or is no image.
    """
    try:
        return reencode(path.read_bytes(), ReencodeConfig()).data
    except OSError as error:
        raise UsageError(cannot_read(path, error)) from None
    except BadImage as error:
        raise UsageError(f"{path}: not an image that can be decoded: it {error}") from None


class FileReader(SizedReader):
    """Decodes image files in threads; batches have ``images`` ``[B, 3, S, S]``, channels last."""

    def __init__(self, files: Sequence[Path], transform: Transform, *, threads: int | None = None) -> None:
        """Read ``files``.

        Raises:
            UsageError: ``threads`` is below 1.
        """
        self.files, self.transform = files, transform
        self._threads = DecodeThreads(threads)
        self._side = transform.size_at(0)
        self.example_tokens = 3 * self._side**2

    @property
    def num_examples(self) -> int:
        """Number of files."""
        return len(self.files)

    @property
    def example_bytes(self) -> int:
        """Bytes of an image in a batch."""
        return self.example_tokens * 4

    def batch(self, epochs: npt.ArrayLike, indices: npt.ArrayLike) -> dict[str, npt.NDArray[Any]]:
        """Return the images ``indices`` as float32.

        Raises:
            UsageError: a file cannot be read, or is no image.
        """
        _, indices_ = example_names(epochs, indices)
        shape = (len(indices_), self._side, self._side, 3)
        images = np.empty(shape, np.float32).transpose(0, 3, 1, 2)

        def make(row: int) -> None:
            path = self.files[indices_[row]]
            image = read_image(path)
            try:
                self.transform(image, images[row], (0, 0, 0))
            except ShoalError as error:
                raise UsageError(f"{path}: {error}") from None

        self._threads.run(make, len(indices_))
        return {"images": images}

    def micro_batch(self, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Return the images unchanged."""
        return dict(arrays)
