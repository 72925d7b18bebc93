"""Reads images from files as a model takes them, without labels: for predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.data.images.folder import SUFFIXES
from shoal.data.images.reader import DecodeThreads, Transform
from shoal.data.steps import SizedReader, example_names
from shoal.errors import ShoalError, UsageError


def image_files(inputs: Sequence[Path]) -> list[Path]:
    """Return the files of ``inputs``, and the images in its folders and their subfolders, in order of names.

    Raises:
        UsageError: an input is not there, or a folder has no images.
    """
    found: list[Path] = []
    for path in inputs:
        if not path.is_dir():
            if not path.is_file():
                raise UsageError(f"{path} does not exist: name images, or folders of images")
            found.append(path)
            continue
        inside = sorted(
            file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file()
        )
        if not inside:
            raise UsageError(f"{path}: no file in this folder has the suffix of an image")
        found += inside
    return found


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
            try:
                self.transform(path.read_bytes(), images[row], (0, 0, 0))
            except OSError as error:
                raise UsageError(f"{path} cannot be read: {error.strerror}") from None
            except ShoalError as error:
                raise UsageError(f"{path}: {error}") from None

        self._threads.run(make, len(indices_))
        return {"images": images}

    def micro_batch(self, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Return the images unchanged."""
        return dict(arrays)
