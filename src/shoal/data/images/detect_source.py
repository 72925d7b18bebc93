"""Chooses the image source for a path: ImageNet's tars, or a folder of class folders."""

from __future__ import annotations

from pathlib import Path

from shoal.data.images.folder import FolderSource
from shoal.data.images.imagenet import TRAIN_TAR, VALIDATION_TAR, ImageNetSource
from shoal.data.images.sources import ImageSource
from shoal.errors import UsageError, did_you_mean


def detect_source(
    path: Path,
    *,
    validation: float | None = None,
    seed: int = 0,
    ground_truth: Path | None = None,
    synsets: Path | None = None,
) -> ImageSource:
    """Return the source in ``path``.

    Args:
        path: a folder, or ImageNet's tar of training images.
        validation: fraction of each class of a folder that is held out.
        seed: of the held-out images.
        ground_truth: of ImageNet's validation images, instead of the file beside the tars.
        synsets: the list of synsets, instead of the file beside the tars.

    Raises:
        UsageError: the path does not exist or is neither, or an option does not fit it.
        ShoalError: something cannot be read.
    """
    if path.name in (TRAIN_TAR, VALIDATION_TAR) and path.is_file():
        path = path.parent
    if not path.exists():
        near = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UsageError(f"{path}: there is no such folder." + did_you_mean(path.name, near))
    if not path.is_dir():
        raise UsageError(
            f"{path} is a file; give a folder of class folders, or the folder of {TRAIN_TAR} (other archives "
            "have to be unpacked first)"
        )
    if any((path / name).is_file() for name in (TRAIN_TAR, VALIDATION_TAR)):
        if validation is not None:
            raise UsageError(f"--validation {validation} is for folders; ImageNet has validation images")
        return ImageNetSource(path, ground_truth=ground_truth, synsets=synsets)
    for option, value in (("--ground-truth", ground_truth), ("--synsets", synsets)):
        if value is not None:
            raise UsageError(f"{option} {value} is for ImageNet's tars, and {path} has no {TRAIN_TAR}")
    return FolderSource(path, validation=validation, seed=seed)
